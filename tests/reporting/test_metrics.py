import json
import math

import pytest
import torch

from hacpo_trl.reporting.metrics import Metrics


def t(*values):
    return torch.tensor(values, dtype=torch.float32)


@pytest.fixture
def alone(monkeypatch):
    """One process."""
    monkeypatch.setattr("hacpo_trl.reporting.metrics.gather_object", lambda objects: objects)


def reduced_over(monkeypatch, *processes):
    """What every process gets: the states of all, gathered in the order of their ranks."""
    states = [process.state() for process in processes]
    monkeypatch.setattr("hacpo_trl.reporting.metrics.gather_object", lambda objects: states)
    return processes[0].reduce()


def test_means_weigh_by_count(alone):
    metrics = Metrics()
    metrics.mean("m", t(1, 2, 3))
    metrics.mean("m", 10.0)
    metrics.mean("m", t())
    metrics.mean("flags", torch.tensor([[True, False], [False, False]]))
    # (1 + 2 + 3 + 10) / 4 = 4; the mean of the two means would be 6.
    assert metrics.reduce() == {"m": 4.0, "flags": 0.25}


def test_minimum_maximum_total_and_last(alone):
    metrics = Metrics()
    for values in (t(3, 1), t(2, 7), t()):
        metrics.minimum("min", values)
        metrics.maximum("max", values)
    metrics.total("sum", 3)
    metrics.total("sum", 4)
    metrics.last("last", 0.3)
    metrics.last("last", 0.1)
    assert metrics.reduce() == {"min": 1.0, "max": 7.0, "sum": 7.0, "last": 0.1}


def test_summary(alone):
    metrics = Metrics()
    metrics.summary("ratio", t(0.5, 1.5))
    metrics.summary("ratio", t(4.0))
    assert metrics.reduce() == {"ratio/mean": 2.0, "ratio/min": 0.5, "ratio/max": 4.0}


def test_standard_deviation_is_unbiased_and_of_all_values_together(alone):
    metrics = Metrics()
    metrics.std("std", t(1, 1))
    metrics.std("std", t(3, 3))
    # mean 2, four deviations of 1: √(4/3). Each call alone would have 0.
    metrics.std("lone", t(5))
    metrics.std("constant", t(*[0.1] * 7))
    metrics.std("none", t())
    result = metrics.reduce()
    assert result == {"std": pytest.approx(math.sqrt(4 / 3)), "lone": 0.0, "constant": pytest.approx(0, abs=1e-7)}


def test_quotient(alone):
    metrics = Metrics()
    metrics.quotient("loss", 3.0, 2)
    metrics.quotient("loss", 1.0, 6)
    metrics.quotient("nothing", 0.0, 0)
    # (3 + 1) / (2 + 6); the mean of the quotients would be 5/6.
    assert metrics.reduce() == {"loss": 0.5}


def test_correlation(alone):
    metrics = Metrics()
    # Centered: Σxy = 1·2 + 1·0 + 2·2 = 6, Σx² = 6, Σy² = 8, with each call's pairs added up.
    metrics.correlation("rho", t(-1, 1), t(-2, 0))
    metrics.correlation("rho", t(2, 0), t(2, 0))
    metrics.correlation("constant", t(0, 0), t(1, -1))
    assert metrics.reduce() == {"rho": pytest.approx(6 / math.sqrt(6 * 8))}


def test_correlation_of_a_line(alone):
    metrics = Metrics()
    x = t(-1, 0, 1)
    metrics.correlation("up", x, 3 * x)
    metrics.correlation("down", x, -0.5 * x)
    assert metrics.reduce() == {"up": pytest.approx(1.0), "down": pytest.approx(-1.0)}


def test_processes_are_merged_as_if_they_were_one(monkeypatch):
    first, second = Metrics(), Metrics()
    first.mean("m", t(1, 2, 3))
    second.mean("m", t(10))
    first.std("s", t(1, 1))
    second.std("s", t(3, 3))
    first.summary("r", t(0.5, 0.7))
    second.summary("r", t(0.1))
    first.total("n", 5)
    second.total("n", 6)
    first.last("c", 0.4)
    second.last("c", 0.4)
    first.quotient("q", 3.0, 2)
    second.quotient("q", 1.0, 6)
    first.correlation("rho", t(-1, 1), t(-2, 0))
    second.correlation("rho", t(2, 0), t(2, 0))
    second.mean("only here", t(4, 6))
    assert reduced_over(monkeypatch, first, second) == {
        "m": 4.0,
        "s": pytest.approx(math.sqrt(4 / 3)),
        "r/mean": pytest.approx(1.3 / 3),
        "r/min": pytest.approx(0.1),
        "r/max": pytest.approx(0.7),
        "n": 11.0,
        "c": 0.4,
        "q": 0.5,
        "rho": pytest.approx(6 / math.sqrt(48)),
        "only here": 5.0,
    }
    assert first.state() == {} and second.state() != {}


def test_reducing_starts_anew(alone):
    metrics = Metrics()
    metrics.mean("x", t(1))
    metrics.minimum("y", t(1))
    metrics.reduce()
    metrics.total("x", 2)  # another kind under the same name: nothing is left of the first
    metrics.minimum("y", t(5))
    assert metrics.reduce() == {"x": 2.0, "y": 5.0}


def test_a_state_continues_where_it_was(alone):
    metrics = Metrics()
    metrics.mean("m", t(1, 2))
    metrics.maximum("max", t(3))
    metrics.std("s", t(1, 1))
    restored = Metrics()
    restored.mean("m", t(100))  # forgotten on loading
    restored.load_state(json.loads(json.dumps(metrics.state())))
    for each in (metrics, restored):
        each.mean("m", t(6))
        each.maximum("max", t(2))
        each.std("s", t(3, 3))
    expected = {"m": 3.0, "max": 3.0, "s": pytest.approx(math.sqrt(4 / 3))}
    assert metrics.reduce() == expected and restored.reduce() == expected


def test_one_name_is_one_kind():
    metrics = Metrics()
    metrics.mean("x", t(1))
    with pytest.raises(AssertionError, match="metric x is a mean, not a total"):
        metrics.total("x", 1)


def test_sums_do_not_lose_small_values(alone):
    metrics = Metrics()
    for _ in range(1000):
        metrics.mean("m", t(1e8, 1.0))
    # In float32 each sum would be 1e8, and the mean 5e7.
    assert metrics.reduce() == {"m": 50000000.5}
