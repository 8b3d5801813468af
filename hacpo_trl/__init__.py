"""Heterogeneous-agent collaborative RL (HACPO, arXiv 2603.02604) for language models, in the style of TRL."""

from .config import AgentConfig, HACPOConfig
from .rollout import Rollout
from .trainer import HACPOTrainer
from .version import __version__


__all__ = ["AgentConfig", "HACPOConfig", "HACPOTrainer", "Rollout", "__version__"]
