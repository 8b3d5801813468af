"""What HACPO's theory promises (arXiv 2603.02604, Theorems 4.1 and 4.3), in numbers.

    python examples/theory.py
    python examples/theory.py --markdown theory.md

It takes some minutes on one core of a CPU. Four parts:

1. **The baseline, by Monte Carlo.** Agents are nothing but a success probability p_k(q) for each prompt. Theorem 4.1:
   averaged over prompts, the capability-aware baseline μ̂^(k) is the learner's expected reward. What is exact and what
   is not follows from Eq. 6:

   - with K = 1 and without the fallback, the mean of μ̂^(k) over a step's prompts *is* the learner's mean reward of
     the step, since ω^(k,j) P^(j) = P^(k);
   - with any K, as long as nobody's success changes, the expectation of that mean is p̄_k: the steps of a window are
     exchangeable, and averaged over them ω^(k,j) P^(j) is P̂^(k) again;
   - when the learner improves, P̂^(k) lags behind, and the baseline is too low;
   - on one prompt the bias is (1/n) Σ_j [ω^(k,j) p_j(q)] − p_k(q), which vanishes only where success is proportional.

2. **Gradients on peers' rollouts, exactly.** Softmax policies over a handful of answers, all expectations by
   enumeration. Let c = log π_j − log π_k be the source's confidence over the learner. A peer's rollout enters the
   gradient with s^(1+α), s = e^(−c/|y|), so that, without clipping,

       g_cross ∝ E_{y∼π_j}[ s^(1+α) A ∇log π_k(y) ] = E_{y∼π_k}[ e^{(1−τ)c} A ∇log π_k(y) ],   τ = (1 + α) / |y|

   (where s > 1 nothing is damped, and α is to be read as 0). At τ = 1 this is the own gradient, whatever c. For τ < 1
   (long answers, where the ratio is close to 1) what the source is more confident in than the learner counts for more,
   and Theorem 4.3's assumption D.12, ρ(c, R) ≥ 0, should help; for τ > 1 (short answers) it counts for less. The claim
   tested: ρ ≥ 0 ⇒ ⟨g_own, g_cross⟩ ≥ 0.

3. **The same for the tiny policies** of `hacpo_trl.embedded`, over all thousand answers "d,d,d" to a prompt.

4. **Sequence ratios of a run** of `HACPOTrainer` on the miniature, as in the paper's Table 6.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.algorithm.advantages import (
    STD_EPSILON,
    group_advantages,
    own_group_advantages,
)
from hacpo_trl.algorithm.alignment import Alignment
from hacpo_trl.algorithm.capability import RATIO_MAX, RATIO_MIN, CapabilityWindow
from hacpo_trl.algorithm.objective import cross_lower_bound, cross_objective, own_objective, sequence_log_ratio
from hacpo_trl.algorithm.sharing import GSPO
from hacpo_trl.algorithm.shrinkage import own_weight, own_weight_sums, shrinkage_advantages
from hacpo_trl.backends.log_probabilities import completion_logps, prepare_policy
from hacpo_trl.embedded import conv_dataset, conv_reward, policy_path
from hacpo_trl.reporting.metrics import Metrics
from hacpo_trl.rollouts.rows import pad_sequences


@dataclass(frozen=True)
class Result:
    """A table to print: what it shows, its header, its cells as text, and how many of its columns are words."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for column, name in enumerate(self.header):
            table.add_column(name, justify="left" if column < self.words else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        rule = ["---"] * self.words + ["---:"] * (len(self.header) - self.words)
        # The bars of |y| would end a cell.
        lines = [[cell.replace("|", r"\|") for cell in line] for line in (self.header, rule, *self.rows)]
        return f"**{self.title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# ------------------------------------------------------------------------------------------------ 1. the baseline

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
    errors = {key: [] for key in keys}
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


def baseline_tables(steps: int = 1000) -> list[Result]:
    rows = []
    for kind in ("proportional", "same order", "complementary"):
        success = population(kind)
        errors = simulate(success, steps=steps)
        for learner, agent in enumerate(("weaker", "stronger")):
            for name in BASELINES:
                e = errors[name, learner]
                label = f"{agent}, p̄ = {success[:, learner].mean():.3f}"
                mean = f"{e.mean:+.4f} ± {e.standard_error:.4f}"
                rows.append([kind, label, name, mean, f"{e.bias:.3f}", f"{e.std:.3f}", f"{e.rmse:.3f}"])
    header = ["population", "learner", "baseline", "mean over prompts", "rms bias on a prompt", "std", "rmse"]
    title = "Baselines against the learner's success probability (n = 2, G = 8, 64 prompts a step, K = 5)"
    tables = [Result(title, header, rows, words=3)]

    rows, success, name = [], population("complementary"), "capability, no fallback"
    for window in (1, 5, 20):
        for prompts in (8, 64, 256):
            e = simulate(success, [name], prompts_per_step=prompts, window=window, steps=steps)[name, 0]
            mean = f"{e.mean:+.4f} ± {e.standard_error:.4f}"
            rows.append([f"K = {window}, {prompts} prompts", mean, f"{e.of_step:.3f}", f"{e.bias:.3f}"])
    header = ["window, prompts a step", "mean over prompts", "rms of a step's mean", "rms bias on a prompt"]
    tables.append(Result("The capability-aware baseline of the weaker agent, complementary population", header, rows))

    rows = [[f"K = {window}", f"{improving_learner(window, runs=steps // 10):+.4f}"] for window in (1, 5, 20)]
    title = "The same baseline while the learner improves by .005 a step and its peer does not"
    return [*tables, Result(title, ["window", "mean over prompts"], rows)]


# ------------------------------------------------------------------------------------ 2. gradients on peers' rollouts


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
    """ρ of Assumption D.12 under the source, within prompts: what `Alignment` estimates. `(..., P, A)` -> `(...)`."""
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


def separation(score: torch.Tensor, positive: torch.Tensor) -> float:
    """The probability that a positive case has a higher score than a negative one (AUC); 0.5 tells nothing."""
    ranks = score.argsort().argsort().double() + 1
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return float("nan")
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def _share(values: torch.Tensor) -> str:
    return f"{values.double().mean():.1%} of {len(values)}" if len(values) else "–"


def _auc(score: torch.Tensor, positive: torch.Tensor) -> str:
    value = separation(score, positive)
    return "–" if value != value else f"{value:.2f}"


SETTINGS = (
    CrossSettings(1, alpha=0.0, clip=False),
    CrossSettings(1, clip=False),
    CrossSettings(1),
    CrossSettings(8, clip=False),
    CrossSettings(8),
    CrossSettings(64, clip=False),
    CrossSettings(64),
)


def alignment_tables(pairs: int = 2000) -> list[Result]:
    generator, rows = torch.Generator().manual_seed(1), []
    for shared in (False, True):
        sample = random_pairs(pairs, shared)
        log_learner = sample.log_learner(sample.parameters)
        rho = confidence_correlation(log_learner, sample.log_source, sample.rewards)
        # c/|y| differs from c by a factor, which no correlation sees.
        logged = [
            logged_alignment(*policies, 1, 8, generator)
            for policies in zip(log_learner, sample.log_source, sample.rewards, strict=True)
        ]
        has_logged = torch.tensor([value is not None for value in logged])
        logged = torch.tensor([value for value in logged if value is not None])
        for settings in SETTINGS:
            own, cross = gradients(sample, settings)
            inner, cosine = (own * cross).sum(-1), torch.nn.functional.cosine_similarity(own, cross, dim=-1)
            positive = inner > 0
            rows.append(
                [
                    "shared features" if shared else "tabular",
                    settings.label,
                    f"{cosine.mean():.2f}",
                    _share(positive),
                    _share(positive[rho > 0]),
                    _share(positive[rho < 0]),
                    f"{torch.corrcoef(torch.stack([rho, cosine]))[0, 1]:+.2f}" if cosine.std() > 1e-6 else "–",
                    _auc(rho, positive),
                    _auc(logged, positive[has_logged]),
                ]
            )
    header = ["policies", "ratio", "cosine", "⟨g_own, g_cross⟩ > 0", "where ρ > 0", "where ρ < 0", "corr(ρ, cosine)"]
    header += ["AUC of ρ", "AUC of the logged ρ"]
    title = f"{pairs} random pairs of softmax policies over 6 answers to 4 prompts"
    return [Result(title, header, rows, words=2)]


# ------------------------------------------------------------------------------------------------ 3. tiny policies

ANSWERS = [f"{a},{b},{c}" for a in range(10) for b in range(10) for c in range(10)]


class TinyPolicy:
    """A policy of the miniature, as a distribution over all answers of the task."""

    def __init__(self, name: str, seed: int):
        path = policy_path(name, seed)
        self.name = f"{name}, seed {seed}"
        self.model, self.tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        prepare_policy(self.model, 1.0)
        self.answer_ids = [[*ids, self.tokenizer.eos_token_id] for ids in self.tokenizer(ANSWERS).input_ids]
        self.num_tokens = len(self.answer_ids[0])

    def log_probabilities(self, prompt: str) -> torch.Tensor:
        """`(1000,)`, log π of every answer."""
        prompt_ids = self.tokenizer(prompt).input_ids
        pad_token_id = self.tokenizer.pad_token_id
        batch = pad_sequences([prompt_ids] * len(ANSWERS), self.answer_ids, pad_token_id)
        return completion_logps(self.model, batch)[0].sum(-1)

    def gradient(self, objective: torch.Tensor) -> torch.Tensor:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return torch.cat([g.flatten() for g in torch.autograd.grad(objective, parameters, retain_graph=True)])


@dataclass(frozen=True)
class TinyPair:
    """What a tiny learner's gradients on own and on a tiny source's rollouts have to do with each other on the prompts
    of one family. `success`: of learner and source; `cosines`: at HACPO's defaults, and without clipping."""

    label: str
    success: tuple[float, float]
    rho: float
    logged: float | None
    cosines: tuple[float, float]


def tiny_pairs(seeds: Sequence[int], prompts: int) -> tuple[list[TinyPair], float]:
    """Every "qwen3" against every "llama" policy, both ways, on `prompts` held-out prompts of each family.

    Returns:
        The pairs, and the least probability that a policy gives to all thousand answers together.
    """
    generator = torch.Generator().manual_seed(2)
    policies = {name: [TinyPolicy(name, seed) for seed in seeds] for name in ("qwen3", "llama")}
    everybody = [policy for of_name in policies.values() for policy in of_name]
    test, families = list(conv_dataset("test", 128)), ("family 0", "family 1", "family 2")
    examples = [e for family in families for e in [e for e in test if e["source"] == family][:prompts]]
    rewards = torch.stack([torch.tensor(conv_reward(ANSWERS, [e["answer"]] * len(ANSWERS))) for e in examples])
    with torch.no_grad():
        logps = {p: torch.stack([p.log_probabilities(e["prompt"]) for e in examples]) for p in everybody}
    covered = min(float(values.exp().sum(-1).min()) for values in logps.values())
    # The few answers that are none of the thousand are left out.
    logps = {policy: torch.log_softmax(values, -1) for policy, values in logps.items()}

    pairs = []
    for learner in everybody:
        sources = policies["llama" if learner in policies["qwen3"] else "qwen3"]
        scale = {source: expected_advantages(logps[learner], logps[source], rewards) for source in sources}
        for family in families:
            rows = [row for row, example in enumerate(examples) if example["source"] == family]
            own = {source: torch.zeros(()) for source in sources}
            cross = {source: [torch.zeros(()), torch.zeros(())] for source in sources}
            for row in rows:
                log_learner = torch.log_softmax(learner.log_probabilities(examples[row]["prompt"]), -1)
                for source, (advantages, weight) in scale.items():
                    of_prompt = log_learner, logps[source][row], advantages[row], weight.squeeze()
                    for i, clip in enumerate((True, False)):
                        of_own, of_cross = objectives(*of_prompt, CrossSettings(source.num_tokens, clip=clip))
                        cross[source][i] = cross[source][i] + learner.gradient(of_cross)
                    own[source] = own[source] + learner.gradient(of_own)
            for source in sources:
                pair = logps[learner][rows], logps[source][rows], rewards[rows]
                success = tuple(float((log_p.exp() * rewards[rows]).sum(-1).mean()) for log_p in pair[:2])
                logged = logged_alignment(*pair, source.num_tokens, 16, generator)
                cosines = [float(torch.nn.functional.cosine_similarity(own[source], g, dim=0)) for g in cross[source]]
                label = f"{family}: {learner.name} from {source.name}"
                pairs.append(TinyPair(label, success, float(confidence_correlation(*pair)), logged, tuple(cosines)))
    return pairs, covered


def tiny_policy_tables(seeds: Sequence[int] = (0, 1), prompts: int = 2) -> list[Result]:
    pairs, covered = tiny_pairs(seeds, prompts)
    rows = [
        [
            pair.label,
            *(f"{success:.2f}" for success in pair.success),
            f"{pair.rho:+.2f}",
            "–" if pair.logged is None else f"{pair.logged:+.2f}",
            *(f"{cosine:+.2f}" for cosine in pair.cosines),
        ]
        for pair in pairs
    ]
    title = (
        f"Tiny policies, {prompts} prompts a family; the enumerated answers hold at least {covered:.3f} of all mass"
    )
    header = ["learner, source", "p̄ learner", "p̄ source", "ρ", "ρ logged", "cosine", "cosine, no clip"]
    tables = [Result(title, header, rows)]

    rho = torch.tensor([pair.rho for pair in pairs])
    logged = torch.tensor([float("nan") if pair.logged is None else pair.logged for pair in pairs])
    positive = torch.tensor([pair.cosines for pair in pairs]) > 0
    shares = [[_share(positive[where, i]) for i in (0, 1)] for where in (rho > 0, rho < 0, logged > 0, logged < 0)]
    labels = ("ρ > 0", "ρ < 0", "logged ρ > 0", "logged ρ < 0")
    rows = [[label, *of_label] for label, of_label in zip(labels, shares, strict=True)]
    header = ["", "clip [0.2, 1]", "no clip"]
    return [*tables, Result("The same, counted: shares with ⟨g_own, g_cross⟩ > 0", header, rows)]


# ------------------------------------------------------------------------------------------------ 4. ratios of a run


def ratio_tables(updates: int = 64) -> list[Result]:
    """A run as in configs/recipes/tiny.yaml, but shorter."""
    with tempfile.TemporaryDirectory() as folder:
        args = HACPOConfig(
            folder,
            prompts_per_step=16,
            max_completion_length=8,
            per_device_train_batch_size=64,
            max_steps=updates,
            learning_rate=1e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            adam_beta2=0.99,
            logging_steps=4,
            save_strategy="no",
            report_to="none",
            seed=0,
        )
        models = {"qwen": policy_path("qwen3"), "llama": policy_path("llama")}
        trainer = HACPOTrainer(models, conv_reward, args, conv_dataset("train", 5000))
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    rows = []
    for name in trainer.agents:
        for label, part in ((f"first {len(logs) // 2} steps", logs[: len(logs) // 2]), ("the others", None)):
            part = logs[len(logs) // 2 :] if part is None else part
            cells = []
            for kind in ("own", "cross"):
                values = {s: [log[f"{name}/{kind}_ratio/{s}"] for log in part] for s in ("mean", "min", "max")}
                mean = sum(values["mean"]) / len(part)
                cells.append(f"{mean:.3f} ({min(values['min']):.3f} to {max(values['max']):.3f})")
            for side in ("below", "above"):
                cells.append(f"{sum(log[f'{name}/clip_ratio/cross_{side}'] for log in part) / len(part):.1%}")
            rows.append([f"{name}, {label}", *cells])
    header = ["learner", "s_homo: mean (min to max)", "s_hete: mean (min to max)", "discarded below", "above 1"]
    return [Result(f"Sequence ratios of {updates} updates on the miniature (δ = 0.8, 4 updates a step)", header, rows)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="Write the tables to this file as well, as Markdown.")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    console, results = Console(), []
    for part in (baseline_tables, alignment_tables, tiny_policy_tables, ratio_tables):
        for result in part():
            console.print(result.rich())
            results.append(result)
    if arguments.markdown is not None:
        arguments.markdown.write_text("\n".join(result.markdown() for result in results))


if __name__ == "__main__":
    main()
