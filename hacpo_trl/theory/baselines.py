"""Theorem 4.1 by Monte Carlo: agents are nothing but a success probability p_k(q) for each prompt.

Averaged over prompts, the capability-aware baseline μ̂^(k) is the learner's expected reward. What is exact and what is
not follows from Eq. 6:

- with K = 1 and without the fallback, the mean of μ̂^(k) over a step's prompts *is* the learner's mean reward of the
  step, since ω^(k,j) P^(j) = P^(k);
- with any K, as long as nobody's success changes, the expectation of that mean is p̄_k: the steps of a window are
  exchangeable, and averaged over them ω^(k,j) P^(j) is P̂^(k) again;
- when the learner improves, P̂^(k) lags behind, and the baseline is too low;
- on one prompt the bias is (1/n) Σ_j [ω^(k,j) p_j(q)] − p_k(q), which vanishes only where success is proportional.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..algorithm.advantages import group_advantages, own_group_advantages
from ..algorithm.capability import CapabilityWindow
from ..algorithm.shrinkage import own_weight, own_weight_sums, shrinkage_advantages


BASELINES = ("pooled", "capability, no fallback", "capability", "own", "shrinkage")


def population(kind: str, prompts: int = 512, seed: int = 0) -> torch.Tensor:
    """Success probabilities `(prompts, 2)` of a weaker and a stronger agent.

    "proportional": p_0 = p_1 / 2 on every prompt; "same order": both find the same prompts hard, on a logit scale;
    "complementary": each has a third of the prompts on which it is good and the other is not, and they share a third.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "proportional":
        stronger = 0.05 + 0.9 * torch.rand(prompts, generator=generator, dtype=torch.float64)
        return torch.stack([stronger / 2, stronger], dim=1)
    difficulty = torch.randn(prompts, 1, generator=generator, dtype=torch.float64)
    if kind == "same order":
        return torch.sigmoid(torch.tensor([-1.0, 0.5]) + 1.5 * difficulty)
    family = torch.arange(prompts) % 3
    skill = torch.tensor([[1.0, -1.5], [-3.0, 1.5], [-0.5, 0.5]], dtype=torch.float64)[family]
    return torch.sigmoid(skill + 0.5 * difficulty)


def baseline(name: str, rewards: torch.Tensor, learner: int, ratios: torch.Tensor) -> torch.Tensor:
    """A learner's baseline on each prompt, `(B,)`, of rewards `(B, n, G)`."""
    if name == "pooled":
        return group_advantages(rewards, learner, torch.ones_like(ratios)).baseline
    if name == "capability, no fallback":
        # The pooled mean of rewards that are scaled already never lies above all of them.
        return group_advantages(rewards * ratios.view(1, -1, 1), learner, torch.ones_like(ratios)).baseline
    if name == "capability":
        return group_advantages(rewards, learner, ratios).baseline
    if name == "own":
        return own_group_advantages(rewards, learner).baseline
    weight = own_weight(*own_weight_sums(rewards, learner, ratios))
    return shrinkage_advantages(rewards, learner, ratios, weight).baseline


@dataclass(frozen=True)
class BaselineErrors:
    """How a learner's baseline on a prompt differs from its success probability there.

    Attributes:
        mean: Averaged over prompts and steps (Theorem 4.1 says 0).
        standard_error: Of `mean`, from blocks of steps.
        of_step: Root mean square of a step's mean error.
        bias: Root mean square over prompts of the error's expectation on the prompt, sampling noise subtracted.
        std: Standard deviation on a prompt, root mean square over prompts.
        rmse: Root mean square of all errors.
    """

    mean: float
    standard_error: float
    of_step: float
    bias: float
    std: float
    rmse: float


def simulate(
    success: torch.Tensor,
    names: Sequence[str] = BASELINES,
    generations: int = 8,
    prompts_per_step: int = 64,
    window: int = 5,
    steps: int = 1000,
    seed: int = 0,
) -> dict[tuple[str, int], BaselineErrors]:
    """Steps of `prompts_per_step` prompts out of a population with fixed success probabilities `(M, n)`.

    Returns:
        The errors for each baseline and learner.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts, agents = success.shape
    capability = CapabilityWindow(list(map(str, range(agents))), window)
    keys = [(name, learner) for name in names for learner in range(agents)]
    errors: dict[tuple[str, int], list[torch.Tensor]] = {key: [] for key in keys}
    chosen_in_step = []
    for step in range(steps + window - 1):
        chosen = torch.randperm(prompts, generator=generator)[:prompts_per_step]
        drawn = torch.rand(len(chosen), agents, generations, generator=generator, dtype=torch.float64)
        rewards = (drawn < success[chosen, :, None]).double()
        capability.update({str(k): float(rewards[:, k].mean()) for k in range(agents)})
        if step < window - 1:
            continue
        chosen_in_step.append(chosen)
        for name, learner in keys:
            ratios = torch.tensor([capability.ratio(str(learner), str(j)) for j in range(agents)]).double()
            errors[name, learner].append(baseline(name, rewards, learner, ratios) - success[chosen, learner])
    chosen = torch.stack(chosen_in_step)
    return {key: _baseline_errors(torch.stack(of_key), chosen, prompts) for key, of_key in errors.items()}


def _baseline_errors(errors: torch.Tensor, chosen: torch.Tensor, prompts: int) -> BaselineErrors:
    """`errors`, `chosen`: `(steps, B)`."""
    of_step = errors.mean(1)
    # Steps that share a window are not independent; blocks of many of them nearly are.
    blocks = torch.stack([block.mean() for block in of_step.chunk(20)])
    sums = [
        torch.zeros(prompts, dtype=torch.float64).index_add(0, chosen.flatten(), values.flatten())
        for values in (torch.ones_like(errors), errors, errors**2)
    ]
    # A prompt that came up once has no variance to subtract.
    sums = [values[sums[0] > 1] for values in sums]
    count, mean = sums[0], sums[1] / sums[0]
    variance = (sums[2] - count * mean**2) / (count - 1)
    return BaselineErrors(
        mean=float(of_step.mean()),
        standard_error=float(blocks.std() / len(blocks) ** 0.5),
        of_step=float((of_step**2).mean().sqrt()),
        bias=float((mean**2 - variance / count).mean().clamp(min=0).sqrt()),
        std=float(variance.mean().sqrt()),
        rmse=float((errors**2).mean().sqrt()),
    )


def improving_learner(window: int, runs: int = 100, steps: int = 40, prompts: int = 64, seed: int = 0) -> float:
    """The mean error of the baseline over runs in which the learner's success rises by half a percentage point a
    step, its peer's stays."""
    generator, errors = torch.Generator().manual_seed(seed), []
    for _ in range(runs):
        capability = CapabilityWindow(["learner", "peer"], window)
        for step in range(steps):
            success = torch.tensor([0.3 + 0.005 * step, 0.5]).double()
            drawn = torch.rand(prompts, 2, 8, generator=generator, dtype=torch.float64)
            rewards = (drawn < success.view(1, 2, 1)).double()
            capability.update({"learner": float(rewards[:, 0].mean()), "peer": float(rewards[:, 1].mean())})
            ratios = torch.tensor([1.0, capability.ratio("learner", "peer")]).double()
            if step >= window - 1:
                errors.append(float(baseline("capability, no fallback", rewards, 0, ratios).mean() - success[0]))
    return sum(errors) / len(errors)
