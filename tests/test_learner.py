"""What a learner makes of a step's rewards: capabilities and advantages by name, over processes, and their logs."""

import math

import pytest
import torch
from tiny_agents import run_config

from hacpo_trl.algorithm.advantages import group_advantages
from hacpo_trl.algorithm.capability import CapabilityWindow
from hacpo_trl.algorithm.shrinkage import own_weight, own_weight_sums
from hacpo_trl.learner import (
    add_byte_lengths,
    learner_advantages,
    learner_objective,
    log_sampler_difference,
    update_capability,
)
from hacpo_trl.reporting.metrics import Metrics
from hacpo_trl.rollouts.rollout import LearnerView, Rollout
from hacpo_trl.rollouts.rows import learner_row


# Two prompts with two rollouts each. "b" is listed first: names, not places, say whose they are.
REWARDS = {"b": torch.tensor([1.0, 0.0, 0.5, 0.5]), "a": torch.tensor([0.0, 0.25, 0.5, 0.5])}


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for module in ("hacpo_trl.learner", "hacpo_trl.reporting.metrics"):
        monkeypatch.setattr(f"{module}.gather_object", lambda objects: objects)


def window_of(**capabilities) -> CapabilityWindow:
    window = CapabilityWindow(sorted(capabilities), 4)
    window.update(capabilities)
    return window


# ---- capability -----------------------------------------------------------------------------------------------------
def test_a_performance_is_the_mean_over_all_processes_rollouts(monkeypatch):
    """Here another process has three verdicts of "b", 2 in all, and none of "a"."""
    monkeypatch.setattr("hacpo_trl.learner.gather_object", lambda objects: [*objects, {"b": (2.0, 3), "a": (0.0, 0)}])
    window, metrics = CapabilityWindow(["a", "b"], 4), Metrics()
    update_capability(run_config(), window, REWARDS, metrics)
    # (2 + 2) / (4 + 3); 1.25 / 4
    assert window.state_dict() == {"b": [pytest.approx(4 / 7)], "a": [pytest.approx(0.3125)]}
    assert metrics.reduce() == {
        "a/capability": pytest.approx(0.3125),
        "b/capability": pytest.approx(4 / 7),
        "a/capability_ratio/b": pytest.approx(0.3125 / (4 / 7)),
        "b/capability_ratio/a": pytest.approx(4 / 7 / 0.3125),
    }


def test_a_step_without_a_verdict_leaves_a_window_as_it_was():
    window, metrics = window_of(b=0.75), Metrics()
    update_capability(run_config(), window, {"b": torch.full((4,), math.nan)}, metrics)
    assert window.state_dict() == {"b": [0.75]} and metrics.reduce() == {"b/capability": 0.75}
    empty = CapabilityWindow(["b"], 4)
    update_capability(run_config(), empty, {"b": torch.full((4,), math.nan)}, metrics)
    assert empty.state_dict() == {"b": []} and metrics.reduce() == {}


def test_a_performance_is_what_the_settings_say_and_ratios_are_logged_where_they_count():
    window, metrics = CapabilityWindow(["a", "b"], 4), Metrics()
    update_capability(run_config(capability_metric="success_rate"), window, REWARDS, metrics)
    assert window.state_dict() == {"b": [0.75], "a": [0.75]}
    metrics.reduce()
    update_capability(run_config(algorithm="gspo"), window, REWARDS, metrics)
    assert set(metrics.reduce()) == {"a/capability", "b/capability"}


# ---- advantages -----------------------------------------------------------------------------------------------------
def test_each_learner_measures_by_its_own_ratios_or_by_the_sources():
    window, stacked = window_of(a=0.25, b=0.5), torch.stack([REWARDS[n].view(2, 2) for n in ("a", "b")], 1)
    of = {
        "a": group_advantages(stacked, 0, torch.tensor([1.0, 0.5])).advantages,
        "b": group_advantages(stacked, 1, torch.tensor([2.0, 1.0])).advantages,
    }
    by = {
        setting: learner_advantages(run_config(num_generations=2, cross_advantage=setting), window, REWARDS, Metrics())
        for setting in ("learner", "source")
    }
    for learner in ("a", "b"):
        for place, source in enumerate(("a", "b")):
            torch.testing.assert_close(by["learner"][learner][source], of[learner][:, place].flatten())
            torch.testing.assert_close(by["source"][learner][source], of[source][:, place].flatten())
    assert not torch.allclose(of["a"], of["b"])


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_who_learns_alone_gets_the_advantages_of_its_own_rewards(algorithm):
    result = learner_advantages(
        run_config(algorithm=algorithm, num_generations=2), window_of(a=0.25, b=0.5), REWARDS, Metrics()
    )
    assert {learner: list(of_learner) for learner, of_learner in result.items()} == {"a": ["a"], "b": ["b"]}
    # Half the difference of a prompt's two rewards, over |difference| / √2; the second prompt's are equal.
    assert result["b"]["b"].tolist() == pytest.approx([0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4), 0, 0])
    scale = 0.25 / 2**0.5 + 1e-4
    assert result["a"]["a"].tolist() == pytest.approx([-0.125 / scale, 0.125 / scale, 0, 0])


def test_what_is_logged_of_advantages():
    metrics = Metrics()
    result = learner_advantages(run_config(num_generations=2), window_of(a=0.05, b=0.5), REWARDS, metrics)
    logged = metrics.reduce()
    # The second prompt's rewards are all equal. On the first, "b" measures by (0 + 2.5 + 1 + 0) / 4 = 0.875, below 1.
    assert logged["a/frac_reward_zero_std"] == logged["b/frac_reward_zero_std"] == 0.5
    assert logged["a/baseline_fallback"] == logged["b/baseline_fallback"] == 0.0
    for learner, peer in (("a", "b"), ("b", "a")):
        assert logged[f"{learner}/advantage/own"] == pytest.approx(result[learner][learner].mean().item())
        assert logged[f"{learner}/advantage/cross"] == pytest.approx(result[learner][peer].mean().item())
    assert "a/baseline_own_weight" not in logged

    higher = {**REWARDS, "a": torch.tensor([0.0, 0.75, 0.5, 0.5])}
    learner_advantages(run_config(num_generations=2), window_of(a=0.05, b=0.5), higher, metrics)
    logged = metrics.reduce()
    # (0 + 7.5 + 1 + 0) / 4 is above 1; "a" measures by (0 + 0.75 + 0.1) / 4.
    assert (logged["a/baseline_fallback"], logged["b/baseline_fallback"]) == (0.0, 0.5)


def test_the_weight_of_the_own_mean_is_fitted_over_all_processes(monkeypatch):
    stacked = torch.stack([REWARDS[n].view(2, 2) for n in ("a", "b")], 1)
    sums = own_weight_sums(stacked, 0, torch.tensor([1.0, 1.0]))
    monkeypatch.setattr("hacpo_trl.learner.gather_object", lambda objects: [*objects, (0.5, 1.0)])
    metrics = Metrics()
    args = run_config(num_generations=2, advantage_baseline="shrinkage")
    learner_advantages(args, window_of(a=0.5, b=0.5), REWARDS, metrics)
    expected = own_weight(sums[0] + 0.5, sums[1] + 1.0)
    assert metrics.reduce()["a/baseline_own_weight"] == pytest.approx(expected) and 0 < expected < 1


# ---- objectives -----------------------------------------------------------------------------------------------------
def test_the_kl_of_an_answer_of_one_token_counts_in_full():
    batch = {
        "is_own": torch.tensor([True, True]),
        "advantage": torch.zeros(2),
        "weight": torch.ones(2),
        "old_logprob_sum": torch.tensor([-1.0, -2.0]),
        "old_num_tokens": torch.tensor([1.0, 2.0]),
        "byte_length": torch.tensor([1.0, 2.0]),
        "ref_logps": torch.tensor([[-1.5, 0.0], [-1.5, -1.5]]),
    }
    mask = torch.tensor([[True, False], [True, True]])
    logps = torch.where(mask, -1.0, 0.0)
    args = run_config(beta=0.5, use_bias_correction_kl=False)
    objective = learner_objective(args, batch, logps, mask, 0).objective
    # x = −0.5 on every token.
    assert objective.tolist() == pytest.approx([-0.5 * (math.exp(-0.5) - 0.5)] * 2)


def test_lengths_by_bytes_have_the_scale_of_the_learners_tokens_over_all_processes(monkeypatch):
    def view(agent, text, ids, reward=1.0):
        rollout = Rollout(agent, "p", 0, (1,) * 3, text, True, "stop", -2.0, reward, 0)
        return LearnerView(rollout, (1,), ids, None)

    views = {"a": [view("a", "12ab", (1, 2)), view("a", "", (1,))], "b": [view("b", "é", (1, 2, 3), reward=None)]}
    rows = {name: [learner_row("a", one, 1.0, 1.0, 0, False) for one in of] for name, of in views.items()}
    # 4 bytes in 3 tokens here, the answer without a verdict aside; 8 in 3 elsewhere: 2 bytes a token.
    monkeypatch.setattr("hacpo_trl.learner.gather_object", lambda objects: [*objects, (8, 3)])
    metrics = Metrics()
    add_byte_lengths("a", views, rows, metrics)
    assert [row.byte_length for row in rows["a"]] == [2.0, 0.5] and rows["b"][0].byte_length == 1.0
    assert metrics.reduce() == {"a/bytes_per_token": 2.0}


def test_by_how_much_trainer_and_sampler_differ():
    metrics = Metrics()
    log_sampler_difference(metrics, "a", torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.75]))
    assert metrics.reduce() == {
        "a/sampling/logp_difference/mean": 0.375,
        "a/sampling/logp_difference/max": 0.5,
    }
