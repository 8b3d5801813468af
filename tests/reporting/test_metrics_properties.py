"""However values are dealt to processes and calls, the metrics are the same."""

import math
import statistics
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hacpo_trl.reporting.metrics import Metrics


VALUES = st.lists(st.integers(-1000, 1000).map(lambda i: i / 8), min_size=1, max_size=12)


def reduced(processes: list[Metrics]) -> dict[str, float]:
    states = [process.state() for process in processes]
    with mock.patch("hacpo_trl.reporting.metrics.gather_object", lambda objects: states):
        return processes[0].reduce()


def add(metrics: Metrics, pairs: list[tuple[float, float]]):
    x, y = torch.tensor(pairs, dtype=torch.float64).view(-1, 2).T
    metrics.mean("mean", x)
    metrics.std("std", x)
    metrics.summary("summary", x)
    metrics.correlation("correlation", x, y)
    metrics.quotient("quotient", float(x.sum()), float((y**2).sum()))
    metrics.total("total", float(x.sum()))


@given(VALUES, st.data())
def test_no_cut_into_processes_and_calls_changes_a_metric(values, data):
    pairs = [(value, value**2 % 7 - 3) for value in values]
    whole = Metrics()
    add(whole, pairs)
    # Each pair goes to one of three processes, in one of two calls; some of both stay empty.
    places = data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=len(pairs), max_size=len(pairs))
    )
    processes = [Metrics() for _ in range(3)]
    for number, process in enumerate(processes):
        for call in range(2):
            add(process, [pair for pair, place in zip(pairs, places, strict=True) if place == (number, call)])
    result = reduced(processes)
    # Squares as large as the values' own are added up before the standard deviation subtracts them.
    assert result == pytest.approx(reduced([whole]), rel=1e-9, abs=1e-4)

    assert result["mean"] == pytest.approx(statistics.fmean(values))
    assert result["std"] == pytest.approx(statistics.stdev(values) if len(values) > 1 else 0.0, abs=1e-4)
    assert (result["summary/min"], result["summary/max"]) == (min(values), max(values))
    assert result["total"] == pytest.approx(math.fsum(values))


@given(VALUES, st.integers(0, 12))
def test_a_state_that_is_saved_and_loaded_on_the_way_changes_nothing(values, cut):
    pairs = [(value, value**2 % 7 - 3) for value in values]
    at_once, before, after = Metrics(), Metrics(), Metrics()
    add(at_once, pairs[:cut])
    add(at_once, pairs[cut:])
    add(before, pairs[:cut])
    after.load_state(before.state())
    add(after, pairs[cut:])
    assert reduced([after]) == reduced([at_once])
