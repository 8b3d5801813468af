"""Heterogeneous-agent collaborative RL (HACPO, arXiv 2603.02604) for language models, in the style of TRL."""

import importlib
from typing import TYPE_CHECKING

from .version import __version__


if TYPE_CHECKING:
    from .config import AgentConfig, HACPOConfig
    from .rollouts.rollout import Rollout
    from .trainer import HACPOTrainer

__all__ = ["AgentConfig", "HACPOConfig", "HACPOTrainer", "Rollout", "__version__"]

_MODULE_OF = {
    "AgentConfig": "config",
    "HACPOConfig": "config",
    "HACPOTrainer": "trainer",
    "Rollout": "rollouts.rollout",
}


def __getattr__(name: str):
    # Imported on first use: a vLLM server loads this package for its plugin alone, and must not import TRL, which
    # imports vLLM.
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
