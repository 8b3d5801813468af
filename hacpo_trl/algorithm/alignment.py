"""Alignment: whether a peer is more confident than the learner where its answers are good (Theorem 4.3)."""

from typing import Protocol

import torch


# (learner, source) -> prompt -> pairs (c_i, R_i)
Pairs = dict[tuple[str, str], dict[int, list[tuple[float, float]]]]


class CorrelationLog(Protocol):
    """What a correlation is written to; `hacpo_trl.reporting.metrics.Metrics` is one."""

    def correlation(self, name: str, x: torch.Tensor, y: torch.Tensor) -> None: ...


class Alignment:
    """How well a source's confidence tells good answers from bad ones: the proxy for Theorem 4.3.

    The theorem says that gradients on a peer's rollouts point the way of own gradients under Assumption D.12, which
    speaks of gradients (`hacpo_trl.theory.gradients`). Remark D.13 has a proxy for it: the source is more confident
    than the learner where its answers are good. Measured for each learner and source: the correlation ρ, within
    prompts, of c_i = (log π_j − log π_k)/|y| = −log s with the rewards R_i of the source's rollouts. π_k is the
    learner at the update that trains on the rollout, so that ρ costs no forward pass; rollouts that are not trained on
    (advantage 0, dropped) do not count.
    """

    def __init__(self) -> None:
        self._pairs: Pairs = {}

    def state(self) -> Pairs:
        return self._pairs

    def load_state(self, state: Pairs) -> None:
        self._pairs = state

    def add(self, learner: str, source: str, prompt_index: int, log_ratio: float, reward: float) -> None:
        by_prompt = self._pairs.setdefault((learner, source), {})
        by_prompt.setdefault(prompt_index, []).append((-log_ratio, reward))

    def flush(self, metrics: CorrelationLog) -> None:
        """Logs `<learner>/alignment/<source>` and starts anew."""
        for (learner, source), by_prompt in self._pairs.items():
            pairs = [torch.tensor(values, dtype=torch.float64) for values in by_prompt.values()]
            confidence, reward = torch.cat([values - values.mean(0) for values in pairs]).T
            metrics.correlation(f"{learner}/alignment/{source}", confidence, reward)
        self._pairs = {}
