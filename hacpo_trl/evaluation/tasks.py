"""The benchmarks of an evaluation: their problems, how answers are judged, and what is reported."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from ..embedded import conv_dataset, conv_reading, conv_reward
from ..rewards.math import math_reward
from .benchmark_table import BENCHMARKS, EMBEDDED_TASKS, LOCAL_FORMATS, Benchmark
from .benchmarks import load_problems
from .metrics import Kind, Metric


CONV_SIZE = 512
# What stands in a math verdict for an answer that there is none of.
NO_ANSWER = ("[none]", "[timeout]", "[crash]", "[error]")

Judge = Callable[[list[str], list[Any]], tuple[list[float | None], list[str | None]]]
Equal = Callable[[list[tuple[str, str]]], list[bool]]


@dataclass(frozen=True)
class Task:
    """A benchmark as it is evaluated.

    Attributes:
        name: The benchmark's name.
        title: Its title in tables.
        problems: Columns `prompt` and `answer`.
        max_completion_length: Longest answer, in tokens.
        num_samples: Samples of each problem.
        metrics: What is reported.
        judge: From completions and gold answers to rewards (None without a verdict) and extracted answers.
        equal: Whether two extracted answers are the same, for pairs of them.
    """

    name: str
    title: str
    problems: datasets.Dataset
    max_completion_length: int
    num_samples: int
    metrics: tuple[Metric, ...]
    judge: Judge
    equal: Equal


def judge_math(texts: list[str], golds: list[Any]) -> tuple[list[float | None], list[str | None]]:
    extra: dict[str, list[str]] = {}
    rewards = math_reward(texts, answer=golds, log_extra=extra.__setitem__)
    return rewards, [None if answer in NO_ANSWER else answer for answer in extra["answer_parsed"]]


def equal_in_math(pairs: list[tuple[str, str]]) -> list[bool]:
    boxed = [f"\\boxed{{{answer}}}" for _, answer in pairs]
    return [reward == 1.0 for reward in math_reward(boxed, answer=[representative for representative, _ in pairs])]


def judge_conv(texts: list[str], golds: list[Any]) -> tuple[list[float | None], list[str | None]]:
    return conv_reward(texts, golds), [conv_reading(text) or None for text in texts]


def equal_in_conv(pairs: list[tuple[str, str]]) -> list[bool]:
    # What answers say is compared as text, and only different texts are asked about.
    return [False] * len(pairs)


def load_task(name: str, args: argparse.Namespace) -> Task:
    """A benchmark with the paper's settings, unless the command line says otherwise."""
    if name in EMBEDDED_TASKS:
        spec = Benchmark(name, name, hub_id="", split="test", max_completion_length=EMBEDDED_TASKS[name])
        problems = conv_dataset("test", min(args.limit or CONV_SIZE, CONV_SIZE), words=name == "conv_words")
        judge, equal = judge_conv, equal_in_conv
    else:
        is_file = Path(name).suffix in LOCAL_FORMATS
        problems = load_problems(name, columns=args.columns if is_file else None, max_rows=args.limit)
        source = problems[0]["source"]
        # A file that is named like a benchmark is a file.
        known = None if is_file else BENCHMARKS.get(source)
        spec = known or Benchmark(source.replace("/", "-"), source, hub_id=name, split="")
        judge, equal = judge_math, equal_in_math
    num_samples, metrics = _samples_and_metrics(spec, args)
    length = args.max_completion_length or spec.max_completion_length
    return Task(spec.name, spec.title, problems, length, num_samples, metrics, judge, equal)


def _samples_and_metrics(spec: Benchmark, args: argparse.Namespace) -> tuple[int, tuple[Metric, ...]]:
    asked = tuple(args.metrics or ())
    greedy = args.temperature == 0
    num_samples = args.num_samples
    if num_samples is None:
        num_samples = 1 if greedy else max((metric.k for metric in asked), default=spec.num_samples)
    if greedy and num_samples > 1:
        raise ValueError(
            f"--temperature 0 gives the same answer every time, but --num-samples is {num_samples}. Sample at a "
            "temperature above 0, or take one sample."
        )
    if short := [str(metric) for metric in asked if metric.k > num_samples]:
        raise ValueError(
            f"{spec.name}: {', '.join(short)} of {num_samples} samples a problem. Give --num-samples "
            f"{max(metric.k for metric in asked)} or more, at a temperature above 0."
        )
    # One sample has one number, whatever it is called; of several the paper's comes first.
    kinds: Iterable[Kind] = ["avg"] if num_samples == 1 else dict.fromkeys([spec.metric, "avg", "best", "maj"])
    return num_samples, asked or tuple(Metric(kind, num_samples) for kind in kinds)
