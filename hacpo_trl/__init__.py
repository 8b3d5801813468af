"""Heterogeneous-agent collaborative RL (HACPO, arXiv 2603.02604) for language models, in the style of TRL.

For a run: `HACPOTrainer`, `HACPOConfig`, `AgentConfig`, the reward functions in `rewards`, tiny models and a task in
`embedded`. For extensions: `SharingRule`, `Rollout`, and `GenerationBackend` with its `GenerationRequest` and
`Completion`. docs/house.svg is the plan of the folders; `trainer.py` is where to begin to read.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__


if TYPE_CHECKING:
    from . import embedded, rewards
    from .algorithm.sharing import SharingRule
    from .config import AgentConfig, HACPOConfig
    from .generation.backend import Completion, GenerationBackend, GenerationRequest
    from .rollouts.rollout import Rollout
    from .trainer import HACPOTrainer

__all__ = [
    "AgentConfig",
    "Completion",
    "GenerationBackend",
    "GenerationRequest",
    "HACPOConfig",
    "HACPOTrainer",
    "Rollout",
    "SharingRule",
    "__version__",
    "embedded",
    "rewards",
]

_MODULE_OF = {
    "AgentConfig": "config",
    "Completion": "generation.backend",
    "GenerationBackend": "generation.backend",
    "GenerationRequest": "generation.backend",
    "HACPOConfig": "config",
    "HACPOTrainer": "trainer",
    "Rollout": "rollouts.rollout",
    "SharingRule": "algorithm.sharing",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: a vLLM server loads this package for its plugin alone, and must not import TRL, which
    # imports vLLM; and `hacpo --help` need not wait for torch.
    if name in ("embedded", "rewards"):
        return importlib.import_module(f".{name}", __name__)
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
