"""Settings and fixtures that all tests share."""

import gc
import os
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings


# No test may need the Hub. One thread: tiny models are no faster with more, and processes must not fight over cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The same examples in every run. `pytest --hypothesis-profile=default` looks for others.
settings.register_profile("same", derandomize=True, database=None, deadline=None, max_examples=50)
settings.load_profile("same")


def pytest_collection_finish(session):
    # What the tests have imported stays: later collections need not go through it.
    gc.freeze()


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def policies_folder(request) -> Path:
    """A `HACPO_TRL_CACHE` for tests that train or sample for real: all processes of all runs of the tests share it.

    The pairs that most of them begin with are in it. What else they ask for is made on first use.
    """
    from hacpo_trl.embedded import policy_paths

    folder = request.config.cache.mkdir("policies")
    with FileLock(folder / "lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HACPO_TRL_CACHE", str(folder))
        policy_paths(["qwen3-words", "llama-words", "qwen3", "llama"])
    return folder
