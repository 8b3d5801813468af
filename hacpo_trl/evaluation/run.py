"""An evaluation from its arguments to its report: every model on every benchmark, batch by batch."""

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..version import __version__
from .benchmarks import filter_long_prompts
from .jobs import Job
from .models import Model, describe, find_models, load_backend, make_agent
from .report import Report
from .tasks import Task, load_task
from .vllm_offline import import_vllm


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
    missing = [job.missing() for job in jobs]
    left = sum(len(samples) for of_job in missing for samples in of_job.values())
    total = sum(map(len, jobs))
    if left < total:
        console.print(f"Continuing: {total - left} of {total} answers are there.", highlight=False, markup=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("evaluating", total=total, completed=total - left)
        for label in dict.fromkeys(job.model.label for job in jobs):
            of_model = [
                (job, batches)
                for job, batches in zip(jobs, missing, strict=True)
                if job.model.label == label and batches
            ]
            if not of_model:
                continue
            lengths = [
                max(map(len, job.agent.render(job.task.problems["prompt"]))) + job.task.max_completion_length
                for job, _ in of_model
            ]
            backend_for = load_backend(of_model[0][0].model, args, max(lengths))
            for job, batches in of_model:
                progress.update(bar, description=f"{label} on {job.task.title}")
                start, backend = time.monotonic(), backend_for(job.agent)
                for path, samples in batches.items():
                    job.run(path, samples, backend)
                    progress.advance(bar, len(samples))
                answers, seconds = sum(map(len, batches.values())), time.monotonic() - start
                line = f"{label} on {job.task.title}: {answers} answers in {seconds:.0f} s"
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            del backend_for, backend
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def prepare(args: argparse.Namespace, console: Console) -> list[Job]:
    """Everything that an evaluation is put together from; what is wrong with its arguments is raised here."""
    if args.dtype is None:
        args.dtype = "bfloat16" if torch.accelerator.is_available() else "float32"
    if args.backend == "vllm":
        import_vllm()
    models = find_models(args.models, args.run, console)
    tasks = [load_task(name, args) for name in args.benchmarks]
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise ValueError(f"Two benchmarks share a name: {names}. Rename the file, or evaluate them in two calls.")
    return make_jobs(models, tasks, args)


def evaluate(jobs: Sequence[Job], args: argparse.Namespace, console: Console) -> Report:
    """Runs an evaluation and saves its report."""
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
