"""The paper's questions, asked on the embedded task and answered with error bars, on a CPU.

    python examples/paper_in_miniature.py                 # methods against each other: the main table and its picture
    python examples/paper_in_miniature.py --tune          # what each method is compared at: learning rate, clip range
    python examples/paper_in_miniature.py --short         # the methods on the short task, as all that follow
    python examples/paper_in_miniature.py --ablations     # each mechanism off in turn, and other values of the options
    python examples/paper_in_miniature.py --factorial     # all combinations of four mechanisms: effects, interactions
    python examples/paper_in_miniature.py --agents 3 4 5  # more agents, at a fixed number of own rollouts
    python examples/paper_in_miniature.py --temperature   # does hotter sampling explain the gain?
    python examples/paper_in_miniature.py --clip-range    # is it GSPO's narrow clip range that GRPO is ahead by?
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
import importlib.util
import json
import multiprocessing
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from miniature_experiments import (
    ABLATION,
    CLIP_RANGE,
    FACTORIAL,
    MAIN,
    MAIN_SHORT,
    SETTINGS,
    TEMPERATURE,
    TUNING,
    TUNING_SEEDS,
    TWO_AGENTS,
    Experiment,
    Settings,
    false_positives,
    in_setting,
    more_agents,
    only,
)
from miniature_report import picture, tables, write_block
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.embedded import POLICIES, conv_dataset, conv_reward, noisy_conv_reward, policy_directory, policy_path
from hacpo_trl.options.recipe import read_recipe
from hacpo_trl.reporting.drawing import draw
from hacpo_trl.reporting.terminal import RewardTableCallback


RECIPE = Path(__file__).parent.parent / "configs" / "recipes" / "tiny.yaml"
# What the recipe says to the example script, and what a run of this script has no use for.
NOT_SETTINGS = ("task", "test_size", "agents", "output_dir", "save_steps", "save_total_limit", "seed")

SEEDS = [10, 11, 12, 13, 14]
TEST_SIZE = 256

CURVE_POINTS = 8
CURVE_SIZE = 32  # held-out prompts of each point of a curve
EVALUATION_SAMPLES = 8

# ------------------------------------------------------------------------------------------------------------ one run


@dataclass(frozen=True)
class Scale:
    """How large the runs are: all of it the same for every method.

    Attributes:
        test_size: Held-out prompts of the evaluation before and after.
        max_steps: No run makes more updates than this.
    """

    test_size: int = TEST_SIZE
    max_steps: int | None = None


def full_settings(method: Settings, seed: int, scale: Scale) -> dict[str, Any]:
    """Everything that a run's result depends on, as plain data: its key among the finished runs."""
    recipe = read_recipe(RECIPE)
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
    words = all(POLICIES[policy].wordings is not None for policy in agents.values())
    test = conv_dataset("test", settings["test_size"], words=words)
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
            conv_dataset("train", settings["train_size"], seed, words),
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
        line = json.dumps({"settings": settings, "result": result}) + "\n"
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
            if (error := job.exception()) is not None:
                raise RuntimeError(f"{title}: {jobs[job]} failed.") from error
            yield jobs[job], job.result()
            progress.advance(task)
    finally:
        for job in jobs:
            job.cancel()


def make_runs(wanted: Sequence[dict[str, Any]], runs: Runs, workers: int, console: Console):
    """Makes the runs that are missing, and before them the policies that they begin with."""
    finished = runs.read()
    missing = {key: settings for settings in wanted if (key := runs.key(settings)) not in finished}
    if not missing:
        return
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


# ----------------------------------------------------------------------------------------------------- the experiments


def command(experiment: Experiment, args: argparse.Namespace) -> str:
    """What makes an experiment, with those of this call's options that its results depend on."""
    parts = ["python", "examples/paper_in_miniature.py", *experiment.option.split()]
    if args.methods is not None:
        parts += ["--methods", *args.methods]
    if args.seeds != SEEDS:
        parts += ["--seeds", *map(str, args.seeds)]
    if args.test_size != TEST_SIZE:
        parts += ["--test-size", str(args.test_size)]
    if args.max_steps is not None:
        parts += ["--max-steps", str(args.max_steps)]
    return shlex.join(parts)


def present(experiment: Experiment, results: Mapping[str, Any], args: argparse.Namespace, console: Console):
    """Prints an experiment's tables and writes them, with its picture, to the output directory and the report."""
    parts = [
        f"```bash\n{command(experiment, args)}\n```",
        f"{experiment.title}; {len(args.seeds)} seeds, {min(args.seeds)} to {max(args.seeds)}. A star: survives "
        "Holm's correction over the differences of its table.",
    ]
    for title, table in tables(experiment, results).items():
        console.print(table.rich(f"{experiment.title}: {title}"))
        parts.append(f"{title}:\n\n{table.markdown()}")
    output_dir = Path(args.output_dir)
    if experiment.picture and len(args.seeds) > 1 and importlib.util.find_spec("matplotlib") is None:
        console.print("No picture was drawn: that needs matplotlib (pip install '.[report]').")
    elif experiment.picture and len(args.seeds) > 1:
        path = (Path(args.report).parent if args.report else output_dir) / f"{experiment.picture}.png"
        draw(picture(experiment, results), path)
        parts.append(f"![Held-out accuracy of the methods against generated tokens]({path.name})")
    content = "\n\n".join(parts)
    (output_dir / f"{experiment.name}.md").write_text(content + "\n", encoding="utf-8")
    if args.report:
        write_block(Path(args.report), experiment.name, content)


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
        present(experiment, results, args, console)


def chosen_experiments(args: argparse.Namespace) -> list[Experiment]:
    """The main comparison, unless others are asked for."""
    chosen = []
    chosen += [in_setting(name) for name in SETTINGS if name in (args.settings or ())]
    chosen += [TUNING] if args.tune else []
    chosen += [MAIN_SHORT] if args.short else []
    chosen += [ABLATION] if args.ablations else []
    chosen += [FACTORIAL] if args.factorial else []
    chosen += [more_agents(args.agents)] if args.agents else []
    chosen += [TEMPERATURE] if args.temperature else []
    chosen += [CLIP_RANGE] if args.clip_range else []
    chosen += [false_positives(probability) for probability in args.false_positives or ()]
    return chosen or [MAIN]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="learning rates and clip ranges of each method")
    parser.add_argument("--short", action="store_true", help="the methods on the short task")
    parser.add_argument("--ablations", action="store_true", help="each mechanism off in turn, other values of options")
    parser.add_argument("--factorial", action="store_true", help="all combinations of four mechanisms")
    parser.add_argument("--agents", type=int, nargs="+", help="also with so many agents: 3, 4, 5")
    parser.add_argument("--temperature", action="store_true", help="GSPOx2 with hotter sampling")
    parser.add_argument("--clip-range", action="store_true", help="wider clip ranges of own rollouts")
    parser.add_argument("--false-positives", type=float, nargs="+", help="probabilities of accepting a wrong answer")
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), help="other settings; default: all of them")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 10 to 14; to tune 0 and 1")
    parser.add_argument("--methods", nargs="+", help="only these methods, and the one they are compared with")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; default: one a core")
    parser.add_argument("--max-steps", type=int, help="no run makes more updates than this, for a quick look")
    parser.add_argument("--test-size", type=int, default=TEST_SIZE, help="held-out prompts, up to 512")
    parser.add_argument(
        "--output-dir", default="outputs/paper_in_miniature", help="holds runs.jsonl, tables, pictures"
    )
    parser.add_argument("--report", help="a Markdown file whose blocks are filled with the experiments' tables")
    args = parser.parse_args()
    if args.seeds is None:
        args.seeds = TUNING_SEEDS if args.tune else SEEDS
    if args.settings == []:
        args.settings = list(SETTINGS)
    return args


if __name__ == "__main__":
    main(parse_args())
