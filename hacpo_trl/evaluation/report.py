"""What an evaluation found: every model on every benchmark, differences between models, and their tables."""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..reporting.tables import Table
from .metrics import Estimate, Metric, bootstrap


@dataclass(frozen=True)
class Outcome:
    """One model on one benchmark.

    Attributes:
        model: The model's label.
        benchmark: The benchmark's name.
        title: Its title in tables.
        values: For each metric its value on each problem that has a verdict: `{metric: {problem: value}}`.
        num_samples: Samples of each problem.
        skipped: Problems without a verdict, which count nowhere.
        mean_tokens: Mean length of an answer, in the model's tokens.
        cut: Share of the answers that were cut at `max_completion_length`.
        max_completion_length: That limit.
    """

    model: str
    benchmark: str
    title: str
    values: Mapping[Metric, Mapping[int, float]]
    num_samples: int
    skipped: int
    mean_tokens: float
    cut: float
    max_completion_length: int

    def estimate(self, metric: Metric) -> Estimate:
        return bootstrap(list(self.values[metric].values()))


def _difference(first: Outcome, second: Outcome, metric: Metric) -> tuple[Estimate, int]:
    """First minus second on the problems that both have a verdict on, and how many those are."""
    ours, theirs = first.values[metric], second.values[metric]
    common = sorted(ours.keys() & theirs.keys())
    return bootstrap(np.array([ours[p] - theirs[p] for p in common])), len(common)


@dataclass(frozen=True)
class Report:
    """All outcomes of an evaluation.

    Attributes:
        outcomes: Every model on every benchmark.
        settings: What was asked for.
    """

    outcomes: Sequence[Outcome]
    settings: Mapping[str, Any]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(outcome.model for outcome in self.outcomes))

    def _by_benchmark(self) -> dict[str, dict[str, Outcome]]:
        result: dict[str, dict[str, Outcome]] = {}
        for outcome in self.outcomes:
            result.setdefault(outcome.benchmark, {})[outcome.model] = outcome
        return result

    @functools.cached_property
    def results(self) -> list[dict[str, Any]]:
        """A row for each model, benchmark and metric."""
        return [
            {
                "model": outcome.model,
                "benchmark": outcome.benchmark,
                "metric": str(metric),
                **asdict(outcome.estimate(metric)),
                "problems": len(outcome.values[metric]),
                "skipped": outcome.skipped,
                "num_samples": outcome.num_samples,
                "mean_tokens": outcome.mean_tokens,
                "cut": outcome.cut,
                "max_completion_length": outcome.max_completion_length,
            }
            for outcome in self.outcomes
            for metric in outcome.values
        ]

    @functools.cached_property
    def comparisons(self) -> list[dict[str, Any]]:
        """A row for each pair of models, benchmark and metric: the difference by paired bootstrap."""
        rows = []
        for benchmark, of_benchmark in self._by_benchmark().items():
            for first, second in itertools.combinations(of_benchmark.values(), 2):
                for metric in first.values:
                    difference, problems = _difference(first, second, metric)
                    rows.append(
                        {
                            "benchmark": benchmark,
                            "metric": str(metric),
                            "model": first.model,
                            "other": second.model,
                            **asdict(difference),
                            "problems": problems,
                        }
                    )
        return rows

    # ---- tables -------------------------------------------------------------------------------------------------
    def _result_table(self) -> Table:
        results = {(r["benchmark"], r["metric"], r["model"]): r for r in self.results}
        rows = []
        for benchmark, of_benchmark in self._by_benchmark().items():
            some = next(iter(of_benchmark.values()))
            for metric in map(str, some.values):
                cells = [results[benchmark, metric, model] for model in self.models]
                values = [_percent(cell["value"], cell["low"], cell["high"]) for cell in cells]
                rows.append([some.title, metric, str(cells[0]["problems"]), *values])
            lengths = [f"{of_benchmark[m].mean_tokens:.0f}, {of_benchmark[m].cut:.0%} cut" for m in self.models]
            rows.append([some.title, f"tokens (limit {some.max_completion_length})", "", *lengths])
        return Table(["benchmark", "metric", "problems", *self.models], rows, words=2, grouped=True)

    def _comparison_table(self) -> Table:
        titles = {outcome.benchmark: outcome.title for outcome in self.outcomes}
        rows = []
        for row in self.comparisons:
            clear = "" if row["low"] <= 0 <= row["high"] else " *"
            difference = _percent(row["value"], row["low"], row["high"], sign="+") + clear
            rows.append([titles[row["benchmark"]], row["metric"], row["model"], row["other"], difference])
        return Table(["benchmark", "metric", "model", "minus", "difference"], rows, words=4, grouped=True)

    def _notes(self) -> list[str]:
        notes = ["Percent, with 95% intervals (bootstrap over problems)."]
        if len(self.models) > 1:
            notes.append("Differences: paired bootstrap on the same problems; * where the interval excludes 0.")
        if any(row["low"] == row["high"] for row in self.results):
            notes.append(
                "An interval of width 0 only says that all problems agree: with few of them, little is known."
            )
        skipped = {outcome.title: outcome.skipped for outcome in self.outcomes if outcome.skipped}
        notes += [f"{title}: {n} problems without a readable answer do not count." for title, n in skipped.items()]
        return notes

    def print(self, console: Console):
        """The tables on the terminal."""
        console.print(self._result_table().rich())
        if len(self.models) > 1:
            console.print(self._comparison_table().rich())
        for note in self._notes():
            console.print(note, highlight=False, markup=False)

    def markdown(self) -> str:
        """The tables for a model card."""
        parts = [self._result_table().markdown()]
        if len(self.models) > 1:
            parts.append(self._comparison_table().markdown())
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items() if value is not None)
        return "\n\n".join([*parts, " ".join(self._notes()), f"Settings: {settings}."]) + "\n"

    def save(self, folder: Path):
        """Writes results.json and results.md."""
        content = {"settings": self.settings, "results": self.results, "comparisons": self.comparisons}
        (folder / "results.json").write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        (folder / "results.md").write_text(self.markdown(), encoding="utf-8")


def _percent(value: float, low: float, high: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
