import logging
import math

import pytest
import torch

from hacpo_trl.algorithm.capability import CapabilityWindow, performance_counts


NAN = math.nan


def window_of(**performances):
    """Capabilities as they stand after one step."""
    window = CapabilityWindow(list(performances), size=5)
    window.update(performances)
    return window


def test_performance_is_the_mean_of_the_rewards_that_are_there():
    # (1 + 0 + 0.5) / 3 verdicts; the None (NaN) counts in neither.
    assert performance_counts(torch.tensor([1.0, NAN, 0.0, 0.5]), "mean_reward") == (1.5, 3)
    assert performance_counts(torch.tensor([NAN, NAN]), "mean_reward") == (0.0, 0)


def test_performance_as_success_rate_counts_rewards_above_zero():
    # -1, 0 and 0.5, 2 have verdicts; two of the four are above 0.
    assert performance_counts(torch.tensor([-1.0, 0.0, NAN, 0.5, 2.0]), "success_rate") == (2.0, 4)


def test_performance_sum_is_exact_where_float32_would_stall():
    # float32 cannot hold 2^24 + 1: adding ones to 2^24 one by one would not move it.
    rewards = torch.tensor([2.0**24, 1.0, 1.0, 1.0])
    assert performance_counts(rewards, "mean_reward") == (2.0**24 + 3, 4)


def test_capability_is_the_mean_of_the_last_k_steps():
    window = CapabilityWindow(["a"], size=3)
    assert window.capability("a") is None
    expected = [
        0.6,  # 0.6
        0.4,  # (0.6 + 0.2) / 2
        0.3,  # (0.6 + 0.2 + 0.1) / 3
        0.2,  # (0.2 + 0.1 + 0.3) / 3: the first step has left the window
        0.4,  # (0.1 + 0.3 + 0.8) / 3
    ]
    for performance, capability in zip([0.6, 0.2, 0.1, 0.3, 0.8], expected, strict=True):
        window.update({"a": performance})
        assert window.capability("a") == pytest.approx(capability)


def test_ratio_divides_the_learners_capability_by_the_sources():
    window = CapabilityWindow(["a", "b"], size=5)
    window.update({"a": 0.9, "b": 0.2})
    window.update({"a": 0.3, "b": 0.6})
    # P̂(a) = 0.6, P̂(b) = 0.4. The mean of the two steps' ratios, (4.5 + 0.5) / 2 = 2.5, would be something else.
    assert window.ratio("a", "b") == pytest.approx(1.5)
    assert window.ratio("b", "a") == pytest.approx(2 / 3)
    assert window.ratio("a", "a") == 1.0


@pytest.mark.parametrize(
    ("learner", "source", "ratio"),
    [
        (0.9, 0.1, 9.0),
        (1.0, 0.01, 10.0),  # 100, clamped
        (0.01, 1.0, 0.1),  # 0.01, clamped
        (0.0, 0.5, 0.1),  # 0, clamped
        (0.5, 0.0, 10.0),  # infinite, clamped
        (0.0, 0.0, 1.0),  # 0/0
        (-0.5, 0.0, 1.0),  # a negative capability counts as 0
        (-0.5, -0.1, 1.0),  # not 5
        (0.5, -0.1, 10.0),  # not -5
        (-0.5, 0.1, 0.1),
    ],
)
def test_ratio_is_always_within_its_bounds(learner, source, ratio):
    assert window_of(k=learner, j=source).ratio("k", "j") == pytest.approx(ratio)


def test_ratio_is_one_before_either_agent_has_a_performance():
    window = CapabilityWindow(["a", "b"], size=5)
    assert window.ratio("a", "b") == 1.0
    window.update({"a": 0.5, "b": None})
    assert window.ratio("a", "b") == window.ratio("b", "a") == 1.0


def test_a_step_without_verdicts_leaves_the_window_as_it_was():
    window = CapabilityWindow(["a", "b"], size=2)
    for a, b in [(0.2, 0.5), (0.4, None), (None, 0.7)]:
        window.update({"a": a, "b": b})
    assert window.state_dict() == {"a": [0.2, 0.4], "b": [0.5, 0.7]}


@pytest.mark.parametrize("performance", [0.0, -0.25])
def test_a_capability_of_zero_or_less_is_warned_about_once_and_by_name(performance, caplog):
    window = CapabilityWindow(["strong", "weak"], size=5)
    with caplog.at_level(logging.WARNING, logger="hacpo_trl.algorithm.capability"):
        for _ in range(3):
            window.update({"strong": 0.5, "weak": performance})
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "'weak'" in messages[0] and "success_rate" in messages[0] and "strong" not in messages[0]


def test_each_agent_gets_its_own_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="hacpo_trl.algorithm.capability"):
        window = window_of(a=0.0, b=0.5)
        window.update({"a": 0.0, "b": -2.0})  # (0.5 - 2) / 2 = -0.75
    assert ["'a'" in r.getMessage() for r in caplog.records] == [True, False]
    assert "'b'" in caplog.records[1].getMessage() and "-0.75" in caplog.records[1].getMessage()


def test_state_round_trip_continues_the_same_window():
    window = CapabilityWindow(["a", "b"], size=2)
    window.update({"a": 0.1, "b": 0.4})
    window.update({"a": 0.3, "b": 0.2})
    restored = CapabilityWindow(["b", "a"], size=2)
    restored.update({"a": 9.0, "b": 9.0})  # forgotten on loading
    restored.load_state_dict(window.state_dict())
    for each in (window, restored):
        each.update({"a": 0.5, "b": 0.6})
        assert each.capability("a") == pytest.approx(0.4)  # (0.3 + 0.5) / 2
        assert each.capability("b") == pytest.approx(0.4)  # (0.2 + 0.6) / 2
    assert restored.state_dict() == window.state_dict()
    # A state of fewer steps than there were leaves none of those.
    restored.load_state_dict({"a": [0.7], "b": [0.1]})
    assert (restored.capability("a"), restored.capability("b")) == (0.7, 0.1)


def test_a_state_is_a_snapshot():
    window = window_of(a=0.5)
    state = window.state_dict()
    window.update({"a": 0.7})
    assert state == {"a": [0.5]}


def test_the_state_of_other_agents_is_an_error_that_names_both():
    with pytest.raises(ValueError, match=r"\['a', 'c'\].*\['a', 'b'\]"):
        window_of(a=0.5, b=0.5).load_state_dict({"a": [0.5], "c": [0.5]})
