"""Naive sharing, the paper's baseline: rollouts are pooled as if the learner had sampled all of them."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..advantages import GroupAdvantages, group_advantages
from ..objective import own_objective
from .rule import SharingRule, Summed


@dataclass(frozen=True)
class Naive(SharingRule):
    """Pooled mean and standard deviation, GSPO's clipped objective for own and peers' rollouts alike.

    Whose old log-probabilities peers' rollouts have is `naive_old_logprobs`.
    """

    step_options: ClassVar[tuple[str, ...]] = ("ratio_normalization", "minibatch_order", "naive_old_logprobs")

    def advantages(self, rewards: torch.Tensor, learner: int, ratios: torch.Tensor, summed: Summed) -> GroupAdvantages:
        return group_advantages(rewards, learner, torch.ones(rewards.shape[1]))

    def cross_objective(
        self, ratio: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, update: int
    ) -> torch.Tensor:
        return own_objective(ratio, advantages, self.epsilon, self.epsilon_high)
