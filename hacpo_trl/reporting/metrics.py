"""Metrics that are right over processes, micro-batches and steps.

What is averaged is kept as sum and count until it is logged, so that a mean weighs every rollout alike however a batch
was cut.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object


class Metrics:
    """Statistics that accumulate until they are logged.

    Each value added is a number or a tensor of numbers (of any shape; an empty one adds nothing).
    """

    def __init__(self):
        self._kinds: dict[str, str] = {}
        self._sums: dict[str, list[float]] = defaultdict(list)

    def _add(self, kind: str, name: str, sums: list[float], merge: Callable[[float, float], float]):
        known = self._kinds.setdefault(name, kind)
        assert known == kind, f"metric {name} is a {known}, not a {kind}"
        old = self._sums[name]
        self._sums[name] = sums if not old else [merge(a, b) for a, b in zip(old, sums, strict=True)]

    def mean(self, name: str, values: torch.Tensor | float):
        """The mean of all values added."""
        values = torch.as_tensor(values).detach().cpu().double()
        if values.numel():
            self._add("mean", name, [float(values.sum()), float(values.numel())], lambda a, b: a + b)

    def quotient(self, name: str, numerator: float, denominator: float):
        """The sum of all numerators over the sum of all denominators; nothing while that is 0."""
        self._add("mean", name, [float(numerator), float(denominator)], lambda a, b: a + b)

    def total(self, name: str, value: float):
        """The sum of all values added, over all processes."""
        self._add("total", name, [float(value)], lambda a, b: a + b)

    def std(self, name: str, values: torch.Tensor):
        """The standard deviation (unbiased) of all values added."""
        values = values.detach().cpu().double()
        if values.numel():
            sums = [float(values.sum()), float((values**2).sum()), float(values.numel())]
            self._add("std", name, sums, lambda a, b: a + b)

    def minimum(self, name: str, values: torch.Tensor):
        if values.numel():
            self._add("min", name, [float(values.min())], min)

    def maximum(self, name: str, values: torch.Tensor):
        if values.numel():
            self._add("max", name, [float(values.max())], max)

    def last(self, name: str, value: float):
        """The latest value, on the process that has one; the same on every process that does."""
        self._add("last", name, [float(value)], lambda a, b: b)

    def correlation(self, name: str, x: torch.Tensor, y: torch.Tensor):
        """Pearson's correlation of values that are centered already. `x`, `y`: the same shape."""
        sums = [float((x * y).sum()), float((x * x).sum()), float((y * y).sum())]
        self._add("correlation", name, sums, lambda a, b: a + b)

    def summary(self, name: str, values: torch.Tensor):
        """`name/mean`, `name/min` and `name/max`."""
        self.mean(f"{name}/mean", values)
        self.minimum(f"{name}/min", values)
        self.maximum(f"{name}/max", values)

    def state(self) -> dict[str, Any]:
        return {name: (self._kinds[name], sums) for name, sums in self._sums.items()}

    def load_state(self, state: dict[str, Any]):
        self.clear()
        self._merge(state)

    def clear(self):
        self._kinds.clear()
        self._sums.clear()

    def _merge(self, state: dict[str, Any]):
        merges: dict[str, Callable[[float, float], float]] = {"min": min, "max": max, "last": lambda a, b: b}
        for name, (kind, sums) in state.items():
            self._add(kind, name, list(sums), merges.get(kind, lambda a, b: a + b))

    def reduce(self) -> dict[str, float]:
        """The metrics over all processes, and a fresh start. Every process must call it; each gets the same result."""
        everywhere = Metrics()
        for state in gather_object([self.state()]):
            everywhere._merge(state)
        self.clear()
        return {
            name: value
            for name, sums in everywhere._sums.items()
            if not math.isnan(value := _value(everywhere._kinds[name], sums))
        }


def _value(kind: str, sums: list[float]) -> float:
    if kind == "mean":
        return sums[0] / sums[1] if sums[1] else math.nan
    if kind == "std":
        total, squares, count = sums
        return math.sqrt(max(squares - total**2 / count, 0.0) / (count - 1)) if count > 1 else 0.0
    if kind == "correlation":
        xy, xx, yy = sums
        return xy / math.sqrt(xx * yy) if xx > 0 and yy > 0 else math.nan
    return sums[0]
