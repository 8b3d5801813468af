"""What one learner makes of a step's rewards and of a batch of rows: advantages, objectives, and what to log about
them.

`algorithm/` has the equations one by one, and `algorithm/sharing/` the rules that put them together; here a rule meets
tensors of rows, processes and metrics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object

from .algorithm.capability import CapabilityWindow, performance_counts
from .algorithm.objective import (
    MAX_LOG_RATIO,
    kl_to_reference,
    own_objective,
    sequence_log_ratio,
    token_mean,
    token_objective,
)
from .config import HACPOConfig
from .reporting.metrics import Metrics
from .rollouts.rollout import LearnerView
from .rollouts.rows import LearnerRow


def update_capability(
    args: HACPOConfig, capability: CapabilityWindow, rewards: Mapping[str, torch.Tensor], metrics: Metrics
):
    """Appends this step's performance of every agent, over all processes, to its window (Eq. 9). Collective.

    Args:
        args: The run's settings.
        capability: The agents' windows.
        rewards: For each agent the rewards of its rollouts on this process, `(B·G,)`, NaN for no verdict.
        metrics: Where to log.
    """
    local = {name: performance_counts(of_agent, args.capability_metric) for name, of_agent in rewards.items()}
    everywhere = gather_object([local])
    performances = {}
    for name in rewards:
        total, count = map(sum, zip(*(of_process[name] for of_process in everywhere), strict=True))
        performances[name] = total / count if count else None
    capability.update(performances)
    for name in rewards:
        if (value := capability.capability(name)) is not None:
            metrics.last(f"{name}/capability", value)
        for peer in rewards:
            if peer != name and args.rule.uses_capability:
                metrics.last(f"{name}/capability_ratio/{peer}", capability.ratio(name, peer))


def learner_advantages(
    args: HACPOConfig, capability: CapabilityWindow, rewards: Mapping[str, torch.Tensor], metrics: Metrics
) -> dict[str, dict[str, torch.Tensor]]:
    """The advantage of every rollout that a learner gets (Eq. 6, 7 and 10). Collective.

    Args:
        args: The run's settings.
        capability: The agents' capabilities, this step's included.
        rewards: For each agent the rewards of its rollouts on this process, `(B·G,)`, prompt by prompt.
        metrics: Where to log.

    Returns:
        `(B·G,)` by learner and source.
    """
    rule, names = args.rule, sorted(rewards)
    stacked = torch.stack([rewards[name].view(-1, args.num_generations) for name in names], dim=1)
    of_learner = {}
    for k, learner in enumerate(names):
        ratios = torch.tensor([capability.ratio(learner, source) for source in names])
        group = of_learner[learner] = rule.advantages(stacked, k, ratios, _summed)
        metrics.mean(f"{learner}/baseline_fallback", group.fallback)
        metrics.mean(f"{learner}/frac_reward_zero_std", group.uniform)
        if group.own_weight is not None:
            metrics.mean(f"{learner}/baseline_own_weight", group.own_weight)
    if not rule.shares:
        return {learner: {learner: group.advantages[:, 0].reshape(-1)} for learner, group in of_learner.items()}

    result: dict[str, dict[str, torch.Tensor]] = {}
    for learner, group in of_learner.items():
        by_source = args.cross_advantage == "source"
        result[learner] = {
            source: (of_learner[source] if by_source else group).advantages[:, j].reshape(-1)
            for j, source in enumerate(names)
        }
        for source, advantages in result[learner].items():
            judged = advantages[~rewards[source].isnan()]
            metrics.mean(f"{learner}/advantage/{'own' if source == learner else 'cross'}", judged)
    return result


def log_dropped(metrics: Metrics, learner: str, views: Mapping[str, Sequence[LearnerView]]):
    """Counts the rollouts that a learner cannot use, by reason."""
    for of_source in views.values():
        for view in of_source:
            if view.unusable:
                metrics.total(f"{learner}/dropped/{view.unusable}", 1)


def add_byte_lengths(
    learner: str,
    views: Mapping[str, Sequence[LearnerView]],
    rows: Mapping[str, Sequence[LearnerRow]],
    metrics: Metrics,
):
    """Sets the rows' `byte_length`: the bytes of each text over the learner's bytes a token, which are counted on all
    texts of the step that it learns from. Collective.

    A mean of log-probabilities by it has the scale of one by tokens, which ε and δ are made for.
    """
    texts = {source: [len(view.rollout.text.encode()) for view in of_source] for source, of_source in views.items()}
    learned = [
        (length, len(view.completion_ids))
        for source, of_source in views.items()
        for length, view in zip(texts[source], of_source, strict=True)
        if view.unusable is None
    ]
    num_bytes, num_tokens = _summed((sum(length for length, _ in learned), sum(count for _, count in learned)))
    bytes_per_token = max(num_bytes, 1) / max(num_tokens, 1)
    for source, of_source in rows.items():
        for row, length in zip(of_source, texts[source], strict=True):
            # An answer that is nothing but its end has no bytes, and a token.
            row.byte_length = max(length, 1) / bytes_per_token
    metrics.last(f"{learner}/bytes_per_token", bytes_per_token)


def _summed(numbers: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*gather_object([numbers]), strict=True)))


@dataclass(frozen=True)
class LearnerObjective:
    """The objective of each of R rows, and the terms it is made of.

    Attributes:
        objective: `(R,)`, with gradient; the loss is minus its mean.
        log_ratio: `(R,)`, log s.
        token_log_ratio: `(R, T)`, of GRPO's token ratios; 0 off the answers.
        kl: `(R, T)`, KL divergence to the reference on own rows; 0 elsewhere.
        update: m, the index of the optimizer update within its step.
    """

    objective: torch.Tensor
    log_ratio: torch.Tensor
    token_log_ratio: torch.Tensor | None
    kl: torch.Tensor | None
    update: int


def learner_objective(
    args: HACPOConfig, batch: dict[str, torch.Tensor], logps: torch.Tensor, mask: torch.Tensor, update: int
) -> LearnerObjective:
    """The objective of a batch of rows (see `collate`).

    Args:
        args: The run's settings.
        batch: The rows, as `collate` gives them.
        logps: `(R, T)`, the learner's log-probabilities now; 0 off the answers.
        mask: `(R, T)` bool, the answers' tokens.
        update: m, the index of the optimizer update within its step.
    """
    rule, own, advantage = args.rule, batch["is_own"], batch["advantage"]
    num_tokens = mask.sum(-1)
    log_ratio = sequence_log_ratio(
        logps.sum(-1),
        batch["old_logprob_sum"],
        num_tokens,
        batch["old_num_tokens"],
        args.ratio_normalization,
        batch["byte_length"],
    )
    ratio = log_ratio.exp()
    token_log_ratio = kl = None
    if rule.token_level:
        token_log_ratio = torch.where(mask, logps - batch["old_logps"], 0).clamp(max=MAX_LOG_RATIO)
        objective = token_objective(
            token_log_ratio.exp(), mask, advantage, args.epsilon, args.epsilon_high, batch.get("sampler_weights")
        )
    else:
        objective = own_objective(ratio, advantage, args.epsilon, args.epsilon_high)
        if "sampler_weights" in batch:
            objective = objective * token_mean(batch["sampler_weights"], mask)
    if rule.shares:
        cross = rule.cross_objective(ratio, advantage, batch["weight"], update)
        objective = torch.where(own, objective, cross)
    # Own rows alone have a reference, and a batch may hold peers' rows alone.
    if "ref_logps" in batch:
        kl = kl_to_reference(logps, batch["ref_logps"], mask & own[:, None])
        weight = ratio[:, None] if token_log_ratio is None else token_log_ratio.exp()
        penalty = kl * weight if args.use_bias_correction_kl else kl
        objective = objective - args.beta * penalty.sum(-1) / num_tokens.clamp(min=1)
    return LearnerObjective(objective, log_ratio, token_log_ratio, kl, update)


@torch.no_grad()
def log_objective(
    metrics: Metrics,
    learner: str,
    args: HACPOConfig,
    batch: dict[str, torch.Tensor],
    terms: LearnerObjective,
    mask: torch.Tensor,
):
    """Logs ratios, clipping and KL of a batch of rows, own and peers' apart."""
    own, advantage, ratio = batch["is_own"], batch["advantage"], terms.log_ratio.exp()
    metrics.summary(f"{learner}/own_ratio", ratio[own])
    metrics.summary(f"{learner}/cross_ratio", ratio[~own])

    if args.rule.shares:
        below, above = args.rule.discarded(ratio, advantage, terms.update)
        metrics.mean(f"{learner}/clip_ratio/cross_below", below[~own])
        metrics.mean(f"{learner}/clip_ratio/cross_above", above[~own])
    of_own = own
    if terms.token_log_ratio is not None:
        ratio, of_own, advantage = terms.token_log_ratio.exp(), mask & own[:, None], advantage[:, None]
    low = (ratio < 1 - args.epsilon) & (advantage < 0)
    high = (ratio > 1 + args.epsilon_high) & (advantage > 0)
    metrics.mean(f"{learner}/clip_ratio/own_low", low[of_own])
    metrics.mean(f"{learner}/clip_ratio/own_high", high[of_own])
    if terms.kl is not None:
        metrics.mean(f"{learner}/kl", terms.kl[mask & own[:, None]])


@torch.no_grad()
def log_sampler_difference(metrics: Metrics, learner: str, logps: torch.Tensor, sampler_logps: torch.Tensor):
    """Logs by how much the trainer and the sampler differ in the log-probabilities of the same tokens, `(T,)` each."""
    difference = (logps - sampler_logps).abs()
    metrics.mean(f"{learner}/sampling/logp_difference/mean", difference)
    metrics.maximum(f"{learner}/sampling/logp_difference/max", difference)
