"""Group advantages with the capability-aware baseline (HACPO, arXiv 2603.02604, Eq. 6 and 7).

The group of a prompt q holds the rollouts of all n agents, G from each. For learner k

    baseline   μ̂^(k)(q) = 1/(nG) Σ_j Σ_i ω^(k,j) R(y_i^(j))
    advantage  A^(k)_i   = (R_i − μ̂^(k)) / (σ(q) + 1e-4)

where ω^(k,j) scales the rewards of agent j to the capability of the learner, and σ(q) is the standard deviation of the
group's nG raw rewards (unbiased). With one agent this is GRPO's advantage, TRL's epsilon included.

Averaged over prompts the baseline is unbiased (Theorem 4.1). It is *not* unbiased prompt by prompt: one ω serves
prompts of every difficulty. The fallback below adds a bias of its own for the stronger agent.

Because one ω leaves a bias on each prompt, there are two other baselines: the learner's own group alone
(`own_group_advantages`, an ablation of the paper) and a mixture of both kinds of means, weighted by what predicts the
learner's rewards best (`shrinkage_advantages`, which is not the paper's).

Guards, each of them an edge case the equations leave open:

1. A group whose rewards are all equal has no signal: its advantages are 0. (Otherwise ω ≠ 1 would divide a baseline
   that is off by a little by σ = 0.)
2. A baseline above every reward of the group, possible when ω > 1, would call the best answers bad. It falls back to
   the learner's own mean reward on the prompt.
3. A rollout without a verdict (reward None, here NaN) leaves every mean and gets advantage 0.
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
    """

    advantages: torch.Tensor
    baseline: torch.Tensor
    std: torch.Tensor
    fallback: torch.Tensor
    uniform: torch.Tensor


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the last dimension where `mask` holds; 0 where it holds nowhere. `(B, N)` -> `(B,)`."""
    return torch.where(mask, values, 0).sum(-1) / mask.sum(-1).clamp(min=1)


@dataclass(frozen=True)
class _RawRewards:
    """What the rewards of B groups say whoever the learner is; each `(B,)`. See `GroupAdvantages`."""

    mean: torch.Tensor
    std: torch.Tensor
    highest: torch.Tensor
    uniform: torch.Tensor


def _raw_rewards(rewards: torch.Tensor) -> _RawRewards:
    group = rewards.flatten(1)
    in_group = ~torch.isnan(group)
    highest = torch.where(in_group, group, -torch.inf).amax(-1)
    lowest = torch.where(in_group, group, torch.inf).amin(-1)
    # A group with no verdict at all has highest = -inf, lowest = inf: uniform as well.
    uniform = highest - lowest <= EQUALITY_TOLERANCE * highest.abs().clamp(min=1)
    mean = _masked_mean(group, in_group)
    squares = torch.where(in_group, (group - mean[:, None]) ** 2, 0).sum(-1)
    std = (squares / (in_group.sum(-1) - 1).clamp(min=1)).sqrt()
    return _RawRewards(mean, std, highest, uniform)


def group_advantages(rewards: torch.Tensor, learner: int, ratios: torch.Tensor) -> GroupAdvantages:
    """The advantage of every rollout of a group in the eyes of one learner (Eq. 6 and 7).

    Two baselines of other algorithms are special cases: all ratios 1 is the pooled mean of naive sharing, and the
    learner's rollouts alone (n = 1) are GRPO's and GSPO's group.

    Args:
        rewards: `(B, n, G)` float, NaN where a rollout has no verdict.
        learner: Index of the learner k among the n agents.
        ratios: `(n,)`, ω^(k,j) for every source j; 1 for the learner itself.
    """
    num_groups, num_agents, num_generations = rewards.shape
    verdict = ~torch.isnan(rewards)
    raw = _raw_rewards(rewards)

    scaled = rewards * ratios.to(rewards).view(1, num_agents, 1)
    baseline = _masked_mean(scaled.flatten(1), verdict.flatten(1))
    own, own_verdict = rewards[:, learner], verdict[:, learner]
    own_mean = torch.where(own_verdict.any(-1), _masked_mean(own, own_verdict), raw.mean)
    fallback = (baseline > raw.highest) & ~raw.uniform
    baseline = torch.where(fallback, own_mean, baseline)

    advantages = (rewards - baseline.view(-1, 1, 1)) / (raw.std.view(-1, 1, 1) + STD_EPSILON)
    advantages = torch.where(verdict & ~raw.uniform.view(-1, 1, 1), advantages, 0)
    assert advantages.shape == (num_groups, num_agents, num_generations)
    return GroupAdvantages(advantages, baseline, raw.std, fallback, raw.uniform)


def own_group_advantages(rewards: torch.Tensor, learner: int) -> GroupAdvantages:
    """The ablation `advantage_baseline="own"` (Table 2): mean and standard deviation of the learner's own G rollouts.

    The peers' rollouts are measured against the same mean and standard deviation. Where the learner's own rewards are
    all equal there is no scale to measure by, and the whole group gets advantage 0.

    Args:
        rewards: `(B, n, G)` float, NaN where a rollout has no verdict.
        learner: Index of the learner k among the n agents.
    """
    own = group_advantages(rewards[:, learner : learner + 1], 0, torch.ones(1))
    advantages = (rewards - own.baseline.view(-1, 1, 1)) / (own.std.view(-1, 1, 1) + STD_EPSILON)
    usable = ~torch.isnan(rewards) & ~own.uniform.view(-1, 1, 1)
    return GroupAdvantages(torch.where(usable, advantages, 0), own.baseline, own.std, own.fallback, own.uniform)


# ---- a baseline between the learner's own mean and its peers' -------------------------------------------------------


@dataclass(frozen=True)
class _LearnerMeans:
    """The two predictions of a learner's reward on B prompts, each 0 where there is nothing to take a mean of.

    Attributes:
        own: `(B,)`, the mean of the learner's rewards.
        others: `(B, G)`, for each of the learner's rollouts the mean of its other ones.
        peers: `(B,)`, the mean of the peers' rewards, scaled to the learner's capability by ω^(k,j).
        num_own: `(B,)`, verdicts on the learner's rollouts.
        num_peers: `(B,)`, verdicts on the peers' rollouts.
    """

    own: torch.Tensor
    others: torch.Tensor
    peers: torch.Tensor
    num_own: torch.Tensor
    num_peers: torch.Tensor


def _learner_means(rewards: torch.Tensor, learner: int, ratios: torch.Tensor) -> _LearnerMeans:
    verdict = ~torch.isnan(rewards)
    known, own_verdict = torch.where(verdict, rewards, 0), verdict[:, learner]
    own_sum, num_own = known[:, learner].sum(-1), own_verdict.sum(-1)
    others = (own_sum[:, None] - known[:, learner]) / (num_own[:, None] - own_verdict.int()).clamp(min=1)
    is_peer = torch.arange(rewards.shape[1], device=rewards.device) != learner
    scaled = (known * ratios.to(rewards).view(1, -1, 1))[:, is_peer]
    num_peers = verdict[:, is_peer].sum((1, 2))
    return _LearnerMeans(
        own_sum / num_own.clamp(min=1), others, scaled.sum((1, 2)) / num_peers.clamp(min=1), num_own, num_peers
    )


def own_weight_sums(rewards: torch.Tensor, learner: int, ratios: torch.Tensor) -> tuple[float, float]:
    """The two sums whose quotient is the weight λ of the learner's own mean in `shrinkage_advantages`.

    Each rollout i of the learner in turn is left out and predicted by λ x_i + (1 − λ) z, x_i the mean of the learner's
    other rollouts of the prompt, z its peers' scaled mean. The squared errors are least at

        λ = Σ (x_i − z)(R_i − z) / Σ (x_i − z)²

    where the sums run over all rollouts and prompts that have all three: a verdict, another verdict of the learner, a
    peer's verdict. Groups whose rewards are all equal count, too: leaving them out would choose prompts by the very
    rewards that are to be predicted. The sums are returned apart so that processes can add theirs up.

    Args:
        rewards: `(B, n, G)` float, NaN where a rollout has no verdict.
        learner: Index of the learner k among the n agents.
        ratios: `(n,)`, ω^(k,j) for every source j.
    """
    means = _learner_means(rewards.double(), learner, ratios)
    own, peers = rewards[:, learner].double(), means.peers[:, None]
    usable = ~torch.isnan(own) & (means.num_own > 1)[:, None] & (means.num_peers > 0)[:, None]
    difference = torch.where(usable, means.others - peers, 0)
    return float((difference * torch.where(usable, own - peers, 0)).sum()), float((difference**2).sum())


def own_weight(numerator: float, denominator: float) -> float:
    """λ of the sums of `own_weight_sums`, in [0, 1].

    The quotient never exceeds 1 but by rounding (Cauchy and Schwarz). It is negative where a learner's rollouts on a
    prompt are less alike than chance has it, and then counts as 0. Where the two predictions never differ, or never
    both exist, the rewards cannot tell; the learner's own mean, the one without a bias, then gets all the weight.
    """
    # Differences of 1e-6 between rewards of size 1 are rounding.
    if denominator <= EQUALITY_TOLERANCE**2:
        return 1.0
    return min(max(numerator / denominator, 0.0), 1.0)


def shrinkage_advantages(
    rewards: torch.Tensor, learner: int, ratios: torch.Tensor, own_weight: float
) -> GroupAdvantages:
    """`advantage_baseline="shrinkage"`: the learner's own mean on the prompt, shrunk towards its peers' scaled mean.

        own rollout i      λ · mean of the learner's other rollouts + (1 − λ) · z
        a peer's rollout   λ · mean of the learner's rollouts       + (1 − λ) · z,      z = mean of ω^(k,j) R(y^(j))

    An own rollout's baseline does not contain its reward, so that, σ and the guards aside, it leaves the expected
    gradient on own rollouts as it is (a mean that contains it scales that gradient by 1 − 1/G). λ and ω do depend on
    the reward, as on every other of the step: an effect that falls with the number of prompts. A peer's rollout is
    off-policy anyway, and is measured against the learner's full mean, which has less variance; z contains its reward.

    As an estimate of the learner's expected reward on the prompt it has the bias (1 − λ)(E z − E R^(k)); the
    capability-aware baseline has it with (n − 1)/n in place of 1 − λ. Averaged over prompts both vanish (Theorem 4.1).
    λ is large where the agents find different prompts hard, small where they agree and G is small.

    σ is that of the group's raw rewards, as in Eq. 7. With one agent the baseline is the leave-one-out mean.

    Guards, beside those for uniform groups and rollouts without a verdict: where only one of the two means exists, it
    alone is the baseline. A group one of whose best answers would lie below its baseline, because z lies above every
    reward, falls back to the learner's means without its peers' (where there is none, to the group's raw mean). This
    fallback looks at all rewards of the group and so adds a bias of its own, as it does to Eq. 6.

    Args:
        rewards: `(B, n, G)` float, NaN where a rollout has no verdict.
        learner: Index of the learner k among the n agents.
        ratios: `(n,)`, ω^(k,j) for every source j.
        own_weight: λ, in [0, 1].
    """
    verdict, raw, means = ~torch.isnan(rewards), _raw_rewards(rewards), _learner_means(rewards, learner, ratios)
    # `(B, G + 1)`: the learner's mean as each of its rollouts sees it, and, last, as its peers' do.
    own = torch.cat([means.others, means.own[:, None]], -1)
    has_own = torch.cat([(means.num_own > 1)[:, None].expand_as(means.others), (means.num_own > 0)[:, None]], -1)
    peers, has_peers = means.peers[:, None], (means.num_peers > 0)[:, None]
    without_peers = torch.where(has_own, own, raw.mean[:, None])
    mixed = torch.where(has_own, peers + own_weight * (own - peers), peers)
    mixed = torch.where(has_peers, mixed, without_peers)

    def by_rollout(baselines: torch.Tensor) -> torch.Tensor:
        """`(B, G + 1)` -> `(B, n, G)`"""
        spread = baselines[:, -1].view(-1, 1, 1).repeat(1, *rewards.shape[1:])
        spread[:, learner] = baselines[:, :-1]
        return spread

    highest, uniform = raw.highest.view(-1, 1, 1), raw.uniform.view(-1, 1, 1)
    fallback = ((rewards >= highest) & (by_rollout(mixed) > highest) & ~uniform).flatten(1).any(-1)
    baselines = torch.where(fallback[:, None], without_peers, mixed)

    advantages = (rewards - by_rollout(baselines)) / (raw.std.view(-1, 1, 1) + STD_EPSILON)
    advantages = torch.where(verdict & ~uniform, advantages, 0)
    return GroupAdvantages(advantages, baselines[:, -1], raw.std, fallback, raw.uniform)
