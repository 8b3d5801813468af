"""Theorem 4.3 exactly: softmax policies over a handful of answers, all expectations by enumeration.

Let c = log π_j − log π_k be the source's confidence over the learner. A peer's rollout enters the gradient with
s^(1+α), s = e^(−c/|y|), so that, without clipping,

    g_cross ∝ E_{y∼π_j}[ s^(1+α) A ∇log π_k(y) ] = E_{y∼π_k}[ e^{(1−τ)c} A ∇log π_k(y) ],   τ = (1 + α) / |y|

(where s > 1 nothing is damped, and α is to be read as 0). At τ = 1 this is the own gradient, whatever c. For τ < 1
(long answers, where the ratio is close to 1) what the source is more confident in than the learner counts for more;
for τ > 1 (short answers) it counts for less.

Theorem 4.3 says that both gradients point the same way, ⟨g_cross, v⟩ > 0 with v = E_{y∼π_k}[g(y)] and g = A ∇log π_k,
under Assumption D.12: ρ(C, Z) > 0 for y ∼ π_k, with C = ω (π_k/π_j)^{τ−1} and Z = ⟨g(y), v⟩
(`assumption_correlation`). With it the theorem is immediate, for E[C Z] = E[C] ‖v‖² + Cov(C, Z): it assumes what it
concludes. The paper's second version (May 2026, of which abstract and contents could be read) no longer has it. Remark
D.13's proxy, ρ(c, R) ≥ 0 over the source's rollouts (`confidence_correlation`), is what a run can measure.
"""

from dataclasses import dataclass

import torch

from ..algorithm.advantages import STD_EPSILON, group_advantages
from ..algorithm.alignment import Alignment
from ..algorithm.capability import RATIO_MAX, RATIO_MIN
from ..algorithm.objective import cross_lower_bound, cross_objective, own_objective, sequence_log_ratio
from ..algorithm.sharing import GSPO
from ..reporting.metrics import Metrics


@dataclass(frozen=True)
class CrossSettings:
    """What shapes the gradient on a peer's rollouts; see `HACPOConfig`. `tokens` is |y|, the source's token count, the
    same for all answers."""

    tokens: int
    alpha: float = 1.0
    clip: bool = True

    @property
    def label(self) -> str:
        return f"|y| = {self.tokens}, α = {self.alpha:g}, {'clip [0.2, 1]' if self.clip else 'no clip'}"


def expected_advantages(
    log_learner: torch.Tensor, log_source: torch.Tensor, rewards: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The advantages of all answers, and ω^(j,k), in the limit of many rollouts (Eq. 6 and 7 for rewards of 0 and 1).

    Args:
        log_learner: `(..., P, A)`, log π_k of A answers to P prompts.
        log_source: `(..., P, A)`, log π_j.
        rewards: `(..., P, A)`, 0 or 1.

    Returns:
        `(..., P, A)` and `(..., 1, 1)`.
    """
    of_learner, of_source = ((p.exp() * rewards).sum(-1, keepdim=True) for p in (log_learner, log_source))
    ratio = (of_learner.mean(-2, keepdim=True) / of_source.mean(-2, keepdim=True)).clamp(RATIO_MIN, RATIO_MAX)
    baselines = (of_learner + ratio * of_source) / 2
    baselines = torch.where(baselines > 1, of_learner, baselines)
    pooled = (of_learner + of_source) / 2
    return (rewards - baselines) / ((pooled * (1 - pooled)).sqrt() + STD_EPSILON), 1 / ratio


def objectives(
    log_learner: torch.Tensor,
    log_source: torch.Tensor,
    advantages: torch.Tensor,
    weight: torch.Tensor,
    settings: CrossSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected objective on own and on the source's rollouts, by enumeration; gradients flow into `log_learner`.

    Args:
        log_learner: `(..., P, A)`, with gradient.
        log_source: `(..., P, A)`.
        advantages: `(..., P, A)`, the learner's.
        weight: `(..., 1, 1)`, ω^(j,k).
        settings: What shapes the cross objective.

    Returns:
        Two tensors `(..., P)`: the objective of each prompt.
    """
    old, num_tokens = log_learner.detach(), torch.tensor(settings.tokens)
    own_ratio = sequence_log_ratio(log_learner, old, num_tokens, num_tokens).exp()
    own = own_objective(own_ratio, advantages, *GSPO.default_epsilon)
    cross_ratio = sequence_log_ratio(log_learner, log_source, num_tokens, num_tokens).exp()
    bound = cross_lower_bound(0.8, 0.025, 0) if settings.clip else None
    cross = cross_objective(cross_ratio, advantages, weight, settings.alpha, bound)
    return (old.exp() * own).sum(-1), (log_source.exp() * cross).sum(-1)


def confidence_correlation(log_learner: torch.Tensor, log_source: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Remark D.13's proxy ρ(c, R) under the source, within prompts; see `Alignment`. `(..., P, A)` -> `(...)`."""
    probability = log_source.exp()
    confidence, reward = (
        values - (probability * values).sum(-1, keepdim=True) for values in (log_source - log_learner, rewards)
    )
    covariance = (probability * confidence * reward).sum((-1, -2))
    return covariance / ((probability * confidence**2).sum((-1, -2)) * (probability * reward**2).sum((-1, -2))).sqrt()


def logged_alignment(
    log_learner: torch.Tensor,
    log_source: torch.Tensor,
    rewards: torch.Tensor,
    num_tokens: int,
    generations: int,
    generator: torch.Generator,
) -> float | None:
    """`<learner>/alignment/<source>` as a step would log it: of sampled rollouts, in groups with a signal.

    Args:
        log_learner: `(P, A)`.
        log_source: `(P, A)`.
        rewards: `(P, A)`.
        num_tokens: |y|.
        generations: G, rollouts of each agent for each prompt.
        generator: Draws the rollouts.

    Returns:
        None if there is none: no group with two different rewards.
    """
    own, peer = (torch.multinomial(p.exp(), generations, True, generator=generator) for p in (log_learner, log_source))
    group = torch.stack([rewards.gather(1, own), rewards.gather(1, peer)], dim=1)
    uniform = group_advantages(group, 0, torch.ones(2)).uniform
    log_ratio = ((log_learner - log_source) / num_tokens).gather(1, peer)
    alignment, metrics = Alignment(), Metrics()
    for prompt in range(len(peer)):
        for rollout in range(generations) if not uniform[prompt] else ():
            values = float(log_ratio[prompt, rollout]), float(group[prompt, 1, rollout])
            alignment.add("learner", "source", prompt, *values)
    if not uniform.all():
        alignment.flush(metrics)
    return metrics.reduce().get("learner/alignment/source")


@dataclass(frozen=True)
class Pairs:
    """N random pairs of softmax policies over A answers to P prompts.

    Attributes:
        parameters: `(N, D)`, the learners'.
        features: `(P, A, D)`: a learner's logits are features · parameters.
        log_source: `(N, P, A)`.
        rewards: `(N, P, A)`, 0 or 1; each prompt has both.
    """

    parameters: torch.Tensor
    features: torch.Tensor
    log_source: torch.Tensor
    rewards: torch.Tensor

    def log_learner(self, parameters: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(torch.einsum("nd,pad->npa", parameters, self.features), -1)


def random_pairs(
    pairs: int, shared: bool, prompts: int = 4, answers: int = 6, seed: int = 0, skill: float = 1.0
) -> Pairs:
    """Sources that are unlike the learner to a random degree, and by a random amount better or worse than it.

    Args:
        pairs: N.
        shared: Whether prompts share parameters (8 random features an answer), or every logit is a parameter.
        prompts: P.
        answers: A.
        seed: Of all random numbers.
        skill: Scale of the amount by which right answers have higher logits at the source than at the learner.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = prompts * answers
    features = normal(logits, 8) / 8**0.5 if shared else torch.eye(logits, dtype=torch.float64)
    parameters = 1.5 * normal(pairs, features.shape[1])
    right = torch.rand(pairs, prompts, answers, generator=generator) < 0.3
    right[..., 0], right[..., 1] = True, False
    rewards = right.double()
    learner = torch.einsum("nd,ld->nl", parameters, features).view(pairs, prompts, answers)
    unlike = torch.rand(pairs, 1, 1, generator=generator, dtype=torch.float64)
    source = (1 - unlike) * learner + 1.5 * unlike * normal(pairs, prompts, answers)
    source = source + skill * normal(pairs, 1, 1) * rewards
    return Pairs(parameters, features.view(prompts, answers, -1), torch.log_softmax(source, -1), rewards)


def gradients(pairs: Pairs, settings: CrossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """The learners' exact gradients on own and on the sources' rollouts, `(N, D)` each."""
    parameters = pairs.parameters.clone().requires_grad_()
    log_learner = pairs.log_learner(parameters)
    advantages, weight = expected_advantages(log_learner.detach(), pairs.log_source, pairs.rewards)
    own, cross = objectives(log_learner, pairs.log_source, advantages, weight, settings)
    (g_own,) = torch.autograd.grad(own.sum(), parameters, retain_graph=True)
    (g_cross,) = torch.autograd.grad(cross.sum(), parameters)
    return g_own, g_cross


def assumption_correlation(pairs: Pairs, settings: CrossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Assumption D.12 as the paper states it, by enumeration over prompts and the learner's answers.

    Args:
        pairs: The policies.
        settings: |y| and α; the paper's C knows neither clipping nor that sg(s)^α dampens only.

    Returns:
        `(N,)` ρ(C, Z), and `(N,)` E[C Z], the inner product of Theorem 4.3.
    """
    log_learner = pairs.log_learner(pairs.parameters)
    probability = log_learner.exp() / log_learner.shape[1]
    advantages, weight = expected_advantages(log_learner, pairs.log_source, pairs.rewards)
    mean_feature = torch.einsum("npa,pad->npd", log_learner.exp(), pairs.features)
    scores = pairs.features - mean_feature[:, :, None]
    gradients_of_answers = advantages[..., None] * scores
    mean_gradient = torch.einsum("npa,npad->nd", probability, gradients_of_answers)
    z = torch.einsum("npad,nd->npa", gradients_of_answers, mean_gradient)
    c = weight * ((log_learner - pairs.log_source) * ((1 + settings.alpha) / settings.tokens - 1)).exp()

    def mean(values: torch.Tensor) -> torch.Tensor:
        return (probability * values).sum((-1, -2))

    centred_c, centred_z = (values - mean(values)[:, None, None] for values in (c, z))
    return mean(centred_c * centred_z) / (mean(centred_c**2) * mean(centred_z**2)).sqrt(), mean(c * z)


def separation(score: torch.Tensor, positive: torch.Tensor) -> float:
    """The probability that a positive case has a higher score than a negative one (AUC); 0.5 tells nothing."""
    ranks = score.argsort().argsort().double() + 1
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return float("nan")
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))
