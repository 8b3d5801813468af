"""A baseline between the learner's own mean and its peers' (`advantage_baseline="shrinkage"`; not the paper's).

One ω for prompts of every difficulty leaves the capability-aware baseline biased on each prompt. Here the learner's
own mean on the prompt, which has no such bias but more variance, is mixed with its peers' scaled mean; the weight is
the one that predicts the learner's rewards of the step best.
"""

from dataclasses import dataclass

import torch

from .advantages import EQUALITY_TOLERANCE, STD_EPSILON, GroupAdvantages, raw_rewards


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
    reward, or one of whose worst answers above it, falls back to the learner's means without its peers' (where there
    is none, to the group's raw mean). This fallback looks at all rewards of the group and so adds a bias of its own,
    as it does to Eq. 6.

    Args:
        rewards: `(B, n, G)` float, NaN where a rollout has no verdict.
        learner: Index of the learner k among the n agents.
        ratios: `(n,)`, ω^(k,j) for every source j.
        own_weight: λ, in [0, 1].
    """
    dtype, rewards = rewards.dtype, rewards.double()
    verdict, raw, means = ~torch.isnan(rewards), raw_rewards(rewards), _learner_means(rewards, learner, ratios)
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
    lowest, seen = raw.lowest.view(-1, 1, 1), by_rollout(mixed)
    wrong = ((rewards >= highest) & (seen > highest)) | ((rewards <= lowest) & (seen < lowest))
    fallback = (wrong & ~uniform).flatten(1).any(-1)
    baselines = torch.where(fallback[:, None], without_peers, mixed)

    advantages = (rewards - by_rollout(baselines)) / (raw.std.view(-1, 1, 1) + STD_EPSILON)
    advantages = torch.where(verdict & ~uniform, advantages, 0)
    baseline, std = baselines[:, -1].to(dtype), raw.std.to(dtype)
    return GroupAdvantages(advantages.to(dtype), baseline, std, fallback, raw.uniform, own_weight)
