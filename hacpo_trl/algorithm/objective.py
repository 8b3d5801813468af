"""The objective of one rollout: sequence ratios, the own-rollout term and the cross-agent term.

HACPO, arXiv 2603.02604, Eq. 10 to 14. For learner k and a rollout y that agent j sampled:

    log s^(k,j) = [ log π_k(y) − log π_j,old(y) ] / |y|                              (Eq. 11)

    own,   j = k:  min( s·A, clamp(s, 1 − ε_low, 1 + ε_high)·A )                     (GSPO, arXiv 2507.18071)
    cross, j ≠ k:  clip(s, 1 − δ + m·δ_step, 1) · sg(s)^α · ω^(j,k) · A              (Eq. 10, 12, 13, 14)

m is the index of the optimizer update within its step, sg stops the gradient. The loss is minus the mean of these
objectives.

What differs from the paper, or that it leaves open:

1. Learner and source may count different numbers of tokens for the same text, so |y| is a choice: see
   `sequence_log_ratio`. The paper's first version divides both sums by the source's count, its second one (May 2026,
   of which abstract and contents could be read) each side by its own.
2. clip is `torch.clamp`: outside its bounds the gradient is 0, so the rollout is discarded, below the lower bound and
   above 1 alike. The lower bound never exceeds 1. A bound of 1 means 1 within rounding (`is_one`).
3. sg(s)^α dampens only: for s > 1 it is 1.
4. Eq. 47 prints min(s, clamp(s))·A for own rollouts; here, as in GSPO and in the authors' code, it is
   min(s·A, clamp(s)·A), which differs where A < 0.
5. Eq. 50 to 53 add a mean over own rollouts and one over each peer's; here, as in the authors' code, it is one mean
   over all rows, 1/n of that scale.

Everything here is a pure function of float32 tensors; gradients flow into the learner's log-probabilities alone.
"""

import torch


# exp overflows float32 above 88, and 0 * inf is NaN in the backward pass of a clamped ratio. No ratio near e^20 is
# ever within a clip bound, so the limit changes no gradient that counts.
MAX_LOG_RATIO = 20.0
# Two passes over one answer, in batches of other shapes, differ by some 1e-6 in float32. A learner that is equal to
# the source must not lose rollouts to that.
RATIO_TOLERANCE = 1e-5


def sequence_log_ratio(
    logprob_sum: torch.Tensor,
    old_logprob_sum: torch.Tensor,
    num_tokens: torch.Tensor,
    old_num_tokens: torch.Tensor,
    normalization: str = "source",
    byte_length: torch.Tensor | None = None,
) -> torch.Tensor:
    """log s^(k,j), the length-normalized log-ratio between the learner now and the source then (Eq. 11).

    Args:
        logprob_sum: `(R,)`, log π_k(y) in nats, over the learner's tokens of y.
        old_logprob_sum: `(R,)`, log π_j,old(y) in nats, over the source's tokens of y.
        num_tokens: `(R,)`, the learner's token counts.
        old_num_tokens: `(R,)`, the source's token counts |y^(j)|.
        normalization: `"source"` divides both sums by the source's count (Eq. 11 as printed), `"own"` each sum by its
            own count (the authors' code); they agree when the counts do. `"bytes"` divides both by `byte_length`.
        byte_length: `(R,)`, the UTF-8 bytes of each text over the learner's mean bytes a token (see
            `learner.add_byte_lengths`): a length that no tokenizer has a say in, on the scale of the learner's tokens.

    Returns:
        `(R,)`, at most `MAX_LOG_RATIO`.
    """
    divisor = old_divisor = old_num_tokens.clamp(min=1)
    if normalization == "own":
        divisor = num_tokens.clamp(min=1)
    elif normalization == "bytes":
        if byte_length is None:
            raise ValueError("ratio_normalization='bytes' needs the rows' byte_length.")
        divisor = old_divisor = byte_length
    log_ratio = logprob_sum / divisor - old_logprob_sum / old_divisor
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def own_objective(ratio: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float) -> torch.Tensor:
    """The clipped surrogate of the learner's own rollouts: GSPO for sequence ratios, GRPO for token ratios.

    Args:
        ratio: `(R,)` sequence ratios, or `(R, T)` token ratios.
        advantages: `(R,)`, or `(R, 1)` beside token ratios.
        epsilon: Clip range below 1.
        epsilon_high: Clip range above 1.

    Returns:
        Objectives in the shape of `ratio`.
    """
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    return torch.min(ratio * advantages, clipped * advantages)


def token_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over each rollout's tokens, `(R,)`, of values and mask `(R, T)`."""
    return torch.where(mask, values, 0).sum(-1) / mask.sum(-1).clamp(min=1)


def token_objective(
    ratio: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """GRPO's objective (arXiv 2402.03300): the clipped surrogate of each token's ratio, averaged over a rollout's
    tokens.

    Args:
        ratio: `(R, T)`, token ratios.
        mask: `(R, T)` bool, True on the answer's tokens.
        advantages: `(R,)`.
        epsilon: Clip range below 1.
        epsilon_high: Clip range above 1.
        weights: `(R, T)`, weighs each token's term; see `sampler_weights`.

    Returns:
        `(R,)`.
    """
    objective = own_objective(ratio, advantages[:, None], epsilon, epsilon_high)
    return token_mean(objective if weights is None else objective * weights, mask)


def sampler_weights(
    logps: torch.Tensor, sampler_logps: torch.Tensor, mode: str, low: float | None, high: float | None
) -> torch.Tensor:
    """What corrects for a sampler whose probabilities are not the trainer's: importance ratios, kept within bounds.

    As `GRPOTrainer` does it (`vllm_importance_sampling_mode`; the idea is in Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training", 2025).

    Args:
        logps: `(T,)`, log-probabilities of one answer's tokens in nats, from the trainer.
        sampler_logps: `(T,)`, from the sampler.
        mode: `"token_..."` takes the ratio of each token, `"sequence_..."` that of the whole answer for all of its
            tokens; `"..._truncate"` cuts ratios beyond a bound to it, `"..._mask"` makes them 0.
        low: Lower bound, None for none.
        high: Upper bound, None for none.

    Returns:
        `(T,)`.
    """
    difference = logps - sampler_logps
    if mode.startswith("sequence"):
        difference = difference.sum().expand_as(difference)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    beyond = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        beyond |= ratio < low
    if high is not None:
        beyond |= ratio > high
    return ratio.masked_fill(beyond, 0.0)


def cross_lower_bound(delta: float, delta_step: float, update: int) -> float:
    """The stepwise lower clip bound, 1 − δ + m·δ_step, at most 1 (Eq. 13 and 14).

    Args:
        delta: δ, the clip radius below 1 at a step's first update.
        delta_step: δ_step, by how much each further update of the step tightens it.
        update: m, the update's index within its step, from 0.
    """
    return min(1 - delta + update * delta_step, 1.0)


def is_one(ratio: torch.Tensor) -> torch.Tensor:
    """Which ratios are 1 within rounding; bool, in the shape of `ratio`."""
    return (ratio - 1).abs() <= RATIO_TOLERANCE


def cross_objective(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    alpha: float,
    lower_bound: float | None,
) -> torch.Tensor:
    """The objective of a peer's rollouts: stepwise clipping and exponential importance sampling (Eq. 10, 12, 13).

    Args:
        ratio: `(R,)`, s^(k,j).
        advantages: `(R,)`.
        weights: `(R,)`, ω^(j,k), how capable the source is relative to the learner.
        alpha: α, how strongly rollouts that the learner finds unlikely are damped; 0 damps nothing.
        lower_bound: See `cross_lower_bound`; None switches the clipping off (`clip_cross=False`).
    """
    damping = ratio.detach().clamp(max=1.0) ** alpha
    clipped = ratio if lower_bound is None else torch.where(is_one(ratio), ratio, ratio.clamp(lower_bound, 1.0))
    return clipped * damping * weights * advantages


def kl_to_reference(logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(π_k ‖ π_ref) of each token by the k3 estimator, exp(x) − x − 1 with x = log π_ref − log π_k. `(R, T)`, 0 off
    `mask`.

    See John Schulman, "Approximating KL Divergence" (2020).
    """
    difference = torch.where(mask, ref_logps - logps, 0).clamp(max=MAX_LOG_RATIO)
    return difference.exp() - difference - 1
