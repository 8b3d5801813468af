"""What a rule of sharing is: everything about learning from rollouts in which algorithms differ."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch

from ..advantages import GroupAdvantages


# Adds numbers up over all processes. Every process must call it.
Summed = Callable[[tuple[float, ...]], tuple[float, ...]]


@dataclass(frozen=True)
class SharingRule(ABC):
    """A rule: which advantages rollouts have in a learner's eyes, and what its peers' contribute to its objective.

    A rule's fields are settings of `HACPOConfig` that its equations read, by the same names. What the step reads on
    its behalf is in `step_options`.

    Attributes:
        shares: Whether learners get their peers' rollouts at all.
        token_level: Whether ratios are those of tokens (GRPO), not of sequences (GSPO).
        uses_capability: Whether capability ratios ω play a part.
        step_options: Further settings that have an effect under this rule, and under no rule that does not name them.
        default_epsilon: Clip range of own ratios, below and above 1, unless the settings say otherwise.
        epsilon: Clip range below 1.
        epsilon_high: Clip range above 1.
    """

    shares: ClassVar[bool] = True
    token_level: ClassVar[bool] = False
    uses_capability: ClassVar[bool] = False
    step_options: ClassVar[tuple[str, ...]] = ()
    # GSPO's holds sequence ratios, which stay within a fraction of a percent of 1 (arXiv 2507.18071, section 5.1).
    default_epsilon: ClassVar[tuple[float, float]] = (3e-4, 4e-4)

    epsilon: float
    epsilon_high: float

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        """The rule with its fields taken from an object that has them by the same names, such as a `HACPOConfig`."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The settings that not every rule reads, but this one."""
        everybody = {field.name for field in fields(SharingRule)}
        own = [field.name for field in fields(cls) if field.name not in everybody]
        return (*own, *cls.step_options)

    @abstractmethod
    def advantages(self, rewards: torch.Tensor, learner: int, ratios: torch.Tensor, summed: Summed) -> GroupAdvantages:
        """The advantages of a step's rollouts in the eyes of one learner.

        Args:
            rewards: `(B, n, G)` float, NaN where a rollout has no verdict.
            learner: Index of the learner k among the n agents.
            ratios: `(n,)`, ω^(k,j) for every source j; 1 for the learner itself.
            summed: For what has to be known of the prompts of all processes.

        Returns:
            Advantages `(B, n, G)`; `(B, 1, G)`, the learner's own, under a rule that shares nothing.
        """

    def weight(self, ratio: float) -> float:
        """What a peer's rollout is scaled by. `ratio`: ω^(j,k), the source's capability over the learner's."""
        return 1.0

    def cross_objective(
        self, ratio: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, update: int
    ) -> torch.Tensor:
        """The objective of peers' rollouts.

        Args:
            ratio: `(R,)`, sequence ratios s^(k,j).
            advantages: `(R,)`.
            weights: `(R,)`, see `weight`.
            update: m, the index of the optimizer update within its step.

        Returns:
            `(R,)`.
        """
        raise TypeError(f"{type(self).__name__} shares no rollouts, so there is no objective of peers'.")

    def discarded(
        self, ratio: torch.Tensor, advantages: torch.Tensor, update: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the peers' rollouts have no gradient because clipping holds their ratio: below and above.

        Args:
            ratio: As for `cross_objective`.
            advantages: `(R,)`.
            update: m.

        Returns:
            Two `(R,)` bool tensors.
        """
        below = (ratio < 1 - self.epsilon) & (advantages < 0)
        above = (ratio > 1 + self.epsilon_high) & (advantages > 0)
        return below, above
