"""Settings that all tests share."""

import os
from pathlib import Path

import pytest


# No test may need the Hub; and two test processes at once must not fight over the cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parent.parent
