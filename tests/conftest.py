"""Settings that all tests share."""

import os
from pathlib import Path

import pytest


# No test may need the Hub. One thread: tiny models are no faster with more, and processes must not fight over cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parent.parent
