"""The paper's questions, asked on the embedded task and answered with error bars, on a CPU.

    python examples/paper_in_miniature.py                 # methods against each other: the main table and its picture
    python examples/paper_in_miniature.py --ablations     # each mechanism off in turn, and other values of the options
    python examples/paper_in_miniature.py --factorial     # all combinations of four mechanisms: effects, interactions
    python examples/paper_in_miniature.py --agents 3 4 5  # more agents, at a fixed number of own rollouts
    python examples/paper_in_miniature.py --temperature   # does hotter sampling explain the gain?
    python examples/paper_in_miniature.py --false-positives 0.05 0.2      # a verifier that makes mistakes
    python examples/paper_in_miniature.py --settings      # settings in which each mechanism has something to do

Every run is `HACPOTrainer` with the recipe configs/recipes/tiny.yaml, apart from what the experiment says. A finished
run is a line of `runs.jsonl` in the output directory, under its full settings: runs that are there are not made again,
whichever experiment asks for them, and a run that is broken off leaves nothing. The key does not know the package's
code: after a change of it, begin a new file.

Policies are evaluated at temperature 1 by the true verifier, whatever they are trained with.
"""

import argparse
import fcntl
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import rich.table
import torch
import transformers
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.callbacks import RewardTableCallback
from hacpo_trl.evaluation.metrics import Estimate
from hacpo_trl.miniature import conv_dataset, conv_reward, noisy_conv_reward, policy_directory, policy_path
from hacpo_trl.statistics import factorial_effects, paired_difference, t_interval


RECIPE = Path(__file__).parent.parent / "configs" / "recipes" / "tiny.yaml"
# What the recipe says to the example script, and what a run of this script has no use for.
NOT_SETTINGS = ("task", "test_size", "agents", "output_dir", "save_steps", "save_total_limit", "seed")

CURVE_POINTS = 10
CURVE_SIZE = 64  # held-out prompts of each point of a curve
EVALUATION_SAMPLES = 8

# ----------------------------------------------------------------------------------------------------- the experiments

# A method is what its settings change in the recipe: HACPOConfig's, and this script's `agents` (name -> policy) and
# `false_positives`.
Settings = Mapping[str, Any]

TWO_AGENTS = {"qwen": "qwen3", "llama": "llama"}

# GSPO and GRPO see half the rollouts that a learner of HACPO sees, in half the updates.
GSPO = {"algorithm": "gspo", "max_steps": 80}
# As many rollouts and updates as a learner of HACPO, all of them its own.
GSPO_X2 = {"algorithm": "gspo", "num_generations": 16}
NAIVE_LEARNER = {"algorithm": "naive"}
NAIVE_SOURCE = {"algorithm": "naive", "naive_old_logprobs": "source"}

METHODS: dict[str, Settings] = {
    "HACPO": {},
    "GSPO": GSPO,
    "GSPOx2": GSPO_X2,
    "GRPO": {"algorithm": "grpo", "max_steps": 80},
    "naive, learner's log-probs": NAIVE_LEARNER,
    "naive, source's log-probs": NAIVE_SOURCE,
}

ABLATIONS: dict[str, Settings] = {
    "no capability baseline": {"advantage_baseline": "own"},
    "no capability weight": {"capability_weighting": False},
    "no damping, α = 0": {"alpha": 0.0},
    "no stepwise bound, δ_step = 0": {"delta_step": 0.0},
    "no clipping": {"clip_cross": False},
}

OPTIONS: dict[str, Settings] = {
    "α = 2": {"alpha": 2.0},
    "α = 3": {"alpha": 3.0},
    "δ = 0.2": {"delta": 0.2},
    "ratios by each side's own length": {"ratio_normalization": "own"},
    "own rollouts first": {"minibatch_order": "self_first"},
    "K = 1": {"capability_window": 1},
    "K = 20": {"capability_window": 20},
}

# The paper's four mechanisms; each is on unless its setting is applied.
FACTORS: dict[str, Settings] = {
    "capability baseline": {"advantage_baseline": "own"},
    "capability weight": {"capability_weighting": False},
    "damping": {"alpha": 0.0},
    "clipping": {"clip_cross": False},
}


@dataclass(frozen=True)
class Experiment:
    """Methods that are compared.

    Attributes:
        name: Name of its files and of its block in a report.
        title: One line.
        methods: For each method its settings.
        reference: The method that the others are paired with.
        agents: The agents that the table shows.
        factors: Of a factorial design, its factors' names; the methods are then all their combinations.
        option: The option of this script that asks for it.
        picture: Whether its curves are drawn.
    """

    name: str
    title: str
    methods: Mapping[str, Settings]
    reference: str
    agents: Sequence[str] = tuple(TWO_AGENTS)
    factors: Sequence[str] = ()
    option: str = ""
    picture: bool = False

    @property
    def command(self) -> str:
        return f"python examples/paper_in_miniature.py {self.option}".strip()


def factorial(factors: Mapping[str, Settings]) -> dict[str, Settings]:
    """All combinations of mechanisms, by what is on."""
    methods = {}
    for on in itertools.product((False, True), repeat=len(factors)):
        off = [settings for settings, is_on in zip(factors.values(), on, strict=True) if not is_on]
        methods[factorial_label(factors, on)] = {key: value for settings in off for key, value in settings.items()}
    return methods


def factorial_label(factors: Iterable[str], on: Sequence[bool]) -> str:
    return " + ".join(name for name, is_on in zip(factors, on, strict=True) if is_on) or "none of them"


MAIN = Experiment("main", "Methods", METHODS, "GSPOx2", picture=True)
ABLATION = Experiment(
    "ablations", "Mechanisms and options", {"HACPO": {}, **ABLATIONS, **OPTIONS}, "HACPO", option="--ablations"
)
FACTORIAL = Experiment(
    "factorial",
    "All combinations of four mechanisms",
    factorial(FACTORS),
    "none of them",
    factors=tuple(FACTORS),
    option="--factorial",
)
TEMPERATURE = Experiment(
    "temperature",
    "Hotter sampling of an agent's own rollouts",
    {
        "HACPO": {},
        "GSPOx2": GSPO_X2,
        "GSPOx2, temperature 1.2": {**GSPO_X2, "temperature": 1.2},
        "GSPOx2, temperature 1.5": {**GSPO_X2, "temperature": 1.5},
        "GSPOx2, top-p 0.9": {**GSPO_X2, "top_p": 0.9},
        "GSPOx2, temperature 1.2, top-p 0.9": {**GSPO_X2, "temperature": 1.2, "top_p": 0.9},
        "GSPOx2, temperature 1.5, top-p 0.9": {**GSPO_X2, "temperature": 1.5, "top_p": 0.9},
        "HACPO, temperature 1.2": {"temperature": 1.2},
    },
    "GSPOx2",
    option="--temperature",
)

FURTHER_AGENTS = {"third": "llama-comma", "fourth": "qwen3-comma", "fifth": "llama-bytes"}


def more_agents(numbers: Sequence[int]) -> Experiment:
    """HACPO with more agents, 16 prompts x 8 own rollouts in 40 steps for each of them, and GSPO with as many rollouts
    as such a learner sees.

    Agents of GSPO learn alone, so that it needs only those which the table shows.
    """
    most = len(TWO_AGENTS) + len(FURTHER_AGENTS)
    if unknown := [n for n in numbers if not len(TWO_AGENTS) < n <= most]:
        raise SystemExit(f"--agents takes numbers from {len(TWO_AGENTS) + 1} to {most}, not {unknown}.")
    methods: dict[str, Settings] = {"GSPO": GSPO, "HACPO, 2 agents": {}, "GSPOx2": GSPO_X2}
    for n in numbers:
        agents = dict(list({**TWO_AGENTS, **FURTHER_AGENTS}.items())[:n])
        methods[f"HACPO, {n} agents"] = {"agents": agents, "max_steps": 80 * n}
        methods[f"GSPOx{n}"] = {"algorithm": "gspo", "num_generations": 8 * n, "max_steps": 80 * n}
    return Experiment("agents", "More agents", methods, "GSPO", option=f"--agents {' '.join(map(str, numbers))}")


def false_positives(probability: float) -> Experiment:
    """The verifier of the training accepts wrong answers with this probability."""
    methods = {name: {**METHODS[name], "false_positives": probability} for name in ("HACPO", "GSPO", "GSPOx2")}
    return Experiment(
        f"false-positives-{probability:g}",
        f"A verifier that accepts {probability:.0%} of the wrong answers",
        methods,
        "GSPOx2",
        option=f"--false-positives {probability:g}",
    )


SETTINGS: dict[str, tuple[str, Settings]] = {
    "gap": (
        "A gap in capability: one agent hardly ever right",
        {"agents": {"qwen": "qwen3-strong", "llama": "llama-weak"}, "max_steps": 80},
    ),
    "wide-gap": (
        "A wider gap: one agent next to never right",
        {"agents": {"qwen": "qwen3-strong", "llama": "llama-weaker"}, "max_steps": 80},
    ),
    "updates": (
        "16 updates a step, at a higher learning rate",
        {"prompts_per_step": 64, "learning_rate": 3e-4, "max_steps": 80},
    ),
    "adversary": ("A collaborator that is confidently wrong", {"agents": {"qwen": "qwen3", "llama": "llama-wrong"}}),
}


def in_setting(name: str) -> Experiment:
    """HACPO, HACPO without each mechanism, and what it is compared with, in another setting than the recipe's."""
    title, setting = SETTINGS[name]
    methods = {"HACPO": {}, **ABLATIONS, "naive, source's log-probs": NAIVE_SOURCE, "GSPOx2": GSPO_X2}
    methods = {method: {**setting, **settings} for method, settings in methods.items()}
    return Experiment(name, title, methods, "HACPO", option="--settings")


# ------------------------------------------------------------------------------------------------------------ one run


@dataclass(frozen=True)
class Scale:
    """How large the runs are: all of it the same for every method.

    Attributes:
        test_size: Held-out prompts of the evaluation before and after.
        max_steps: No run makes more updates than this.
    """

    test_size: int = 256
    max_steps: int | None = None


def full_settings(method: Settings, seed: int, scale: Scale) -> dict[str, Any]:
    """Everything that a run's result depends on, as plain data: its key among the finished runs."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    config = {key: value for key, value in recipe.items() if key not in NOT_SETTINGS} | dict(method) | {"seed": seed}
    agents = config.pop("agents", TWO_AGENTS)
    false_positives, train_size = config.pop("false_positives", 0.0), config.pop("train_size")
    if scale.max_steps is not None:
        config["max_steps"] = min(config["max_steps"], scale.max_steps)
    return {
        "config": config,
        "agents": agents,
        # The directory's name tells a policy whose definition has changed from what it was.
        "policies": {name: policy_directory(policy, seed).name for name, policy in agents.items()},
        "false_positives": false_positives,
        "train_size": train_size,
        "test_size": scale.test_size,
    }


def run_config(settings: Mapping[str, Any], output_dir: str, **changes: Any) -> HACPOConfig:
    config = settings["config"] | changes
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return HACPOConfig(output_dir, **quiet, **config)


def evaluation_config(settings: Mapping[str, Any], output_dir: str) -> HACPOConfig:
    """Sampling as it is without any setting, whatever the run trains with."""
    same = ("seed", "max_completion_length", "per_device_eval_batch_size")
    config = {key: settings["config"][key] for key in same}
    return run_config({"config": config}, output_dir, num_generations_eval=EVALUATION_SAMPLES)


def accuracies(metrics: Mapping[str, float], agents: Iterable[str]) -> dict[str, dict[str, float]]:
    """For each agent avg@8 and best@8, and avg@8 in each family of prompts."""
    result = {}
    for name in agents:
        prefix = f"eval_{name}/reward/"
        families = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
        best = metrics[f"eval_{name}/best@{EVALUATION_SAMPLES}"]
        result[name] = {"avg@8": metrics[f"eval_{name}/reward"], "best@8": best, **families}
    return result


class Curve(TrainerCallback):
    """Evaluates the policies ten times in a run, on a part of the held-out prompts."""

    def __init__(self, evaluate: Callable[[], dict[str, float]], every: int):
        self.evaluate, self.every = evaluate, every
        self.points: list[dict[str, Any]] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.points.append({"update": 0, "accuracy": self.evaluate()})

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            self.points.append({"update": state.global_step, "accuracy": self.evaluate()})


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Trains and evaluates the agents of one run."""
    wall, cpu = time.perf_counter(), time.process_time()
    seed, agents = settings["config"]["seed"], settings["agents"]
    paths = {name: policy_path(policy, seed) for name, policy in agents.items()}
    models = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in paths.items()}
    tokenizers = {name: AutoTokenizer.from_pretrained(path) for name, path in paths.items()}
    test = conv_dataset("test", settings["test_size"])
    curve_test = test.select(range(min(CURVE_SIZE, len(test))))
    noise = settings["false_positives"]
    every = max(1, settings["config"]["max_steps"] // CURVE_POINTS)
    with tempfile.TemporaryDirectory() as folder:
        # Made first: the last trainer that is given a policy sets the temperature of its log-probabilities.
        evaluator = HACPOTrainer(
            models, conv_reward, evaluation_config(settings, folder), None, test, processing_classes=tokenizers
        )
        trainer = HACPOTrainer(
            models,
            partial(noisy_conv_reward, false_positives=noise, seed=seed) if noise else conv_reward,
            run_config(settings, folder, logging_steps=every),
            conv_dataset("train", settings["train_size"], seed),
            processing_classes=tokenizers,
        )
        curve = Curve(lambda: accuracies(evaluator.evaluate(curve_test), agents), every)
        trainer.remove_callback(RewardTableCallback)
        trainer.add_callback(curve)
        before = accuracies(evaluator.evaluate(), agents)
        trainer.train()
        after = accuracies(evaluator.evaluate(), agents)
    logs = {log["step"]: log for log in trainer.state.log_history if "loss" in log}
    for point in curve.points:
        log = logs.get(point["update"], {})
        point["generated"] = {name: log.get(f"{name}/tokens/generated", 0.0) for name in agents}
    return {
        "before": before,
        "after": after,
        "curve": curve.points,
        "tokens": {
            kind: sum(trainer.token_totals[f"{name}/tokens/{kind}"] for name in agents)
            for kind in ("generated", "scored", "trained")
        },
        "updates": trainer.state.global_step,
        "metrics": exchange_metrics(logs[max(logs)], agents),
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
    }


def exchange_metrics(log: Mapping[str, float], agents: Iterable[str]) -> dict[str, float]:
    """What a run's last log says of ratios, clipping, capabilities and alignment."""
    wanted = ("cross_ratio/", "own_ratio/", "clip_ratio/", "capability", "alignment/", "baseline_fallback", "entropy")
    prefixes = tuple(f"{name}/{metric}" for name in agents for metric in wanted)
    return {key: value for key, value in log.items() if key.startswith(prefixes)}


# ----------------------------------------------------------------------------------------------------------- all runs


class Runs:
    """The finished runs, one line of JSON each.

    A line is written whole, by one process at a time. What a killed process left of a line is cut off by the next one
    that writes.
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> dict[str, dict[str, Any]]:
        """The results by `key` of their settings."""
        if not self.path.exists():
            return {}
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        finished = [json.loads(line) for line in lines if line.endswith("\n")]
        return {self.key(line["settings"]): line["result"] for line in finished}

    @staticmethod
    def key(settings: Mapping[str, Any]) -> str:
        return json.dumps(settings, sort_keys=True)

    def append(self, settings: Mapping[str, Any], result: Mapping[str, Any]):
        line = json.dumps({"settings": settings, "result": result}, ensure_ascii=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def _prepare_worker():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


def _make_policy(policy: tuple[str, int]):
    policy_path(*policy)


def _done(pool: ProcessPoolExecutor, function: Callable, arguments: Sequence[Any], progress: Progress, title: str):
    """Yields (argument, result) as the processes finish; begins no further one after an error."""
    task = progress.add_task(title, total=len(arguments))
    jobs = {pool.submit(function, argument): argument for argument in arguments}
    try:
        for job in as_completed(jobs):
            yield jobs[job], job.result()
            progress.advance(task)
    finally:
        for job in jobs:
            job.cancel()


def make_runs(wanted: Sequence[dict[str, Any]], runs: Runs, workers: int, console: Console):
    """Makes the runs that are missing, and before them the policies that they begin with."""
    finished = runs.read()
    missing = {key: settings for settings in wanted if (key := runs.key(settings)) not in finished}
    policies = {(policy, s["config"]["seed"]) for s in missing.values() for policy in s["agents"].values()}
    unmade = sorted(policy for policy in policies if not policy_directory(*policy).is_dir())
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    context = multiprocessing.get_context("spawn")
    # A run takes long: speed is measured over the last hour.
    with (
        Progress(*columns, console=console, speed_estimate_period=3600) as progress,
        ProcessPoolExecutor(workers, context, initializer=_prepare_worker) as pool,
    ):
        for _ in _done(pool, _make_policy, unmade, progress, "policies"):
            pass
        for settings, result in _done(pool, run, list(missing.values()), progress, "runs"):
            runs.append(settings, result)


# ------------------------------------------------------------------------------------------------------------- reports

Results = Mapping[str, Sequence[Mapping[str, Any]]]  # method -> a result for each seed, in the order of seeds


def number(estimate: Estimate | float, sign: str = "") -> str:
    """`0.855 ± 0.041`: a mean and half of its 95 % interval."""
    if isinstance(estimate, float):
        return f"{estimate:{sign}.3f}"
    return f"{estimate.value:{sign}.3f} ± {estimate.high - estimate.value:.3f}"


def mean(values: Sequence[float]) -> Estimate | float:
    """With its interval where there is more than one seed."""
    return t_interval(values) if len(values) > 1 else float(values[0])


def difference(values: Sequence[float], reference: Sequence[float]) -> Estimate | float:
    return paired_difference(values, reference) if len(values) > 1 else float(values[0] - reference[0])


def final(results: Sequence[Mapping[str, Any]], agent: str, metric: str = "avg@8", when: str = "after") -> list[float]:
    """One agent's accuracy for each seed."""
    return [result[when][agent][metric] for result in results]


@dataclass(frozen=True)
class Table:
    """A table for the terminal and for Markdown."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] + ["---:"] * (len(self.header) - 1), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def rich(self, title: str) -> rich.table.Table:
        table = rich.table.Table(title=title)
        for position, column in enumerate(self.header):
            table.add_column(column, justify="right" if position else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def accuracy_table(experiment: Experiment, results: Results) -> Table:
    """Held-out accuracy of every method, and its paired difference to the reference."""
    header = ["method"]
    for agent in experiment.agents:
        header += [f"{agent} avg@8", f"− {experiment.reference}", f"{agent} best@8"]
    rows = []
    for method, of_method in results.items():
        rows.append([method])
        for agent in experiment.agents:
            values, reference = final(of_method, agent), final(results[experiment.reference], agent)
            against = "" if method == experiment.reference else number(difference(values, reference), "+")
            rows[-1] += [number(mean(values)), against, number(mean(final(of_method, agent, "best@8")))]
    start = ["at the start"]
    for agent in experiment.agents:
        before = {
            metric: final(results[experiment.reference], agent, metric, "before") for metric in ("avg@8", "best@8")
        }
        start += [number(mean(before["avg@8"])), "", number(mean(before["best@8"]))]
    return Table(header, [start, *rows])


def cost_table(results: Results) -> Table:
    """Updates, tokens and CPU seconds of a run, evaluations included in the seconds."""
    header = ["method", "updates", "generated tokens", "scored", "trained", "CPU s"]
    rows = []
    for method, of_method in results.items():
        count = len(of_method)
        tokens = [sum(r["tokens"][kind] for r in of_method) / count for kind in ("generated", "scored", "trained")]
        seconds = sum(r["cpu_seconds"] for r in of_method) / count
        rows.append([method, str(of_method[0]["updates"]), *(f"{t:,.0f}" for t in tokens), f"{seconds:.0f}"])
    return Table(header, rows)


# Title, prefix of the metrics of an agent, and how seeds (and peers) are put together.
EXCHANGE_COLUMNS = (
    ("cross ratio", "cross_ratio/mean", statistics.fmean),
    ("smallest", "cross_ratio/min", min),
    ("largest", "cross_ratio/max", max),
    ("discarded below", "clip_ratio/cross_below", statistics.fmean),
    ("discarded above", "clip_ratio/cross_above", statistics.fmean),
    ("ω", "capability_ratio/", statistics.fmean),
    ("ρ", "alignment/", statistics.fmean),
)


def exchange_table(experiment: Experiment, results: Results) -> Table | None:
    """What the exchange looked like in the last tenth of the updates, for each agent as the learner."""
    header = ["method", *(f"{title}, {' / '.join(experiment.agents)}" for title, _, _ in EXCHANGE_COLUMNS)]
    rows = []
    for method, of_method in results.items():
        row = [method]
        for _, prefix, together in EXCHANGE_COLUMNS:
            cells = []
            for agent in experiment.agents:
                metrics = [item for result in of_method for item in result["metrics"].items()]
                values = [value for key, value in metrics if key.startswith(f"{agent}/{prefix}")]
                cells.append(f"{together(values):.2f}" if values else "")
            row.append(" / ".join(cells) if any(cells) else "")
        if row[1]:
            rows.append(row)
    return Table(header, rows) if rows else None


def effects_table(experiment: Experiment, results: Results) -> Table:
    """Main effects and two-factor interactions of a factorial design on avg@8."""
    combinations = list(itertools.product((False, True), repeat=len(experiment.factors)))
    effects = {
        agent: factorial_effects(
            {on: final(results[factorial_label(experiment.factors, on)], agent) for on in combinations}
        )
        for agent in experiment.agents
    }
    return Table(
        ["effect on avg@8", *experiment.agents],
        [
            [" x ".join(experiment.factors[i] for i in subset)]
            + [number(effects[agent][subset], "+") for agent in experiment.agents]
            for subset in next(iter(effects.values()))
        ],
    )


LABEL_GAP = 0.025  # of accuracy, between the labels of a picture


def draw(experiment: Experiment, results: Results, path: Path):
    """Held-out accuracy against generated tokens, a panel for each agent; readable without colour."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    styles = [("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"), ((0, (6, 1, 1, 1, 1, 1)), "v"), ((0, (1, 3)), "x")]
    figure, panels = pyplot.subplots(1, len(experiment.agents), figsize=(11, 4.4), sharey=True, layout="constrained")
    for panel, agent in zip(panels, experiment.agents, strict=True):
        ends = []
        for (method, of_method), (line, marker) in zip(results.items(), styles, strict=False):
            points = list(zip(*(result["curve"] for result in of_method), strict=True))
            tokens = [statistics.fmean(p["generated"][agent] for p in of_seeds) / 1000 for of_seeds in points]
            estimates = [t_interval([p["accuracy"][agent]["avg@8"] for p in of_seeds]) for of_seeds in points]
            values = [estimate.value for estimate in estimates]
            panel.plot(tokens, values, color="black", linestyle=line, marker=marker, markersize=4, linewidth=1.2)
            low, high = [estimate.low for estimate in estimates], [estimate.high for estimate in estimates]
            panel.fill_between(tokens, low, high, color="black", alpha=0.08, linewidth=0)
            ends.append((values[-1], tokens[-1], method))
        height = 0.0
        for value, x, method in sorted(ends):
            # Labels are a line apart, whatever the curves do.
            height = max(value, height + LABEL_GAP)
            arrow, box = {"arrowstyle": "-", "lw": 0.4}, {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
            panel.annotate(method, (x, value), (x + 1.5, height), va="center", fontsize=8, arrowprops=arrow, bbox=box)
        panel.set_title(agent)
        panel.set_xlabel("tokens it generated, thousands")
        panel.set_xlim(0, panel.get_xlim()[1] * 1.15)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("mean reward on held-out prompts")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def block(report: str, name: str, content: str) -> str:
    """Puts an experiment's tables between its two marks in a report."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if report.count(begin) != 1 or report.count(end) != 1:
        raise ValueError(f"The report has no place for the experiment {name!r}. It needs the lines {begin} and {end}.")
    head, _, rest = report.partition(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def tables(experiment: Experiment, results: Results) -> dict[str, Table]:
    found = {"Accuracy on held-out prompts": accuracy_table(experiment, results)}
    if experiment.factors:
        found["Effects"] = effects_table(experiment, results)
    found["Cost of a run"] = cost_table(results)
    exchanged = exchange_table(experiment, results)
    return found | ({"Exchange at the end": exchanged} if exchanged is not None else {})


def main(args: argparse.Namespace):
    console = Console()
    scale, runs = Scale(args.test_size, args.max_steps), Runs(Path(args.output_dir) / "runs.jsonl")
    experiments = [only(experiment, args.methods) for experiment in chosen_experiments(args)]
    wanted = [
        full_settings(method, seed, scale)
        for seed in args.seeds
        for experiment in experiments
        for method in experiment.methods.values()
    ]
    make_runs(wanted, runs, args.workers, console)
    finished = runs.read()
    for experiment in experiments:
        results = {
            name: [finished[runs.key(full_settings(method, seed, scale))] for seed in args.seeds]
            for name, method in experiment.methods.items()
        }
        seeds = ", ".join(map(str, args.seeds))
        parts = [f"`{experiment.command}`", f"{experiment.title}; seeds {seeds}. Means ± half of a 95 % interval."]
        for title, table in tables(experiment, results).items():
            console.print(table.rich(f"{experiment.title}: {title}"))
            parts.append(f"**{title}**\n\n{table.markdown()}")
        folder = Path(args.report).parent if args.report else Path(args.output_dir)
        if experiment.picture and len(args.seeds) > 1:
            picture = folder / f"{experiment.name}.png"
            draw(experiment, results, picture)
            parts.append(f"![{experiment.title}]({picture.name})")
        content = "\n\n".join(parts)
        (Path(args.output_dir) / f"{experiment.name}.md").write_text(content + "\n", encoding="utf-8")
        if args.report:
            report = Path(args.report)
            report.write_text(block(report.read_text(encoding="utf-8"), experiment.name, content), encoding="utf-8")


def only(experiment: Experiment, methods: Sequence[str] | None) -> Experiment:
    """The experiment with some of its methods, and always its reference."""
    if methods is None:
        return experiment
    if unknown := [name for name in methods if name not in experiment.methods]:
        raise SystemExit(f"'{experiment.name}' has no methods {unknown}; it has {list(experiment.methods)}.")
    chosen = {n: s for n, s in experiment.methods.items() if n in methods or n == experiment.reference}
    return replace(experiment, methods=chosen)


def chosen_experiments(args: argparse.Namespace) -> list[Experiment]:
    """The main comparison, unless others are asked for."""
    chosen = []
    chosen += [in_setting(name) for name in SETTINGS if name in (args.settings or ())]
    chosen += [ABLATION] if args.ablations else []
    chosen += [FACTORIAL] if args.factorial else []
    chosen += [more_agents(args.agents)] if args.agents else []
    chosen += [TEMPERATURE] if args.temperature else []
    chosen += [false_positives(probability) for probability in args.false_positives or ()]
    return chosen or [MAIN]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ablations", action="store_true", help="each mechanism off in turn, other values of options")
    parser.add_argument("--factorial", action="store_true", help="all combinations of four mechanisms")
    parser.add_argument("--agents", type=int, nargs="+", help="also with so many agents: 3, 4, 5")
    parser.add_argument("--temperature", action="store_true", help="GSPOx2 with hotter sampling")
    parser.add_argument("--false-positives", type=float, nargs="+", help="probabilities of accepting a wrong answer")
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), help="other settings; default: all of them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14])
    parser.add_argument("--methods", nargs="+", help="only these methods, and the one they are compared with")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; default: one a core")
    parser.add_argument("--max-steps", type=int, help="no run makes more updates than this, for a quick look")
    parser.add_argument("--test-size", type=int, default=256, help="held-out prompts, up to 512")
    parser.add_argument(
        "--output-dir", default="outputs/paper_in_miniature", help="holds runs.jsonl, tables, pictures"
    )
    parser.add_argument("--report", help="a Markdown file whose blocks are filled with the experiments' tables")
    args = parser.parse_args()
    if args.settings == []:
        args.settings = list(SETTINGS)
    return args


if __name__ == "__main__":
    main(parse_args())
