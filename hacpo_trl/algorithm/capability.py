"""Capability: how well each agent does lately, and the ratios between agents (HACPO, arXiv 2603.02604, Eq. 8 and 9).

P_t^(k), the *performance* of agent k in step t, is one number: the mean reward of all its rollouts of that step, over
all prompts and all processes. Its *capability* P̂^(k) is the mean of its last K performances, the current step
included. The *capability ratio* ω^(k,j) = P̂^(k) / P̂^(j) then says how much better agent k is than agent j.

Where the paper is silent:

1. A ratio is clamped to [0.1, 10]: a peer that never succeeds must not be scaled to infinity.
2. A negative capability counts as 0 (and is warned about once), 0/0 is 1, so that a ratio is never NaN. Rewards that
   can be negative want `capability_metric="success_rate"`.
3. A step in which an agent has no verdict at all (every reward None) leaves its window as it was.

The window is part of a checkpoint: a resumed run sees the ratios it would have seen.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence

import torch


logger = logging.getLogger(__name__)

# A hundredfold spread between agents is more than five steps of noisy rewards can establish.
RATIO_MIN, RATIO_MAX = 0.1, 10.0


def performance_counts(rewards: torch.Tensor, metric: str) -> tuple[float, int]:
    """Sum and count whose quotient is the performance P_t of one agent.

    They are returned apart so that processes can add theirs up before dividing.

    Args:
        rewards: `(N,)` float, NaN where a rollout has no verdict.
        metric: `"mean_reward"` (Eq. 9) or `"success_rate"`, the share of rewards above 0.

    Returns:
        The sum over the rollouts with a verdict, and their number.
    """
    verdicts = rewards[~torch.isnan(rewards)]
    values = (verdicts > 0) if metric == "success_rate" else verdicts
    return float(values.double().sum()), len(verdicts)


class CapabilityWindow:
    """The last K performances of each agent, and the ratios that follow from them.

    Args:
        agents: The agents' names.
        size: K, how many steps a capability looks back (`capability_window`).
    """

    def __init__(self, agents: Sequence[str], size: int):
        self.performances: dict[str, deque[float]] = {name: deque(maxlen=size) for name in agents}
        self._warned: set[str] = set()

    def update(self, performances: Mapping[str, float | None]) -> None:
        """Appends this step's performance of each agent; None (no verdict in the whole step) appends nothing."""
        for name, performance in performances.items():
            if performance is None:
                continue
            window = self.performances[name]
            window.append(performance)
            capability = sum(window) / len(window)
            if capability <= 0 and name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    f"Agent '{name}' has capability {capability:.4g} over its last {len(window)} "
                    f"steps. Capabilities of 0 or less are floored at 0, and ratios to "
                    f"this agent are clamped to [{RATIO_MIN}, {RATIO_MAX}]. If rewards can be negative, set "
                    "capability_metric='success_rate'."
                )

    def capability(self, name: str) -> float | None:
        """P̂ of one agent (Eq. 9): the mean of its window, or None before its first performance."""
        window = self.performances[name]
        return sum(window) / len(window) if window else None

    def ratio(self, learner: str, source: str) -> float:
        """ω^(learner, source) = P̂^(learner) / P̂^(source) (Eq. 8), in [0.1, 10]."""
        numerator, denominator = self.capability(learner), self.capability(source)
        if learner == source or numerator is None or denominator is None:
            return 1.0
        numerator, denominator = max(numerator, 0.0), max(denominator, 0.0)
        if denominator == 0.0:
            return 1.0 if numerator == 0.0 else RATIO_MAX
        return min(max(numerator / denominator, RATIO_MIN), RATIO_MAX)

    def state_dict(self) -> dict[str, list[float]]:
        return {name: list(window) for name, window in self.performances.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        if set(state) != set(self.performances):
            raise ValueError(
                f"The checkpoint holds the capability windows of the agents {sorted(state)}, but this run has "
                f"{sorted(self.performances)}. Resume with the same agents."
            )
        for name, window in state.items():
            self.performances[name].clear()
            self.performances[name].extend(window)
