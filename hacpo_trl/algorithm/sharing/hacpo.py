"""HACPO, the paper's rule: four corrections make a peer's rollout fit to learn from (arXiv 2603.02604).

    capability-aware baseline     Eq. 6, 7          `advantages.py`
    capability coefficient        Eq. 8, 9, 10      `capability.py`; its weight is below
    exponential importance        Eq. 12            `objective.py`
    stepwise clipping             Eq. 13, 14        `objective.py`

Each can be switched off alone, for ablations.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..advantages import GroupAdvantages, group_advantages, own_group_advantages
from ..objective import cross_lower_bound, cross_objective, is_one
from ..shrinkage import own_weight, own_weight_sums, shrinkage_advantages
from .rule import SharingRule, Summed


@dataclass(frozen=True)
class HACPO(SharingRule):
    """HACPO; the attributes are the options of `HACPOConfig`.

    Attributes:
        alpha: α, see `cross_objective`.
        delta: δ, see `cross_lower_bound`.
        delta_step: δ_step, see `cross_lower_bound`.
        clip_cross: Whether peers' ratios are clipped at all.
        capability_weighting: Whether ω^(j,k) scales a peer's rollouts (Eq. 10).
        advantage_baseline: `"capability"` (Eq. 6), `"own"` or `"shrinkage"`.
        cross_advantage: Whose baseline a peer's rollout is measured by, `"learner"` (Eq. 50) or `"source"` (Eq. 10).
    """

    uses_capability: ClassVar[bool] = True
    step_options: ClassVar[tuple[str, ...]] = (
        "capability_window",
        "capability_metric",
        "ratio_normalization",
        "minibatch_order",
    )

    alpha: float
    delta: float
    delta_step: float
    clip_cross: bool
    capability_weighting: bool
    advantage_baseline: str
    cross_advantage: str

    def advantages(self, rewards: torch.Tensor, learner: int, ratios: torch.Tensor, summed: Summed) -> GroupAdvantages:
        if self.advantage_baseline == "own":
            return own_group_advantages(rewards, learner)
        if self.advantage_baseline == "shrinkage":
            # One weight for the whole step, however its prompts are dealt to processes.
            numerator, denominator = summed(own_weight_sums(rewards, learner, ratios))
            return shrinkage_advantages(rewards, learner, ratios, own_weight(numerator, denominator))
        return group_advantages(rewards, learner, ratios)

    def weight(self, ratio: float) -> float:
        return ratio if self.capability_weighting else 1.0

    def lower_bound(self, update: int) -> float | None:
        """Where peers' ratios are clipped below at update m of a step; None where they are not."""
        return cross_lower_bound(self.delta, self.delta_step, update) if self.clip_cross else None

    def cross_objective(
        self, ratio: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, update: int
    ) -> torch.Tensor:
        return cross_objective(ratio, advantages, weights, self.alpha, self.lower_bound(update))

    def discarded(
        self, ratio: torch.Tensor, advantages: torch.Tensor, update: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bound = self.lower_bound(update)
        if bound is None:
            nowhere = torch.zeros_like(ratio, dtype=torch.bool)
            return nowhere, nowhere
        inside = is_one(ratio)
        return (ratio < bound) & ~inside, (ratio > 1) & ~inside
