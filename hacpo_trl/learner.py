"""What one learner makes of a step's rewards and of a batch of rows: advantages, objectives, and what to log about
them.

`advantages.py` and `objective.py` have the equations one by one; here they are put together as the configuration asks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object

from .advantages import (
    GroupAdvantages,
    group_advantages,
    own_group_advantages,
    own_weight,
    own_weight_sums,
    shrinkage_advantages,
)
from .capability import CapabilityWindow
from .config import HACPOConfig
from .metrics import Metrics
from .objective import (
    MAX_LOG_RATIO,
    cross_lower_bound,
    cross_objective,
    kl_to_reference,
    own_objective,
    sequence_log_ratio,
    token_mean,
    token_objective,
)


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
    names = sorted(rewards)
    stacked = torch.stack([rewards[name].view(-1, args.num_generations) for name in names], dim=1)
    of_learner = {
        name: _group_advantages(args, capability, stacked, names, k, metrics) for k, name in enumerate(names)
    }
    result: dict[str, dict[str, torch.Tensor]] = {}
    for learner, group in of_learner.items():
        metrics.mean(f"{learner}/baseline_fallback", group.fallback)
        metrics.mean(f"{learner}/frac_reward_zero_std", group.uniform)
        if not args.shares_rollouts:
            result[learner] = {learner: group.advantages[:, 0].reshape(-1)}
            continue
        by_source = args.cross_advantage == "source"
        result[learner] = {
            source: (of_learner[source] if by_source else group).advantages[:, j].reshape(-1)
            for j, source in enumerate(names)
        }
        for source, advantages in result[learner].items():
            metrics.mean(f"{learner}/advantage/{'own' if source == learner else 'cross'}", advantages)
    return result


def _group_advantages(
    args: HACPOConfig,
    capability: CapabilityWindow,
    rewards: torch.Tensor,
    names: list[str],
    learner: int,
    metrics: Metrics,
) -> GroupAdvantages:
    """`rewards`: `(B, n, G)` of this process's prompts, agents in the order of `names`."""
    if not args.shares_rollouts:
        return group_advantages(rewards[:, learner : learner + 1], 0, torch.ones(1))
    if args.algorithm == "naive":
        return group_advantages(rewards, learner, torch.ones(len(names)))
    if args.advantage_baseline == "own":
        return own_group_advantages(rewards, learner)
    ratios = torch.tensor([capability.ratio(names[learner], source) for source in names])
    if args.advantage_baseline == "shrinkage":
        # One weight for the whole step, however its prompts are dealt to processes.
        everywhere = gather_object([own_weight_sums(rewards, learner, ratios)])
        weight = own_weight(*map(sum, zip(*everywhere, strict=True)))
        metrics.mean(f"{names[learner]}/baseline_own_weight", weight)
        return shrinkage_advantages(rewards, learner, ratios, weight)
    return group_advantages(rewards, learner, ratios)


@dataclass(frozen=True)
class LearnerObjective:
    """The objective of each of R rows, and the terms it is made of.

    Attributes:
        objective: `(R,)`, with gradient; the loss is minus its mean.
        log_ratio: `(R,)`, log s.
        token_log_ratio: `(R, T)`, of GRPO's token ratios; 0 off the answers.
        kl: `(R, T)`, KL divergence to the reference on own rows; 0 elsewhere.
        lower_bound: The stepwise clip bound of this update, where peers' ratios are clipped.
    """

    objective: torch.Tensor
    log_ratio: torch.Tensor
    token_log_ratio: torch.Tensor | None
    kl: torch.Tensor | None
    lower_bound: float | None


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
    own, advantage = batch["is_own"], batch["advantage"]
    num_tokens = mask.sum(-1)
    log_ratio = sequence_log_ratio(
        logps.sum(-1), batch["old_logprob_sum"], num_tokens, batch["old_num_tokens"], args.ratio_normalization
    )
    ratio = log_ratio.exp()
    token_log_ratio = kl = lower_bound = None
    if args.algorithm == "grpo":
        token_log_ratio = torch.where(mask, logps - batch["old_logps"], 0).clamp(max=MAX_LOG_RATIO)
        objective = token_objective(
            token_log_ratio.exp(), mask, advantage, args.epsilon, args.epsilon_high, batch.get("sampler_weights")
        )
    else:
        objective = own_objective(ratio, advantage, args.epsilon, args.epsilon_high)
        if "sampler_weights" in batch:
            objective = objective * token_mean(batch["sampler_weights"], mask)
    if args.algorithm == "hacpo":
        lower_bound = cross_lower_bound(args.delta, args.delta_step, update) if args.clip_cross else None
        cross = cross_objective(ratio, advantage, batch["weight"], args.alpha, lower_bound)
        objective = torch.where(own, objective, cross)
    # Own rows alone have a reference, and a batch may hold peers' rows alone.
    if "ref_logps" in batch:
        kl = kl_to_reference(logps, batch["ref_logps"], mask & own[:, None])
        weight = ratio[:, None] if token_log_ratio is None else token_log_ratio.exp()
        penalty = kl * weight if args.use_bias_correction_kl else kl
        objective = objective - args.beta * penalty.sum(-1) / num_tokens.clamp(min=1)
    return LearnerObjective(objective, log_ratio, token_log_ratio, kl, lower_bound)


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

    if terms.token_log_ratio is not None:
        clipped_ratio, of_own, of_cross = terms.token_log_ratio.exp(), mask & own[:, None], mask & ~own[:, None]
        advantage = advantage[:, None]
    else:
        clipped_ratio, of_own, of_cross = ratio, own, ~own
    low = (clipped_ratio < 1 - args.epsilon) & (advantage < 0)
    high = (clipped_ratio > 1 + args.epsilon_high) & (advantage > 0)
    metrics.mean(f"{learner}/clip_ratio/own_low", low[of_own])
    metrics.mean(f"{learner}/clip_ratio/own_high", high[of_own])
    if args.algorithm == "hacpo":
        below = torch.zeros_like(low) if terms.lower_bound is None else ratio < terms.lower_bound
        above = torch.zeros_like(high) if terms.lower_bound is None else ratio > 1
    else:
        below, above = low, high
    metrics.mean(f"{learner}/clip_ratio/cross_below", below[of_cross])
    metrics.mean(f"{learner}/clip_ratio/cross_above", above[of_cross])
    if terms.kl is not None:
        metrics.mean(f"{learner}/kl", terms.kl[mask & own[:, None]])


@torch.no_grad()
def log_sampler_difference(metrics: Metrics, learner: str, logps: torch.Tensor, sampler_logps: torch.Tensor):
    """Logs by how much the trainer and the sampler differ in the log-probabilities of the same tokens, `(T,)` each."""
    difference = (logps - sampler_logps).abs()
    metrics.mean(f"{learner}/sampling/logp_difference/mean", difference)
    metrics.maximum(f"{learner}/sampling/logp_difference/max", difference)


class Alignment:
    """How well a source's confidence tells good answers from bad ones: the proxy for Theorem 4.3.

    The theorem says that gradients on a peer's rollouts point the way of own gradients if the source is more confident
    than the learner where its answers are good (Assumption D.12). Measured for each learner and source: the
    correlation ρ, within prompts, of c_i = (log π_j − log π_k)/|y| = −log s with the rewards R_i of the source's
    rollouts. π_k is the learner at the update that trains on the rollout, so that ρ costs no forward pass; rollouts
    that are not trained on (advantage 0, dropped) do not count.
    """

    def __init__(self):
        # (learner, source) -> prompt -> pairs (c_i, R_i)
        self._pairs: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}

    def state(self) -> dict:
        return self._pairs

    def load_state(self, state: dict):
        self._pairs = state

    def add(self, learner: str, source: str, prompt_index: int, log_ratio: float, reward: float):
        by_prompt = self._pairs.setdefault((learner, source), {})
        by_prompt.setdefault(prompt_index, []).append((-log_ratio, reward))

    def flush(self, metrics: Metrics):
        """Logs `<learner>/alignment/<source>` and starts anew."""
        for (learner, source), by_prompt in self._pairs.items():
            pairs = [torch.tensor(values, dtype=torch.float64) for values in by_prompt.values()]
            confidence, reward = torch.cat([values - values.mean(0) for values in pairs]).T
            metrics.correlation(f"{learner}/alignment/{source}", confidence, reward)
        self._pairs = {}
