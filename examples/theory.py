"""What HACPO's theory promises (arXiv 2603.02604, Theorems 4.1 and 4.3), in numbers.

    python examples/theory.py
    python examples/theory.py --markdown theory.md

It takes some minutes on one core of a CPU. Four parts:

1. **The baseline, by Monte Carlo** (`hacpo_trl.theory.baselines`).
2. **Gradients on peers' rollouts, exactly** (`hacpo_trl.theory.gradients`). The claims tested: ρ ≥ 0 ⇒
   ⟨g_own, g_cross⟩ ≥ 0, for the ρ(C, Z) of Assumption D.12 and for Remark D.13's proxy, which a run can measure.
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
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.backends.log_probabilities import completion_logps, prepare_policy
from hacpo_trl.embedded import conv_dataset, conv_reward, policy_path
from hacpo_trl.options.recipe import read_recipe
from hacpo_trl.reporting.tables import Table
from hacpo_trl.rollouts.rows import pad_sequences
from hacpo_trl.theory.baselines import BASELINES, improving_learner, population, simulate
from hacpo_trl.theory.gradients import (
    CrossSettings,
    assumption_correlation,
    confidence_correlation,
    expected_advantages,
    gradients,
    logged_alignment,
    objectives,
    random_pairs,
    separation,
)


RECIPE = Path(__file__).parent.parent / "configs" / "recipes" / "tiny.yaml"

# ------------------------------------------------------------------------------------------------ 1. the baseline


def baseline_tables(steps: int = 1000) -> list[Table]:
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
    tables = [Table(header, rows, words=3, title=title)]

    rows, success, name = [], population("complementary"), "capability, no fallback"
    for window in (1, 5, 20):
        for prompts in (8, 64, 256):
            e = simulate(success, [name], prompts_per_step=prompts, window=window, steps=steps)[name, 0]
            mean = f"{e.mean:+.4f} ± {e.standard_error:.4f}"
            rows.append([f"K = {window}, {prompts} prompts", mean, f"{e.of_step:.3f}", f"{e.bias:.3f}"])
    header = ["window, prompts a step", "mean over prompts", "rms of a step's mean", "rms bias on a prompt"]
    tables.append(
        Table(header, rows, title="The capability-aware baseline of the weaker agent, complementary population")
    )

    rows = [[f"K = {window}", f"{improving_learner(window, runs=steps // 10):+.4f}"] for window in (1, 5, 20)]
    title = "The same baseline while the learner improves by .005 a step and its peer does not"
    return [*tables, Table(["window", "mean over prompts"], rows, title=title)]


# ------------------------------------------------------------------------------------ 2. gradients on peers' rollouts


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


def alignment_tables(pairs: int = 2000) -> list[Table]:
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
    return [Table(header, rows, words=2, title=title)]


def assumption_tables(pairs: int = 2000) -> list[Table]:
    """Assumption D.12 beside its proxy: what each says of the inner product of Theorem 4.3."""
    rows = []
    for shared in (False, True):
        sample = random_pairs(pairs, shared)
        proxy = confidence_correlation(sample.log_learner(sample.parameters), sample.log_source, sample.rewards)
        for settings in SETTINGS:
            if settings.clip or not settings.alpha:
                continue
            rho, inner = assumption_correlation(sample, settings)
            rows.append(
                [
                    "shared features" if shared else "tabular",
                    settings.label,
                    _share(rho > 0),
                    _share(inner[rho > 0] > 0),
                    _share(inner[rho < 0] > 0),
                    _share((proxy > 0) == (rho > 0)),
                    _share(inner[proxy > 0] > 0),
                    _share(inner[proxy < 0] > 0),
                ]
            )
    header = ["policies", "ratio", "ρ(C, Z) > 0", "E[CZ] > 0 where ρ(C, Z) > 0", "where ρ(C, Z) < 0"]
    header += ["the proxy's sign is that of ρ(C, Z)", "E[CZ] > 0 where the proxy > 0", "where it is < 0"]
    return [Table(header, rows, words=2, title=f"Assumption D.12 and its proxy, {pairs} random pairs")]


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


def tiny_policy_tables(seeds: Sequence[int] = (0, 1), prompts: int = 2) -> list[Table]:
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
    tables = [Table(header, rows, title=title)]

    rho = torch.tensor([pair.rho for pair in pairs])
    logged = torch.tensor([float("nan") if pair.logged is None else pair.logged for pair in pairs])
    positive = torch.tensor([pair.cosines for pair in pairs]) > 0
    shares = [[_share(positive[where, i]) for i in (0, 1)] for where in (rho > 0, rho < 0, logged > 0, logged < 0)]
    labels = ("ρ > 0", "ρ < 0", "logged ρ > 0", "logged ρ < 0")
    rows = [[label, *of_label] for label, of_label in zip(labels, shares, strict=True)]
    header = ["", "clip [0.2, 1]", "no clip"]
    return [*tables, Table(header, rows, title="The same, counted: shares with ⟨g_own, g_cross⟩ > 0")]


# ------------------------------------------------------------------------------------------------ 4. ratios of a run


def ratio_tables(updates: int = 160) -> list[Table]:
    """A run with the settings of configs/recipes/tiny.yaml, or the beginning of one."""
    recipe = read_recipe(RECIPE)
    not_settings = ("task", "train_size", "test_size", "agents", "output_dir", "save_steps", "save_total_limit")
    settings = {key: value for key, value in recipe.items() if key not in not_settings}
    settings |= {"max_steps": updates, "logging_steps": 4, "save_strategy": "no", "report_to": "none"}
    with tempfile.TemporaryDirectory() as folder:
        args = HACPOConfig(folder, **settings)
        models = {"qwen": policy_path("qwen3-words"), "llama": policy_path("llama-words")}
        trainer = HACPOTrainer(models, conv_reward, args, conv_dataset("train", recipe["train_size"], words=True))
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
    title = f"Sequence ratios of {updates} updates on the embedded task in words (δ = {args.delta}, 4 updates a step)"
    return [Table(header, rows, title=title)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="Write the tables to this file as well, as Markdown.")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    console, tables = Console(), []
    for part in (baseline_tables, alignment_tables, assumption_tables, tiny_policy_tables, ratio_tables):
        for table in part():
            console.print(table.rich())
            tables.append(table)
    if arguments.markdown is not None:
        arguments.markdown.write_text("\n".join(table.markdown() for table in tables))


if __name__ == "__main__":
    main()
