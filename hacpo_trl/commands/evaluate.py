"""Evaluates models, or every agent of a training run, on benchmarks.

    python -m hacpo_trl.evaluate --run outputs/qwen3_4b_llama3_2_3b --benchmarks aime25 amc23 math500
    python -m hacpo_trl.evaluate --models Qwen/Qwen3-4B-Base outputs/duo/qwen --benchmarks problems.jsonl --limit 50
    python -m hacpo_trl.evaluate --models embedded:qwen3 embedded:llama --benchmarks conv

The default metrics are the paper's, best@30 on AIME 2025 and avg@1 elsewhere, with answers of up to 8192 and 4096
tokens at temperature 1. (`examples/reproduce.py` evaluates as the paper does, as far as that is known.)
Prompts, BOS, stop tokens and verdicts come from the code that training uses.

`--output-dir` gets results.json, results.md and, a parquet file for each batch, every completion with its extracted
answer and verdict: `completions/<model>/<benchmark>/`, which pandas reads as one table. A batch is written when it is
done, whole or not at all, and its seed depends on the model, the benchmark and its number alone. So the same command
continues an evaluation that was broken off, and ends with the same results.
"""

import argparse
import gc
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..evaluation.benchmarks import BENCHMARKS, filter_long_prompts
from ..evaluation.jobs import Job
from ..evaluation.metrics import Metric
from ..evaluation.models import Model, describe, find_models, load_backend, make_agent
from ..evaluation.report import Report
from ..evaluation.tasks import CONV, Task, load_task
from ..version import __version__


PAPER_BENCHMARKS = ["math_test", "math500", "gsm8k_test", "aime25", "amc23", "minerva", "olympiad"]
# vLLM schedules requests itself and wants many at once; `generate` pads a batch to its longest prompt.
DEFAULT_BATCH_SIZE = {"transformers": 32, "vllm": 1024}


def make_jobs(models: Sequence[Model], tasks: Sequence[Task], args: argparse.Namespace) -> list[Job]:
    """Every model on every task, on the same problems; what cannot work fails here, before any weights are loaded."""
    described = {model.label: describe(model, args) for model in models}
    jobs = []
    for task in tasks:
        agents = {model.label: make_agent(model, *described[model.label], task, args) for model in models}
        problems = filter_long_prompts(task.problems, agents, task.name)
        fitting = replace(task, problems=problems)
        for model in models:
            folder = args.output_dir / "completions" / model.slug / task.name
            job = Job(model, fitting, agents[model.label], folder, args.batch_size, args.seed)
            job.open(
                {
                    "model": model.label,
                    "backend": args.backend,
                    "dtype": args.dtype,
                    "temperature": args.temperature,
                    "top_p": args.top_p,
                    "top_k": args.top_k,
                    "chat_template": agents[model.label].chat_template,
                    "chat_template_kwargs": agents[model.label].chat_template_kwargs,
                }
            )
            jobs.append(job)
    return jobs


def run_jobs(jobs: Sequence[Job], args: argparse.Namespace, console: Console):
    """Samples what is missing, model by model."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("answers"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    todo = sum(len(samples) for job in jobs for samples in job.missing().values())
    total = sum(map(len, jobs))
    if todo < total:
        console.print(f"Continuing: {total - todo} of {total} answers are there.", highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("evaluating", total=total, completed=total - todo)
        for label in dict.fromkeys(job.model.label for job in jobs):
            of_model = [job for job in jobs if job.model.label == label]
            if not any(job.missing() for job in of_model):
                continue
            lengths = [
                max(map(len, job.agent.render(job.task.problems["prompt"]))) + job.task.max_completion_length
                for job in of_model
            ]
            backend_for = load_backend(of_model[0].model, args, max(lengths))
            for job in of_model:
                progress.update(bar, description=f"{label} on {job.task.title}")
                start, missing = time.monotonic(), job.missing()
                backend = backend_for(job.agent)
                for path, samples in missing.items():
                    job.run(path, samples, backend)
                    progress.advance(bar, len(samples))
                if missing:
                    answers, seconds = sum(map(len, missing.values())), time.monotonic() - start
                    line = f"{label} on {job.task.title}: {answers} answers in {seconds:.0f} s"
                    console.print(line, highlight=False, soft_wrap=True)
            del backend_for, backend
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


# ---- the command ---------------------------------------------------------------------------------------------------
def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hacpo_trl.evaluate", description=__doc__.split("\n")[0])
    what = parser.add_argument_group("what")
    what.add_argument("--models", nargs="+", default=[], metavar="MODEL", help="ids, folders, or embedded:NAME")
    what.add_argument(
        "--run",
        nargs="+",
        default=[],
        metavar="DIR",
        help="output folders or checkpoints of training: all their agents",
    )
    what.add_argument(
        "--benchmarks",
        nargs="+",
        default=PAPER_BENCHMARKS,
        metavar="BENCHMARK",
        help=f"{', '.join([*BENCHMARKS, CONV])}, an id on the Hub, or a .jsonl or .parquet file; default: the paper's",
    )
    what.add_argument("--columns", help="columns of local files: problem=...,answer=...")
    what.add_argument("--limit", type=_positive, help="the first so many problems of each benchmark")
    how = parser.add_argument_group("how")
    how.add_argument("--backend", choices=DEFAULT_BATCH_SIZE, default="transformers")
    how.add_argument("--temperature", type=float, default=1.0, help="0 is greedy; default 1, as in training")
    how.add_argument("--top-p", type=float, default=1.0)
    how.add_argument("--top-k", type=int, default=0)
    how.add_argument("--num-samples", type=_positive, help="samples of each problem; default: as the metrics need")
    how.add_argument("--metrics", nargs="+", type=Metric.parse, metavar="METRIC", help="such as avg@4 pass@8 maj@8")
    how.add_argument("--max-completion-length", type=_positive, help="tokens; default 8192 on AIME 2025, else 4096")
    how.add_argument("--batch-size", type=_positive, help="default: 32, with vllm 1024")
    how.add_argument("--dtype", help="default: bfloat16 with an accelerator, else float32")
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--chat-template", help="a Jinja template, a file, or 'plain'; default: the tokenizers' own")
    how.add_argument("--chat-template-kwargs", type=json.loads, help="JSON, such as '{\"enable_thinking\": false}'")
    how.add_argument("--tensor-parallel-size", type=_positive, default=1, help="GPUs of a model in vllm")
    how.add_argument("--trust-remote-code", action="store_true")
    how.add_argument("--output-dir", type=Path, default=Path("outputs/evaluation"))
    args = parser.parse_args(argv)
    if args.temperature < 0:
        parser.error(f"--temperature must not be negative, but is {args.temperature}.")
    if args.batch_size is None:
        args.batch_size = DEFAULT_BATCH_SIZE[args.backend]
    if args.dtype is None:
        args.dtype = "bfloat16" if torch.accelerator.is_available() else "float32"
    return args


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def evaluate(args: argparse.Namespace, console: Console) -> Report:
    """Runs an evaluation and saves its report."""
    models = find_models(args.models, args.run, console)
    tasks = [load_task(name, args) for name in args.benchmarks]
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise ValueError(f"Two benchmarks share a name: {names}. Rename the file, or evaluate them in two calls.")
    jobs = make_jobs(models, tasks, args)
    run_jobs(jobs, args, console)
    report = Report(
        outcomes=[job.outcome() for job in jobs],
        settings={
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "seed": args.seed,
            "dtype": args.dtype,
            "backend": args.backend,
            "limit": args.limit,
            "hacpo_trl": __version__,
            "transformers": transformers.__version__,
        },
    )
    report.save(args.output_dir)
    return report


def main(argv: Sequence[str] | None = None):
    console = Console()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    transformers.utils.logging.disable_progress_bar()
    args = parse_args(argv)
    try:
        report = evaluate(args, console)
    except KeyboardInterrupt:
        console.print("Broken off. The same command continues.")
        raise SystemExit(130) from None
    report.print(console)
    console.print(f"{args.output_dir}/results.json, results.md, completions/", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
