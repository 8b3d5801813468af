"""Group advantages with the capability-aware baseline (HACPO, arXiv 2603.02604, Eq. 6 and 7).

The group of a prompt q holds the rollouts of all n agents, G from each. For learner k

    baseline   μ̂^(k)(q) = 1/(nG) Σ_j Σ_i ω^(k,j) R(y_i^(j))
    advantage  A^(k)_i   = (R_i − μ̂^(k)) / (σ(q) + 1e-4)

where ω^(k,j) scales the rewards of agent j to the capability of the learner, and σ(q) is the standard deviation of the
group's nG raw rewards (unbiased). With one agent this is GRPO's advantage, TRL's epsilon included.

Averaged over prompts the baseline is unbiased (Theorem 4.1). It is *not* unbiased prompt by prompt: one ω serves
prompts of every difficulty. The fallback below adds a bias of its own for the stronger agent.

Because one ω leaves a bias on each prompt, there are two other baselines: the learner's own group alone
(`own_group_advantages`, an ablation of the paper) and a mixture of both kinds of means, in `shrinkage.py`.

Guards, each of them an edge case the equations leave open:

1. A group whose rewards are all equal has no signal: its advantages are 0. (Otherwise ω ≠ 1 would divide a baseline
   that is off by a little by σ = 0.)
2. A baseline above every reward of the group, possible when ω > 1, would call the best answers bad; one below every
   reward, possible when ω < 1 or rewards are negative, the worst ones good. Both fall back to the learner's own mean
   reward on the prompt.
3. A rollout without a verdict (reward None, here NaN) leaves every mean and gets advantage 0.
4. Statistics are taken in float64: the square of a reward of 1e20 is beyond float32.
"""

from dataclasses import dataclass

import torch


# TRL's GRPOTrainer adds the same to the standard deviation.
STD_EPSILON = 1e-4
# Rewards closer than this, relative to their size, are equal: weighted sums of rewards carry rounding.
EQUALITY_TOLERANCE = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """What one learner makes of the rewards of B groups of n agents with G rollouts each.

    Attributes:
        advantages: `(B, n, G)`, 0 where there is no verdict or no signal.
        baseline: `(B,)`, μ̂ after the fallback. With `shrinkage_advantages`, that of the peers' rollouts.
        std: `(B,)`, σ.
        fallback: `(B,)` bool, where the learner's own mean replaced the baseline.
        uniform: `(B,)` bool, where all rewards are equal.
        own_weight: λ of `shrinkage_advantages`; None with other baselines.
    """

    advantages: torch.Tensor
    baseline: torch.Tensor
    std: torch.Tensor
    fallback: torch.Tensor
    uniform: torch.Tensor
    own_weight: float | None = None


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the last dimension where `mask` holds; 0 where it holds nowhere. `(B, N)` -> `(B,)`."""
    return torch.where(mask, values, 0).sum(-1) / mask.sum(-1).clamp(min=1)


@dataclass(frozen=True)
class RawRewards:
    """What the rewards of B groups say whoever the learner is; each `(B,)`. See `GroupAdvantages`."""

    mean: torch.Tensor
    std: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor
    uniform: torch.Tensor


def raw_rewards(rewards: torch.Tensor) -> RawRewards:
    """What all learners see of `(B, n, G)` rewards, NaN where a rollout has no verdict."""
    group = rewards.flatten(1)
    in_group = ~torch.isnan(group)
    highest = torch.where(in_group, group, -torch.inf).amax(-1)
    lowest = torch.where(in_group, group, torch.inf).amin(-1)
    # A group with no verdict at all has highest = -inf, lowest = inf: uniform as well.
    uniform = highest - lowest <= EQUALITY_TOLERANCE * highest.abs().clamp(min=1)
    mean = _masked_mean(group, in_group)
    squares = torch.where(in_group, (group - mean[:, None]) ** 2, 0).sum(-1)
    std = (squares / (in_group.sum(-1) - 1).clamp(min=1)).sqrt()
    return RawRewards(mean, std, lowest, highest, uniform)


def group_advantages(rewards: torch.Tensor, learner: int, ratios: torch.Tensor) -> GroupAdvantages:
    """The advantage of every rollout of a group in the eyes of one learner (Eq. 6 and 7).

    Two baselines of other algorithms are special cases: all ratios 1 is the pooled mean of naive sharing, and the
    learner's rollouts alone (n = 1) are GRPO's and GSPO's group.

    Args:
        rewards: `(B, n, G)` float, NaN where a rollout has no verdict.
        learner: Index of the learner k among the n agents.
        ratios: `(n,)`, ω^(k,j) for every source j; 1 for the learner itself.
    """
    num_agents = rewards.shape[1]
    dtype, rewards = rewards.dtype, rewards.double()
    verdict = ~torch.isnan(rewards)
    raw = raw_rewards(rewards)

    scaled = rewards * ratios.to(rewards).view(1, num_agents, 1)
    baseline = _masked_mean(scaled.flatten(1), verdict.flatten(1))
    own, own_verdict = rewards[:, learner], verdict[:, learner]
    own_mean = torch.where(own_verdict.any(-1), _masked_mean(own, own_verdict), raw.mean)
    fallback = ((baseline > raw.highest) | (baseline < raw.lowest)) & ~raw.uniform
    baseline = torch.where(fallback, own_mean, baseline)

    rewards, baseline, std = rewards.to(dtype), baseline.to(dtype), raw.std.to(dtype)
    advantages = (rewards - baseline.view(-1, 1, 1)) / (std.view(-1, 1, 1) + STD_EPSILON)
    advantages = torch.where(verdict & ~raw.uniform.view(-1, 1, 1), advantages, 0)
    return GroupAdvantages(advantages, baseline, std, fallback, raw.uniform)


def own_group_advantages(rewards: torch.Tensor, learner: int) -> GroupAdvantages:
    """The ablation `advantage_baseline="own"` (Table 2): mean and standard deviation of the learner's own G rollouts.

    The peers' rollouts are measured against the same mean and standard deviation. Where the learner's own rewards are
    all equal there is no scale to measure by, and the whole group gets advantage 0.

    Args:
        rewards: `(B, n, G)` float, NaN where a rollout has no verdict.
        learner: Index of the learner k among the n agents.
    """
    dtype, rewards = rewards.dtype, rewards.double()
    own = group_advantages(rewards[:, learner : learner + 1], 0, torch.ones(1))
    advantages = (rewards - own.baseline.view(-1, 1, 1)) / (own.std.view(-1, 1, 1) + STD_EPSILON)
    usable = ~torch.isnan(rewards) & ~own.uniform.view(-1, 1, 1)
    advantages = torch.where(usable, advantages, 0).to(dtype)
    return GroupAdvantages(advantages, own.baseline.to(dtype), own.std.to(dtype), own.fallback, own.uniform)
