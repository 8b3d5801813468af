"""The rules of sharing: which rewards a learner's advantages are made of, and what its peers' rollouts are worth."""

import math

import pytest
import torch
from tiny_agents import run_config

from hacpo_trl.algorithm.advantages import group_advantages, own_group_advantages
from hacpo_trl.algorithm.objective import cross_objective, own_objective
from hacpo_trl.algorithm.sharing import RULES
from hacpo_trl.algorithm.shrinkage import own_weight, own_weight_sums, shrinkage_advantages


# Two prompts, three agents with two rollouts each; each agent's rewards are its own on both prompts.
REWARDS = torch.tensor(
    [[[1.0, 0.0], [0.0, 0.5], [1.0, 0.75]], [[0.0, 0.25], [1.0, 0.0], [0.5, 0.25]]], dtype=torch.float64
)
RATIOS = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


def alone(numbers):
    """One process: nothing to add."""
    return numbers


def rule(algorithm, **settings):
    return run_config(algorithm=algorithm, **settings).rule


@pytest.mark.parametrize("learner", [0, 1, 2])
@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_who_learns_alone_has_the_advantages_of_its_own_rewards(algorithm, learner):
    result = rule(algorithm).advantages(REWARDS, learner, RATIOS, alone)
    own = REWARDS[:, learner]
    # Of two rewards: half their difference up and down, over |difference| / √2.
    half = (own - own.mean(1, keepdim=True)) / (own.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(result.advantages, half[:, None])


@pytest.mark.parametrize("learner", [0, 1, 2])
def test_naive_sharing_pools_the_rewards_whatever_the_ratios(learner):
    result = rule("naive", naive_old_logprobs="source").advantages(REWARDS, learner, RATIOS, alone)
    pooled = REWARDS.flatten(1)
    expected = (pooled - pooled.mean(1, keepdim=True)) / (pooled.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(result.advantages.flatten(1), expected)


@pytest.mark.parametrize("learner", [0, 1, 2])
def test_hacpos_baselines(learner):
    by_baseline = {
        baseline: rule("hacpo", advantage_baseline=baseline).advantages(REWARDS, learner, RATIOS, alone)
        for baseline in ("capability", "own", "shrinkage")
    }
    weight = own_weight(*own_weight_sums(REWARDS, learner, RATIOS))
    expected = {
        "capability": group_advantages(REWARDS, learner, RATIOS),
        "own": own_group_advantages(REWARDS, learner),
        "shrinkage": shrinkage_advantages(REWARDS, learner, RATIOS, weight),
    }
    for baseline, result in by_baseline.items():
        torch.testing.assert_close(result.advantages, expected[baseline].advantages)
        assert result.own_weight == expected[baseline].own_weight
    assert not torch.allclose(by_baseline["capability"].advantages, by_baseline["own"].advantages)


def test_shrinkage_asks_for_the_sums_of_all_processes():
    """Here the other process has twice this one's first sum and five times its second."""
    asked = []

    def summed(numbers):
        asked.append(numbers)
        return numbers[0] * 3, numbers[1] * 6

    result = rule("hacpo", advantage_baseline="shrinkage").advantages(REWARDS, 2, RATIOS, summed)
    sums = own_weight_sums(REWARDS, 2, RATIOS)
    assert asked == [sums] and result.own_weight == own_weight(sums[0] * 3, sums[1] * 6) != own_weight(*sums)


RATIO = torch.tensor([0.1, 0.5, 0.97, 1.01], dtype=torch.float64)
ADVANTAGE = torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=torch.float64)
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)


def test_hacpos_objective_of_peers_rollouts():
    hacpo = rule("hacpo", alpha=2.0, delta=0.6, delta_step=0.1)
    for update, bound in ((0, 0.4), (1, 0.5), (9, 1.0)):
        expected = cross_objective(RATIO, ADVANTAGE, WEIGHT, 2.0, bound)
        torch.testing.assert_close(hacpo.cross_objective(RATIO, ADVANTAGE, WEIGHT, update), expected)
        below, above = hacpo.discarded(RATIO, ADVANTAGE, update)
        assert below.tolist() == [ratio < hacpo.lower_bound(update) for ratio in RATIO.tolist()]
        assert above.tolist() == [False, False, False, True]
    free = rule("hacpo", alpha=2.0, clip_cross=False)
    torch.testing.assert_close(
        free.cross_objective(RATIO, ADVANTAGE, WEIGHT, 3), cross_objective(RATIO, ADVANTAGE, WEIGHT, 2.0, None)
    )
    assert free.lower_bound(3) is None and not any(side.any() for side in free.discarded(RATIO, ADVANTAGE, 3))


def test_a_peers_weight():
    assert rule("hacpo").weight(1.7) == 1.7
    assert rule("hacpo", capability_weighting=False).weight(1.7) == 1.0
    assert rule("naive", naive_old_logprobs="source").weight(1.7) == 1.0


def test_naive_sharings_objective_of_peers_rollouts_is_that_of_own_ones():
    naive = rule("naive", naive_old_logprobs="source", epsilon=0.02, epsilon_high=0.005)
    ratio = torch.tensor([0.97, 0.97, 0.99, 1.01, 1.01, 1.004], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(
        naive.cross_objective(ratio, advantage, torch.full((6,), math.nan), 3),
        own_objective(ratio, advantage, 0.02, 0.005),
    )
    below, above = naive.discarded(ratio, advantage, 3)
    # Without a gradient: below the range where an answer is bad, above it where it is good.
    assert below.tolist() == [False, True, False, False, False, False]
    assert above.tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_who_learns_alone_has_no_objective_of_peers_rollouts(algorithm):
    with pytest.raises(TypeError, match="shares no rollouts"):
        rule(algorithm).cross_objective(RATIO, ADVANTAGE, WEIGHT, 0)


def test_what_rules_are():
    """What the trainer and the configuration read off a rule."""
    kinds = {name: (rule.shares, rule.token_level, rule.uses_capability) for name, rule in RULES.items()}
    assert kinds == {
        "hacpo": (True, False, True),
        "naive": (True, False, False),
        "gspo": (False, False, False),
        "grpo": (False, True, False),
    }
    assert {name: rule.default_epsilon for name, rule in RULES.items()} == {
        "hacpo": (3e-4, 4e-4),
        "naive": (3e-4, 4e-4),
        "gspo": (3e-4, 4e-4),
        "grpo": (0.2, 0.28),
    }
    assert RULES["gspo"].options() == RULES["grpo"].options() == ()
    assert RULES["naive"].options() == ("ratio_normalization", "minibatch_order", "naive_old_logprobs")
    assert set(RULES["hacpo"].options()) == {
        *("alpha", "delta", "delta_step", "clip_cross", "capability_weighting", "advantage_baseline"),
        *("cross_advantage", "capability_window", "capability_metric", "ratio_normalization", "minibatch_order"),
    }
