import math

import pytest
import torch

from hacpo_trl.advantages import group_advantages, own_group_advantages


NAN = math.nan
EPSILON = 1e-4


def rewards_of(*groups):
    """Groups of agents of rewards, with None for no verdict, as a float64 tensor `(B, n, G)`."""
    return torch.tensor(
        [[[NAN if r is None else r for r in agent] for agent in group] for group in groups], dtype=torch.float64
    )


def test_two_agents_by_hand():
    rewards = rewards_of([[1, 0], [1, 1]])
    result = group_advantages(rewards, learner=0, ratios=torch.tensor([1.0, 0.5]))
    # μ̂ = (1 + 0 + 0.5·1 + 0.5·1) / 4 = 0.5. The raw mean is 0.75, its deviations 0.25, -0.75, 0.25, 0.25, so
    # σ² = (3·0.0625 + 0.5625) / 3 = 0.25.
    assert result.baseline.tolist() == pytest.approx([0.5])
    assert result.std.tolist() == pytest.approx([0.5])
    high, low = 0.5 / (0.5 + EPSILON), -0.5 / (0.5 + EPSILON)
    torch.testing.assert_close(result.advantages, rewards_of([[high, low], [high, high]]))
    assert not result.fallback.any() and not result.uniform.any()


def test_two_agents_by_hand_in_the_eyes_of_the_other():
    result = group_advantages(rewards_of([[1, 0], [1, 1]]), learner=1, ratios=torch.tensor([1.5, 1.0]))
    # μ̂ = (1.5·1 + 0 + 1 + 1) / 4 = 0.875
    scale = 0.5 + EPSILON
    expected = rewards_of([[0.125 / scale, -0.875 / scale], [0.125 / scale, 0.125 / scale]])
    torch.testing.assert_close(result.advantages, expected)


def test_three_agents_by_hand():
    rewards = rewards_of([[1, 0], [0, 0], [1, 1]])
    result = group_advantages(rewards, learner=1, ratios=torch.tensor([0.5, 1.0, 0.25]))
    # μ̂ = (0.5·(1 + 0) + 1·(0 + 0) + 0.25·(1 + 1)) / 6 = 1/6. Three ones, three zeros: σ² = 6·0.25 / 5 = 0.3.
    assert result.baseline.tolist() == pytest.approx([1 / 6])
    assert result.std.tolist() == pytest.approx([math.sqrt(0.3)])
    high, low = (5 / 6) / (math.sqrt(0.3) + EPSILON), -(1 / 6) / (math.sqrt(0.3) + EPSILON)
    torch.testing.assert_close(result.advantages, rewards_of([[high, low], [low, low], [high, high]]))


def test_groups_do_not_mix():
    one, other = [[1, 0], [1, 1]], [[0, 0.5], [0.25, 0]]
    ratios = torch.tensor([1.0, 0.8])
    both = group_advantages(rewards_of(one, other), 0, ratios).advantages
    torch.testing.assert_close(both[:1], group_advantages(rewards_of(one), 0, ratios).advantages)
    torch.testing.assert_close(both[1:], group_advantages(rewards_of(other), 0, ratios).advantages)


def test_one_agent_is_trls_advantage():
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 0.0, 1.0]])
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    result = group_advantages(rewards[:, None], 0, torch.ones(1))
    torch.testing.assert_close(result.advantages[:, 0], expected)
    # By hand: the second group has mean 0.25 and σ² = (3·0.0625 + 0.5625) / 3 = 0.25.
    assert result.advantages[1, 0].tolist() == pytest.approx([-0.25 / 0.5001] * 3 + [0.75 / 0.5001])


def test_equal_ratios_pool_the_group():
    # naive: mean and standard deviation of all rewards. (1 + 0 + 0 + 0) / 4 = 0.25, σ = 0.5 as above.
    result = group_advantages(rewards_of([[1, 0], [0, 0]]), 1, torch.ones(2))
    torch.testing.assert_close(
        result.advantages, rewards_of([[0.75 / 0.5001, -0.25 / 0.5001], [-0.25 / 0.5001, -0.25 / 0.5001]])
    )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.3, -2.0, 1e6])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_a_uniform_group_has_no_advantage_whatever_the_ratio(reward, ratio):
    # Without the guard ω = 10 and reward 1 would give (1 - 5.5) / (0 + 1e-4) = -45000.
    result = group_advantages(rewards_of([[reward] * 3] * 2), 0, torch.tensor([1.0, ratio]))
    assert result.advantages.tolist() == [[[0.0] * 3] * 2]
    assert result.uniform.tolist() == [True] and result.fallback.tolist() == [False]


def test_rounding_does_not_make_a_group_less_uniform():
    assert 0.1 + 0.2 != 0.3
    result = group_advantages(rewards_of([[0.1 + 0.2, 0.3], [0.3, 0.3]]), 0, torch.tensor([1.0, 2.0]))
    assert result.uniform.tolist() == [True] and not result.advantages.any()


def test_a_small_difference_is_still_a_signal():
    result = group_advantages(rewards_of([[0.001, 0.0]]), 0, torch.ones(1))
    # mean 0.0005, σ = 0.001 / √2
    assert result.advantages[0, 0, 0].item() == pytest.approx(0.0005 / (0.001 / math.sqrt(2) + 1e-4))


def test_a_baseline_above_every_reward_falls_back_to_the_learners_own_mean():
    rewards = rewards_of([[0.5, 0], [1, 0]], [[1, 0], [1, 0]])
    result = group_advantages(rewards, 0, torch.tensor([1.0, 10.0]))
    # First group: (0.5 + 10·1) / 4 = 2.625 > 1, so μ̂ = (0.5 + 0) / 2 = 0.25. Raw mean 0.375; deviations 0.125,
    # -0.375, 0.625, -0.375 give σ² = (0.015625 + 2·0.140625 + 0.390625) / 3 = 0.6875 / 3.
    assert result.fallback.tolist() == [True, True]
    assert result.baseline.tolist() == pytest.approx([0.25, 0.5])
    scale = math.sqrt(0.6875 / 3) + EPSILON
    expected = [[0.25 / scale, -0.25 / scale], [0.75 / scale, -0.25 / scale]]
    torch.testing.assert_close(result.advantages[0], torch.tensor(expected, dtype=torch.float64))
    # The best answers are never called bad.
    assert (result.advantages[rewards == 1] > 0).all()


def test_a_baseline_at_the_highest_reward_does_not_fall_back():
    result = group_advantages(rewards_of([[1, 0], [1, 0]]), 0, torch.tensor([1.0, 3.0]))
    # (1 + 3) / 4 = 1 is the highest reward, not above it.
    assert result.fallback.tolist() == [False] and result.baseline.tolist() == [1.0]


def test_only_the_group_that_needs_it_falls_back():
    result = group_advantages(rewards_of([[0, 0], [1, 0]], [[1, 1], [0, 0]]), 0, torch.tensor([1.0, 10.0]))
    # 10 / 4 = 2.5 > 1 falls back to 0; (1 + 1) / 4 = 0.5 stays.
    assert result.fallback.tolist() == [True, False] and result.baseline.tolist() == [0.0, 0.5]


def test_rollouts_without_a_verdict_leave_every_mean():
    result = group_advantages(rewards_of([[1, None], [0, 0.5]]), 0, torch.tensor([1.0, 2.0]))
    # Three verdicts. μ̂ = (1 + 2·0 + 2·0.5) / 3 = 2/3; raw mean 0.5, σ² = (0.25 + 0.25 + 0) / 2 = 0.25.
    assert result.baseline.tolist() == pytest.approx([2 / 3])
    scale = 0.5 + EPSILON
    expected = rewards_of([[(1 / 3) / scale, 0], [-(2 / 3) / scale, (0.5 - 2 / 3) / scale]])
    torch.testing.assert_close(result.advantages, expected)


def test_the_fallback_mean_leaves_out_what_has_no_verdict():
    result = group_advantages(rewards_of([[0.5, None], [1, 1]]), 0, torch.tensor([1.0, 10.0]))
    # (0.5 + 10 + 10) / 3 > 1; the learner's only verdict is 0.5.
    assert result.fallback.tolist() == [True] and result.baseline.tolist() == [0.5]


@pytest.mark.parametrize(
    "group",
    [
        [[None, None], [None, None]],
        [[1, None], [None, None]],  # a lone verdict has nothing to be compared with
        [[1, None], [1, None]],
    ],
)
def test_too_few_verdicts_are_no_signal(group):
    result = group_advantages(rewards_of(group), 0, torch.tensor([1.0, 10.0]))
    assert result.advantages.tolist() == [[[0.0, 0.0], [0.0, 0.0]]] and result.uniform.tolist() == [True]


def test_a_learner_without_a_verdict_on_a_prompt_still_learns_from_its_peers():
    result = group_advantages(rewards_of([[None, None], [1, 0]]), 0, torch.tensor([1.0, 0.5]))
    # μ̂ = 0.5·(1 + 0) / 2 = 0.25, σ = √0.5
    scale = math.sqrt(0.5) + EPSILON
    torch.testing.assert_close(result.advantages, rewards_of([[0, 0], [0.75 / scale, -0.25 / scale]]))
    fallen_back = group_advantages(rewards_of([[None, None], [1, 0]]), 0, torch.tensor([1.0, 10.0]))
    # 10·1 / 2 = 5 > 1, and there is no own mean: nothing may become NaN, nor the right answer bad.
    assert fallen_back.fallback.tolist() == [True] and fallen_back.advantages.isfinite().all()
    assert fallen_back.advantages[0, 1, 0] > 0


def test_own_baseline_measures_all_rollouts_by_the_learners_own_group():
    result = own_group_advantages(rewards_of([[1, 0, 0, 1], [1, 1, 1, 0]]), learner=0)
    # mean 0.5, σ² = 4·0.25 / 3. With the peer's rewards the mean would be 5/8.
    scale = math.sqrt(1 / 3) + EPSILON
    assert result.baseline.tolist() == [0.5] and result.std.tolist() == pytest.approx([math.sqrt(1 / 3)])
    expected = [[0.5, -0.5, -0.5, 0.5], [0.5, 0.5, 0.5, -0.5]]
    torch.testing.assert_close(result.advantages, torch.tensor([expected], dtype=torch.float64) / scale)


def test_own_baseline_of_the_second_agent_and_without_verdicts():
    result = own_group_advantages(rewards_of([[1, None, 1], [0, 1, None]]), learner=1)
    # Own verdicts 0 and 1: mean 0.5, σ² = 0.5.
    scale = math.sqrt(0.5) + EPSILON
    expected = rewards_of([[0.5 / scale, 0, 0.5 / scale], [-0.5 / scale, 0.5 / scale, 0]])
    torch.testing.assert_close(result.advantages, expected)


def test_own_baseline_without_a_scale_of_its_own_is_no_signal():
    result = own_group_advantages(rewards_of([[0, 0], [1, 0]]), learner=0)
    # σ = 0 would make the peer's right answer worth 1 / 1e-4 = 10000.
    assert result.uniform.tolist() == [True] and not result.advantages.any()


def by_loops(group, learner, ratios):
    """Eq. 6 and 7 with their guards for one group, in plain Python."""
    scaled, raw, own = [], [], []
    for j, agent in enumerate(group):
        for reward in agent:
            if reward is None:
                continue
            scaled.append(ratios[j] * reward)
            raw.append(reward)
            if j == learner:
                own.append(reward)
    if not raw or max(raw) == min(raw):
        return [[0.0 for _ in agent] for agent in group]
    baseline = sum(scaled) / len(scaled)
    if baseline > max(raw):
        baseline = sum(own) / len(own)
    mean = sum(raw) / len(raw)
    std = math.sqrt(sum((r - mean) ** 2 for r in raw) / (len(raw) - 1))
    return [[0.0 if r is None else (r - baseline) / (std + 1e-4) for r in agent] for agent in group]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_groups_against_plain_python(dtype):
    generator = torch.Generator().manual_seed(11)
    fallbacks = uniforms = 0
    for case in range(60):
        n, generations = 1 + case % 4, 2 + case % 3
        values = torch.randint(0, 3, (5, n, generations), generator=generator) / 2
        missing = torch.rand(values.shape, generator=generator) < 0.15
        missing[:, :, 0] = False  # each agent has at least one verdict
        ratios = [0.3 + 3 * torch.rand((), generator=generator).item() for _ in range(n)]
        learner = case % n
        ratios[learner] = 1.0
        groups = [
            [[None if m else v for v, m in zip(va, ma, strict=True)] for va, ma in zip(vg, mg, strict=True)]
            for vg, mg in zip(values.tolist(), missing.tolist(), strict=True)
        ]
        result = group_advantages(rewards_of(*groups).to(dtype), learner, torch.tensor(ratios, dtype=torch.float64))
        expected = torch.tensor([by_loops(group, learner, ratios) for group in groups], dtype=torch.float64)
        tolerance = 1e-12 if dtype is torch.float64 else 2e-5
        torch.testing.assert_close(result.advantages.double(), expected, rtol=tolerance, atol=tolerance)
        fallbacks += int(result.fallback.sum())
        uniforms += int(result.uniform.sum())
    # The guards were at work, too.
    assert fallbacks >= 10 and uniforms >= 10
