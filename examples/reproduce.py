"""Trains the paper's methods on one of its pairs of models, evaluates them, and prints the results beside the paper's.

    python examples/reproduce.py --pair qwen3-1.7b+4b            # everything, on a node of 8 GPUs
    python examples/reproduce.py --pair qwen3-1.7b+4b --print    # the commands, for a cluster
    python examples/reproduce.py --pair tiny                     # the embedded pair, on a CPU in some minutes

A method is the pair's recipe with the changes in configs/recipes/methods/, without the settings that its algorithm
does not read. What follows `--` goes to training:
`-- --train_size 1024`. Everything lies in OUTPUT_DIR/PAIR/METHOD: the recipe that was trained with, the run, its
evaluations. The same command continues: a run that is finished is not made again, a broken one goes on from its last
checkpoint, and one that was made with other settings is refused.

What it is compared with is examples/paper_results.csv: Tables 1 and 7 of arXiv 2603.02604v1, one run each, without
intervals. Ten of the 72 averages printed there miss the mean of their row by up to .011; here an average always is it.

How the paper evaluates is only partly known. Appendix A says avg@1, best@30 on AIME 2025, and answers of up to 8,196
tokens. Here avg@1 is greedy, as validation is in the authors' scripts, and best@30 is taken at temperature 1 and
computed as in verl, which the paper used: the best of 30 draws from the 30 answers *with replacement*, which is less
than the best of them all.
"""

import argparse
import csv
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from hacpo_trl.evaluation.benchmarks import BENCHMARKS
from hacpo_trl.evaluation.jobs import rewards_of
from hacpo_trl.evaluation.metrics import best_with_replacement
from hacpo_trl.options.checks import OPTIONS_OF
from hacpo_trl.options.recipe import read_recipe
from hacpo_trl.reporting.tables import Table


REPOSITORY = Path(__file__).parent.parent
RECIPES = REPOSITORY / "configs" / "recipes"
PAPER_RESULTS = Path(__file__).parent / "paper_results.csv"

# The methods in the order of the paper's tables, and what each of them is compared with there.
START = "start"
METHODS = {
    START: "start",
    "grpo": "grpo",
    "gspo": "gspo",
    "gspo_x2": "gspo_x2",
    "naive": "naive",
    "naive_source": "naive",
    "hacpo": "hacpo",
    "hacpo_code": "hacpo",
}
# Without naive_source and hacpo_code, readings that the paper leaves open: each costs a whole run more.
DEFAULT_METHODS = [START, "grpo", "gspo", "gspo_x2", "naive", "hacpo"]


@dataclass(frozen=True)
class Evaluation:
    """One call of `python -m hacpo_trl.evaluate`.

    Attributes:
        name: Its folder.
        benchmarks: What it evaluates on.
        options: How.
    """

    name: str
    benchmarks: Sequence[str]
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Pair:
    """Two models that are trained together.

    Attributes:
        recipe: Name of their recipe.
        evaluations: How they are evaluated.
        changes: What is changed in the recipe for every method; None takes a setting away.
        accelerate_config: Name of the launch configuration.
        processes: Training processes that the recipe is made for.
    """

    recipe: str
    evaluations: Sequence[Evaluation]
    changes: Mapping[str, Any] = field(default_factory=dict)
    accelerate_config: str = "zero3"
    processes: int = 4

    @property
    def benchmarks(self) -> list[str]:
        return [name for evaluation in self.evaluations for name in evaluation.benchmarks]


LENGTH = ["--max-completion-length", "8196"]
PAPER_EVALUATIONS = (
    Evaluation(
        "greedy",
        ["math500", "math_test", "gsm8k_test", "amc23", "minerva", "olympiad"],
        ["--temperature", "0", *LENGTH],
    ),
    Evaluation("sampled", ["aime25"], LENGTH),
)
PAIRS = {
    "qwen3-4b+4b-instruct": Pair("qwen3_4b_qwen3_4b_instruct", PAPER_EVALUATIONS),
    "qwen3-1.7b+4b": Pair("qwen3_1_7b_qwen3_4b", PAPER_EVALUATIONS),
    "qwen3-4b+llama3.2-3b": Pair("qwen3_4b_llama3_2_3b", PAPER_EVALUATIONS),
    "qwen3-4b+8b": Pair("qwen3_4b_qwen3_8b", PAPER_EVALUATIONS),
    "llama3.2-1b+3b": Pair("llama3_2_1b_llama3_2_3b", PAPER_EVALUATIONS),
    "qwen3-1.7b+llama3.2-1b": Pair("qwen3_1_7b_llama3_2_1b", PAPER_EVALUATIONS),
    # In one epoch, as the paper's, methods get the same prompts; with tiny.yaml's number of updates they would not.
    "tiny": Pair(
        "tiny",
        [Evaluation("sampled", ["conv_words"], ["--num-samples", "8"])],
        {"max_steps": None, "num_train_epochs": 1, "train_size": 640},
        "cpu",
        processes=1,
    ),
}


# ------------------------------------------------------------------------------------------------------------- recipes
def recipe_of(pair: Pair, method: str, processes: int, output_dir: Path) -> dict[str, Any]:
    """The pair's recipe for a method, with as many rollouts in an update however many processes train."""
    recipe = read_recipe(RECIPES / f"{pair.recipe}.yaml")
    changes = dict(pair.changes)
    if method != "hacpo":
        changes |= read_recipe(RECIPES / "methods" / f"{method}.yaml")
    algorithm = changes.get("algorithm", recipe["algorithm"])
    recipe = {key: value for key, value in recipe.items() if algorithm in OPTIONS_OF.get(key, [algorithm])} | changes
    accumulated = recipe.get("gradient_accumulation_steps", 1) * pair.processes
    if accumulated % processes:
        raise SystemExit(
            f"{processes} processes cannot share {accumulated} batches of {recipe['per_device_train_batch_size']} "
            f"rollouts, which make an update. --num-processes must divide {accumulated}."
        )
    recipe |= {"gradient_accumulation_steps": accumulated // processes, "output_dir": str(output_dir)}
    return {key: value for key, value in recipe.items() if value is not None}


def agents_of(pair: Pair) -> list[dict[str, Any]]:
    return read_recipe(RECIPES / f"{pair.recipe}.yaml")["agents"]


# ------------------------------------------------------------------------------------------------------------ commands
@dataclass(frozen=True)
class Command:
    """A program to run, as a line that a shell takes.

    Attributes:
        arguments: The command line without the interpreter.
        environment: What its environment has beside this process's.
        done: A file that is there when it need not run again.
        beside: A program that runs as long as this one does.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    done: Path | None = None
    beside: "Command | None" = None

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, "python", shlex.join(self.arguments)])

    def run(self):
        if self.done is not None and self.done.is_file():
            return
        with self.beside.running() if self.beside else nullcontext():
            status = self._start().wait()
        if status:
            raise SystemExit(f"Exit status {status}: {self}\nOnce that is mended, the same command continues.")

    def _start(self) -> subprocess.Popen:
        environment = {**os.environ, **self.environment}
        return subprocess.Popen([sys.executable, *self.arguments], env=environment, cwd=REPOSITORY)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Has it run in the background meanwhile."""
        process = self._start()
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def serving(args: argparse.Namespace) -> Command | None:
    """The servers of the pair's recipe, new ones for each run; training waits for them itself."""
    recipe = RECIPES / f"{args.pair.recipe}.yaml"
    if read_recipe(recipe).get("vllm_mode") != "server":
        return None
    where = ["--config", str(recipe), "--log_dir", str(args.output_dir / "servers")]
    return Command(["-m", "hacpo_trl.serve", *where, *(["--python", args.vllm_python] if args.vllm_python else [])])


def training_devices(args: argparse.Namespace) -> dict[str, str]:
    """The first devices, if the recipe gives others to servers."""
    of_servers = {d for agent in agents_of(args.pair) for d in agent.get("vllm_server_devices", "").split(",") if d}
    devices = [str(device) for device in range(args.num_processes)]
    if shared := of_servers.intersection(devices):
        raise SystemExit(
            f"--num-processes {args.num_processes} trains on devices 0 to {devices[-1]}, of which the recipe gives "
            f"{', '.join(sorted(shared))} to vLLM servers (vllm_server_devices in {args.pair.recipe}.yaml)."
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if of_servers else {}


def training(recipe: Path, run: Path, args: argparse.Namespace) -> Command:
    launch = ["--config_file", f"configs/accelerate/{args.pair.accelerate_config}.yaml"]
    launch += ["--num_processes", str(args.num_processes)]
    script = ["examples/train_qwen_llama.py", "--config", str(recipe), "--resume", *args.training]
    return Command(
        ["-m", "accelerate.commands.launch", *launch, *script],
        environment=training_devices(args),
        done=run / "trainer_state.json",
        beside=serving(args),
    )


def evaluating(models: Sequence[str], folder: Path, evaluation: Evaluation, args: argparse.Namespace) -> Command:
    options = ["--backend", args.backend, *evaluation.options, "--output-dir", str(folder / evaluation.name)]
    if args.limit is not None:
        options += ["--limit", str(args.limit)]
    return Command(["-m", "hacpo_trl.evaluate", *models, "--benchmarks", *evaluation.benchmarks, *options])


def write_recipe(folder: Path, recipe: Mapping[str, Any], args: argparse.Namespace) -> Path:
    """Writes what a run is made with; raises if there is a run that was made with something else."""
    path = folder / "recipe.yaml"
    content = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
    content = f"# Further arguments: {shlex.join(args.training) or 'none'}\n{content}"
    if Path(recipe["output_dir"]).exists() and (not path.is_file() or path.read_text(encoding="utf-8") != content):
        raise SystemExit(f"{recipe['output_dir']} was trained with other settings, see {path}. Remove {folder}.")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def commands_of(method: str, args: argparse.Namespace) -> list[Command]:
    """Everything that a method's row of the table needs; its recipe is written here."""
    folder = args.output_dir / method
    if method == START:
        commands = []
        for agent in agents_of(args.pair):
            models = ["--models", agent["model_name_or_path"]]
            if "chat_template_kwargs" in agent:
                models += ["--chat-template-kwargs", json.dumps(agent["chat_template_kwargs"])]
            commands += [evaluating(models, folder / agent["name"], e, args) for e in args.pair.evaluations]
        return commands
    run = folder / "run"
    recipe = write_recipe(folder, recipe_of(args.pair, method, args.num_processes, run), args)
    return [
        training(recipe, run, args),
        *(evaluating(["--run", str(run)], folder, e, args) for e in args.pair.evaluations),
    ]


# ------------------------------------------------------------------------------------------------------------- results
def results_of(method: str, agent: str, args: argparse.Namespace) -> dict[str, float]:
    """For each benchmark that was evaluated, one agent's result."""
    folder = args.output_dir / method
    found: dict[str, float] = {}
    for evaluation in args.pair.evaluations:
        where = (folder / agent if method == START else folder) / evaluation.name
        if not (where / "results.json").is_file():
            continue
        for row in json.loads((where / "results.json").read_text(encoding="utf-8"))["results"]:
            model, benchmark = row["model"], row["benchmark"]
            # The first metric of a benchmark is the paper's.
            if benchmark in found or (method != START and model != f"run/{agent}"):
                continue
            found[benchmark] = row["value"]
            if row["metric"].startswith("best@"):
                of_problems = rewards_of(where, model, benchmark).values()
                found[benchmark] = sum(map(best_with_replacement, of_problems)) / len(of_problems)
    return found


def paper_results(pair: str) -> dict[tuple[str, str], dict[str, float]]:
    """For each agent and method of a pair, the paper's result on each benchmark."""
    with PAPER_RESULTS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.pop("pair") == pair]
    return {
        (row.pop("agent"), row.pop("method")): {name: float(value) for name, value in row.items() if name != "avg"}
        for row in rows
    }


def cell(ours: float | None, paper: float | None) -> str:
    found = "–" if ours is None else f"{ours:.3f}"
    return found if paper is None else f"{found} ({paper:.3f})"


def mean_of_all(results: Mapping[str, float], benchmarks: Sequence[str]) -> float | None:
    return sum(results[name] for name in benchmarks) / len(benchmarks) if set(benchmarks) <= set(results) else None


def table_of(agent: str, args: argparse.Namespace) -> Table:
    """One agent's results, the paper's in parentheses."""
    paper, benchmarks = paper_results(args.pair_name), args.pair.benchmarks
    titles = [BENCHMARKS[name].title if name in BENCHMARKS else name for name in benchmarks]
    rows = []
    for method in args.methods:
        ours, theirs = results_of(method, agent, args), paper.get((agent, METHODS[method]), {})
        averages = cell(mean_of_all(ours, benchmarks), mean_of_all(theirs, benchmarks))
        rows.append([method, *(cell(ours.get(name), theirs.get(name)) for name in benchmarks), averages])
    return Table(["method", *titles, "mean"], rows)


def present(args: argparse.Namespace, console: Console):
    """Prints every agent's table and writes them to results.md."""
    note = f"`{args.pair_name}`"
    if args.limit is not None:
        note += f", the first {args.limit} problems of each benchmark"
    if paper_results(args.pair_name):
        note += ". In parentheses the paper's (arXiv 2603.02604v1, Tables 1 and 7); its means are of the row."
    console.print(note, highlight=False, markup=False)
    parts = [note]
    for agent in agents_of(args.pair):
        title = f"{agent['name']}: {agent['model_name_or_path']}"
        table = table_of(agent["name"], args)
        console.print(table.rich(title))
        parts.append(f"{title}\n\n{table.markdown()}")
    path = args.output_dir / "results.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    console.print(str(path), highlight=False, markup=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------------------------- command
def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        usage="%(prog)s --pair PAIR [options] [-- arguments of training]",
    )
    parser.add_argument("--pair", choices=PAIRS, required=True, dest="pair_name", help="the models")
    rows = f"rows of the table; default: {' '.join(DEFAULT_METHODS)}"
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT_METHODS, help=rows)
    parser.add_argument("--num-processes", type=int, help="that train; default: what the recipe is made for")
    parser.add_argument("--vllm-python", help="interpreter of the environment that has vLLM, for the servers")
    parser.add_argument(
        "--backend", choices=("transformers", "vllm"), help="of evaluation; default: vLLM if it is here"
    )
    parser.add_argument("--limit", type=int, help="evaluate on the first so many problems of each benchmark")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/reproduce"), help="default: %(default)s")
    parser.add_argument("--print", action="store_true", help="write the recipes and print the commands")
    args = parser.parse_args(argv[:cut])
    args.training, args.pair = argv[cut + 1 :], PAIRS[args.pair_name]
    args.output_dir = args.output_dir.absolute() / args.pair_name
    args.num_processes = args.num_processes or args.pair.processes
    if args.backend is None:
        args.backend = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    return args


def main(args: argparse.Namespace):
    commands = {method: commands_of(method, args) for method in args.methods}
    if args.print:
        servers = serving(args)
        print("# in the repository's root", *([f"{servers} &"] if servers else []), sep="\n")
        print(*(command for of_method in commands.values() for command in of_method), sep="\n")
        return
    for method, of_method in commands.items():
        print(f"== {method}", flush=True)
        for command in of_method:
            command.run()
    present(args, Console())


if __name__ == "__main__":
    main(parse_args())
