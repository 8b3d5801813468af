"""How long the phases of a step take."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from .metrics import Metrics


class Stopwatch:
    """Seconds of each phase of a step, added up until they are logged."""

    def __init__(self):
        self._seconds: dict[str, float] = defaultdict(float)

    def add(self, phase: str, seconds: float):
        self._seconds[phase] += seconds

    def flush(self, metrics: Metrics):
        """Logs `time/<phase>` and their sum, `time/step`, and starts anew."""
        for phase, seconds in self._seconds.items():
            metrics.mean(f"time/{phase}", seconds)
        metrics.mean("time/step", sum(self._seconds.values()))
        self._seconds.clear()


class Timed(Protocol):
    """Whose methods can be timed."""

    stopwatch: Stopwatch


Owner = TypeVar("Owner", bound=Timed)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Method = Callable[Concatenate[Owner, Arguments], Result]


def timed(
    phase: str,
) -> Callable[[Method[Owner, Arguments, Result]], Method[Owner, Arguments, Result]]:
    """Makes a method add the seconds that it takes to a phase of its object's `stopwatch`."""

    def decorate(method: Method[Owner, Arguments, Result]) -> Method[Owner, Arguments, Result]:
        @functools.wraps(method)
        def measured(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            start = time.perf_counter()
            result = method(self, *args, **kwargs)
            self.stopwatch.add(phase, time.perf_counter() - start)
            return result

        return measured

    return decorate
