import math

import pytest
import torch

from hacpo_trl.algorithm.advantages import (
    group_advantages,
    own_group_advantages,
)
from hacpo_trl.algorithm.shrinkage import own_weight, own_weight_sums, shrinkage_advantages


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


@pytest.mark.parametrize("size", [1e6, -1e6])
def test_equal_is_relative_to_the_size_of_rewards_of_either_sign(size):
    result = group_advantages(rewards_of([[size, size + 0.5]], [[size, size + 1.5]]), 0, torch.ones(1))
    assert result.uniform.tolist() == [True, False]


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
    if baseline > max(raw) or baseline < min(raw):
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


# ---- shrinkage ------------------------------------------------------------------------------------------------------
def test_own_weight_by_hand():
    # First prompt: own 1, 0 (each left out, the other is x), z = 0.5·(1 + 0)/2 = 0.25:
    #   i = 1: x − z = −0.25, R − z = 0.75;  i = 2: x − z = 0.75, R − z = −0.25. Products −0.1875 twice.
    # Second prompt: own 1, 1, z = 0.5·(1 + 1)/2 = 0.5: x − z = R − z = 0.5, twice.
    rewards = rewards_of([[1, 0], [1, 0]], [[1, 1], [1, 1]])
    numerator, denominator = own_weight_sums(rewards, 0, torch.tensor([1.0, 0.5]))
    assert numerator == pytest.approx(2 * -0.1875 + 2 * 0.25)
    assert denominator == pytest.approx(0.0625 + 0.5625 + 2 * 0.25)
    assert own_weight(numerator, denominator) == pytest.approx(0.125 / 1.125)


def test_shrinkage_by_hand():
    rewards = rewards_of([[1, 0], [1, 0]])
    result = shrinkage_advantages(rewards, 0, torch.tensor([1.0, 0.5]), own_weight=0.25)
    # z = 0.25. Own rollouts: 0.25·0 + 0.75·0.25 = 0.1875 and 0.25·1 + 0.1875 = 0.4375; the peer's:
    # 0.25·0.5 + 0.1875 = 0.3125. σ² = 4·0.25 / 3.
    scale = math.sqrt(1 / 3) + EPSILON
    expected = rewards_of([[1 - 0.1875, -0.4375], [1 - 0.3125, -0.3125]]) / scale
    torch.testing.assert_close(result.advantages, expected)
    assert result.baseline.tolist() == pytest.approx([0.3125]) and result.std.tolist() == pytest.approx(
        [math.sqrt(1 / 3)]
    )


def test_shrinkage_of_three_agents_pools_the_peers():
    rewards = rewards_of([[1, 0], [1, 1], [0, None]])
    result = shrinkage_advantages(rewards, 1, torch.tensor([0.5, 1.0, 2.0]), own_weight=0.5)
    # z = (0.5·1 + 0.5·0 + 2·0) / 3 = 1/6; both views of the own mean are 1.
    assert result.baseline.tolist() == pytest.approx([7 / 12])
    # Five verdicts, three of them 1: mean 0.6, σ² = (3·0.16 + 2·0.36) / 4 = 0.3.
    scale = math.sqrt(0.3) + EPSILON
    expected = rewards_of([[5 / 12, -7 / 12], [5 / 12, 5 / 12], [-7 / 12, 0]]) / scale
    expected[0, 2, 1] = 0
    torch.testing.assert_close(result.advantages, expected)


def weight_by_search(rewards, learner, ratios):
    """λ as the best of 1001 tries, each rollout left out in plain Python."""
    cases = []
    for group in rewards.tolist():
        peers = [ratios[j] * r for j, agent in enumerate(group) if j != learner for r in agent if not math.isnan(r)]
        own = [r for r in group[learner] if not math.isnan(r)]
        for i, target in enumerate(own):
            others = own[:i] + own[i + 1 :]
            if others and peers:
                cases.append((target, sum(others) / len(others), sum(peers) / len(peers)))
    errors = [sum((t - w * x - (1 - w) * z) ** 2 for t, x, z in cases) for w in torch.linspace(0, 1, 1001).tolist()]
    return errors.index(min(errors)) / 1000


def random_rewards(seed, missing=0.2, prompts=40, agents=3, generations=4):
    """Rewards of agents that find different prompts hard, some without a verdict."""
    generator = torch.Generator().manual_seed(seed)
    success = torch.rand(prompts, agents, 1, generator=generator)
    rewards = (torch.rand(prompts, agents, generations, generator=generator) < success).double()
    rewards[torch.rand(rewards.shape, generator=generator) < missing] = NAN
    return rewards


@pytest.mark.parametrize("learner", [0, 1, 2])
@pytest.mark.parametrize("ratios", [[1.0, 1.0, 1.0], [0.6, 1.0, 1.7]])
def test_own_weight_is_the_best_of_all_weights(learner, ratios):
    rewards = random_rewards(learner)
    weight = own_weight(*own_weight_sums(rewards, learner, torch.tensor(ratios, dtype=torch.float64)))
    assert weight == pytest.approx(weight_by_search(rewards, learner, ratios), abs=6e-4) and 0.05 < weight < 0.95


def test_own_weight_says_how_alike_the_agents_find_the_prompts():
    generator = torch.Generator().manual_seed(5)
    success = torch.rand(4000, 1, 1, generator=generator)
    alike = (torch.rand(4000, 2, 8, generator=generator) < success).double()
    other = (torch.rand(4000, 1, 8, generator=generator) < torch.rand(4000, 1, 1, generator=generator)).double()
    unlike = torch.cat([alike[:, :1], other], dim=1)
    weights = [own_weight(*own_weight_sums(rewards, 0, torch.ones(2))) for rewards in (alike, unlike)]
    # With p uniform on [0, 1] a single reward has variance 1/12 between prompts and 1/6 within. Alike: x and z are
    # unbiased with variances (1/6)/7 and (1/6)/8 within, so λ = (1/8) / (1/7 + 1/8) = 7/15. Unlike: z errs by
    # 1/6 + 1/48 (its prompt's and the learner's p are apart), x by 1/42, so λ = (3/16) / (3/16 + 1/42) = 0.887.
    assert weights == pytest.approx([7 / 15, (3 / 16) / (3 / 16 + 1 / 42)], abs=0.03)


def test_own_weight_stays_between_0_and_1():
    # z = 0.5: each rollout and its twin lie on opposite sides of it, −0.25 twice over 0.25 twice.
    numerator, denominator = own_weight_sums(rewards_of([[1, 0], [1, 0]]), 0, torch.ones(2))
    assert (numerator, denominator) == (-0.5, 0.5) and own_weight(numerator, denominator) == 0.0
    # The twins agree, the peer does not: as much as the learner's own mean can be worth.
    assert own_weight(*own_weight_sums(rewards_of([[0.5, 0.5], [1, 1]]), 0, torch.ones(2))) == 1.0
    # Rounding does not lead beyond.
    assert own_weight(2.0 + 1e-15, 2.0) == 1.0


@pytest.mark.parametrize(
    "rewards",
    [
        rewards_of([[1, 1], [1, 1]]),  # the predictions agree everywhere
        rewards_of([[1, None], [1, 0]]),  # nothing to leave out
        rewards_of([[1, 0], [None, None]]),  # no peer
        rewards_of([[1, 0]]),
    ],
)
def test_a_weight_that_the_rewards_cannot_tell_is_1(rewards):
    assert own_weight(*own_weight_sums(rewards, 0, torch.ones(rewards.shape[1]))) == 1.0


def test_halves_of_a_step_add_up_to_the_whole():
    rewards, ratios = random_rewards(7), torch.tensor([1.0, 0.7, 1.3], dtype=torch.float64)
    halves = [own_weight_sums(half, 0, ratios) for half in (rewards[:13], rewards[13:])]
    whole = own_weight_sums(rewards, 0, ratios)
    assert [sum(parts) for parts in zip(*halves, strict=True)] == pytest.approx(whole)
    advantages = [
        shrinkage_advantages(half, 0, ratios, own_weight(*whole)).advantages for half in (rewards[:13], rewards[13:])
    ]
    expected = shrinkage_advantages(rewards, 0, ratios, own_weight(*whole)).advantages
    torch.testing.assert_close(torch.cat(advantages), expected)
    # The halves alone would weigh differently.
    assert own_weight(*halves[0]) != pytest.approx(own_weight(*halves[1]), abs=0.01)


def test_permuting_the_agents_permutes_the_shrinkage():
    rewards, ratios = random_rewards(8), torch.tensor([1.0, 0.7, 1.3], dtype=torch.float64)
    order = [2, 0, 1]
    permuted, permuted_ratios = rewards[:, order], ratios[order]
    weight = own_weight(*own_weight_sums(rewards, 0, ratios))
    assert own_weight(*own_weight_sums(permuted, 1, permuted_ratios)) == pytest.approx(weight, rel=1e-12)
    torch.testing.assert_close(
        shrinkage_advantages(permuted, 1, permuted_ratios, weight).advantages,
        shrinkage_advantages(rewards, 0, ratios, weight).advantages[:, order],
    )


def test_one_agent_is_measured_against_its_other_rollouts():
    rewards = rewards_of([[1, 0, 0, 0.5]])
    assert own_weight(*own_weight_sums(rewards, 0, torch.ones(1))) == 1.0
    result = shrinkage_advantages(rewards, 0, torch.ones(1), 1.0)
    # Leave-one-out means 0.5/3, 1.5/3, 1.5/3, 1/3; mean 0.375, σ² = (0.390625 + 2·0.140625 + 0.015625) / 3.
    scale = math.sqrt(0.6875 / 3) + EPSILON
    torch.testing.assert_close(result.advantages, rewards_of([[1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3]]) / scale)
    # R − mean of the others = G/(G − 1) · (R − mean): GRPO's advantage but for a factor.
    grpo = group_advantages(rewards, 0, torch.ones(1))
    torch.testing.assert_close(result.advantages, grpo.advantages * 4 / 3)


def test_an_own_reward_does_not_move_its_own_baseline():
    one = shrinkage_advantages(rewards_of([[1, 0, 1], [1, 0, 0]]), 0, torch.tensor([1.0, 0.9]), 0.5)
    other = shrinkage_advantages(rewards_of([[0, 0, 1], [1, 0, 0]]), 0, torch.tensor([1.0, 0.9]), 0.5)
    baselines = [
        reward - result.advantages[0, 0, 0] * (result.std[0] + EPSILON) for reward, result in ((1, one), (0, other))
    ]
    # 0.5·(0 + 1)/2 + 0.5·0.9·(1 + 0 + 0)/3 = 0.4
    assert torch.stack(baselines).tolist() == pytest.approx([0.4, 0.4])


def test_shrinkage_where_one_of_the_means_is_missing():
    ratios = torch.tensor([1.0, 0.5])
    # A lone verdict of the learner: the learner's rollout has z = 0.5·1/2 alone, the peer's 0.5·1 + 0.5·0.25.
    lone = shrinkage_advantages(rewards_of([[1, None], [1, 0]]), 0, ratios, 0.5)
    scale = math.sqrt(1 / 3) + EPSILON  # 1, 1, 0
    expected = torch.tensor([[[0.75, 0], [1 - 0.625, -0.625]]], dtype=torch.float64) / scale
    torch.testing.assert_close(lone.advantages, expected)
    # None at all: z for everybody. No peer's verdict: the learner's own means.
    none = shrinkage_advantages(rewards_of([[None, None], [1, 0]]), 0, ratios, 0.5)
    assert none.baseline.tolist() == [0.25] and none.advantages[0, 0].tolist() == [0, 0]
    alone = shrinkage_advantages(rewards_of([[1, 0], [None, None]]), 0, ratios, 0.5)
    scale = math.sqrt(0.5) + EPSILON
    torch.testing.assert_close(alone.advantages, torch.tensor([[[1.0, -1.0], [0, 0]]], dtype=torch.float64) / scale)


def test_shrinkage_falls_back_where_a_best_answer_would_be_called_bad():
    rewards = rewards_of([[1, 0], [1, 0]], [[0, 0], [1, 0]], [[None, None], [1, 0]])
    result = shrinkage_advantages(rewards, 0, torch.tensor([1.0, 10.0]), 0.5)
    # z = 5 each. First: the best own rollout has 0.5·0 + 2.5 > 1. Then own means alone: 0 and 1; for the peer 0.5.
    assert result.fallback.tolist() == [True, True, True]
    assert result.baseline.tolist() == pytest.approx([0.5, 0.0, 0.5])
    scale = math.sqrt(1 / 3) + EPSILON
    expected = torch.tensor([[1.0, -1.0], [0.5, -0.5]], dtype=torch.float64) / scale
    torch.testing.assert_close(result.advantages[0], expected)
    assert (result.advantages[rewards == 1] > 0).all()


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.3])
def test_a_uniform_group_has_no_shrinkage_advantage(reward):
    result = shrinkage_advantages(rewards_of([[reward] * 3] * 2), 0, torch.tensor([1.0, 10.0]), 0.3)
    assert not result.advantages.any() and result.uniform.all() and not result.fallback.any()


def test_the_best_answers_are_never_called_bad():
    for seed in range(20):
        rewards = random_rewards(seed, missing=0.5)
        result = shrinkage_advantages(rewards, 1, torch.tensor([3.0, 1.0, 0.2]), (seed % 5) / 4)
        assert result.advantages.isfinite().all()
        assert (result.advantages[rewards == 1] >= -1e-9).all() and result.fallback.any()
