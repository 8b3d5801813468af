"""GSPO and GRPO: every agent learns from its own rollouts alone. What sharing is compared with."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..advantages import GroupAdvantages, group_advantages
from .rule import SharingRule, Summed


@dataclass(frozen=True)
class GSPO(SharingRule):
    """Sequence-level ratios (arXiv 2507.18071)."""

    shares: ClassVar[bool] = False

    def advantages(self, rewards: torch.Tensor, learner: int, ratios: torch.Tensor, summed: Summed) -> GroupAdvantages:
        return group_advantages(rewards[:, learner : learner + 1], 0, torch.ones(1))


@dataclass(frozen=True)
class GRPO(GSPO):
    """Token-level ratios (arXiv 2402.03300), with the clip range of DAPO (arXiv 2503.14476)."""

    token_level: ClassVar[bool] = True
    default_epsilon: ClassVar[tuple[float, float]] = (0.2, 0.28)
