"""What holds for all rewards and ratios, not for the examples alone."""

import math

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hacpo_trl.algorithm.advantages import STD_EPSILON, group_advantages, own_group_advantages, raw_rewards
from hacpo_trl.algorithm.capability import RATIO_MAX, RATIO_MIN, CapabilityWindow, performance_counts
from hacpo_trl.algorithm.objective import (
    MAX_LOG_RATIO,
    cross_lower_bound,
    cross_objective,
    kl_to_reference,
    own_objective,
    sampler_weights,
    sequence_log_ratio,
    token_objective,
)
from hacpo_trl.algorithm.shrinkage import own_weight, own_weight_sums, shrinkage_advantages


def vector(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- advantages -----------------------------------------------------------------------------------------------------
# Rewards as verifiers give them, some None. Multiples of 1/8, so that sums have no rounding that could change a guard.
VERDICTS = st.one_of(st.integers(-8, 16).map(lambda eighths: eighths / 8), st.just(math.nan))
BASELINES = ("capability", "own", "shrinkage")


@st.composite
def groups(draw, prompts=None):
    """Rewards `(B, n, G)`, a learner and its ratios."""
    sizes = st.integers(1, 3)
    shape = (draw(sizes) if prompts is None else prompts, draw(sizes), draw(st.integers(2, 4)))
    rewards = vector(draw(st.lists(VERDICTS, min_size=math.prod(shape), max_size=math.prod(shape)))).view(shape)
    learner = draw(st.integers(0, shape[1] - 1))
    ratios = vector(draw(st.lists(st.integers(1, 80), min_size=shape[1], max_size=shape[1]))) / 8
    ratios[learner] = 1.0
    return rewards, learner, ratios


def advantages(baseline: str, rewards: torch.Tensor, learner: int, ratios: torch.Tensor, weight: float = 0.375):
    if baseline == "capability":
        return group_advantages(rewards, learner, ratios)
    if baseline == "own":
        return own_group_advantages(rewards, learner)
    return shrinkage_advantages(rewards, learner, ratios, weight)


@given(groups(), st.sampled_from(BASELINES), st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(group, baseline, random):
    rewards, learner, ratios = group
    order = list(range(rewards.shape[2]))
    random.shuffle(order)
    expected = advantages(baseline, rewards, learner, ratios).advantages[:, :, order]
    permuted = advantages(baseline, rewards[:, :, order], learner, ratios).advantages
    torch.testing.assert_close(permuted, expected)


@given(groups(), st.sampled_from(BASELINES), st.randoms(use_true_random=False))
def test_the_order_of_agents_does_not_matter(group, baseline, random):
    rewards, learner, ratios = group
    order = list(range(rewards.shape[1]))
    random.shuffle(order)
    permuted = advantages(baseline, rewards[:, order], order.index(learner), ratios[order]).advantages
    torch.testing.assert_close(permuted, advantages(baseline, rewards, learner, ratios).advantages[:, order])


@given(groups(), st.sampled_from(BASELINES))
def test_prompts_do_not_see_each_other(group, baseline):
    rewards, learner, ratios = group
    apart = [advantages(baseline, of_prompt[None], learner, ratios).advantages for of_prompt in rewards]
    torch.testing.assert_close(advantages(baseline, rewards, learner, ratios).advantages, torch.cat(apart))


@given(groups(), st.sampled_from(BASELINES), st.sampled_from([0.5, 2.0, 8.0]))
def test_scaled_rewards_have_the_same_advantages_but_for_the_epsilon(group, baseline, scale):
    rewards, learner, ratios = group
    one, other = (advantages(baseline, r, learner, ratios) for r in (rewards, rewards * scale))
    # Numerators and σ scale alike.
    numerators = other.advantages * (other.std.view(-1, 1, 1) + STD_EPSILON)
    torch.testing.assert_close(numerators, one.advantages * (one.std.view(-1, 1, 1) + STD_EPSILON) * scale)
    torch.testing.assert_close(other.std, one.std * scale)


@given(groups(), st.sampled_from([-2.0, 0.5, 3.0]))
def test_shifted_rewards_have_the_same_advantages_without_ratios(group, shift):
    """Not so with ω ≠ 1: it scales the shift, too."""
    rewards, learner, _ = group
    ones = torch.ones(rewards.shape[1])
    expected = group_advantages(rewards, learner, ones).advantages
    torch.testing.assert_close(group_advantages(rewards + shift, learner, ones).advantages, expected)


@given(groups(), st.sampled_from(BASELINES), st.integers(-8, 16))
def test_equal_rewards_are_no_signal(group, baseline, eighths):
    rewards, learner, ratios = group
    equal = torch.where(rewards.isnan(), rewards, eighths / 8)
    result = advantages(baseline, equal, learner, ratios)
    assert not result.advantages.any() and result.uniform.all() and not result.fallback.any()


@given(groups(), st.sampled_from(BASELINES))
def test_rollouts_without_a_verdict_leave_all_means(group, baseline):
    """A further rollout of each agent, none with a verdict, changes nothing and has advantage 0 itself."""
    rewards, learner, ratios = group
    expected = advantages(baseline, rewards, learner, ratios)
    nothing = torch.full((*rewards.shape[:2], 1), math.nan, dtype=torch.float64)
    result = advantages(baseline, torch.cat([rewards, nothing], -1), learner, ratios)
    torch.testing.assert_close(result.advantages[..., :-1], expected.advantages)
    assert not result.advantages[..., -1].any()
    torch.testing.assert_close(result.baseline, expected.baseline)
    torch.testing.assert_close(result.std, expected.std)


@given(groups(), st.sampled_from(BASELINES))
def test_advantages_are_finite_and_rise_with_the_reward(group, baseline):
    """Among one agent's rollouts of a prompt: a leave-one-out baseline is lower, the better the one left out."""
    rewards, learner, ratios = group
    result = advantages(baseline, rewards, learner, ratios).advantages
    assert result.isfinite().all() and not result[rewards.isnan()].any()
    for reward, advantage in zip(rewards.flatten(0, 1), result.flatten(0, 1), strict=True):
        known = ~reward.isnan()
        order = reward[known].argsort()
        assert (advantage[known][order].diff() >= -1e-9).all()


@given(groups())
def test_the_best_answers_are_never_called_bad(group):
    rewards, learner, ratios = group
    best = rewards == raw_rewards(rewards).highest.view(-1, 1, 1)
    for baseline in ("capability", "shrinkage"):
        assert (advantages(baseline, rewards, learner, ratios).advantages[best] >= -1e-9).all()


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_one_agent_is_trls_formula(values):
    rewards = vector(values)
    assume(float(rewards.max() - rewards.min()) > 1e-3)
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    result = group_advantages(rewards.view(1, 1, -1), 0, torch.ones(1)).advantages[0, 0]
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


@given(groups(prompts=3), st.integers(1, 2))
def test_the_weight_of_the_own_mean_does_not_depend_on_how_prompts_are_dealt(group, cut):
    rewards, learner, ratios = group
    whole = own_weight_sums(rewards, learner, ratios)
    parts = [own_weight_sums(part, learner, ratios) for part in (rewards[:cut], rewards[cut:])]
    summed = [sum(of_parts) for of_parts in zip(*parts, strict=True)]
    torch.testing.assert_close(vector(summed), vector(whole))
    assert 0 <= own_weight(*whole) <= 1


# ---- capability -----------------------------------------------------------------------------------------------------
PERFORMANCES = st.lists(st.one_of(st.none(), st.floats(-2, 5)), min_size=1, max_size=8)


@given(PERFORMANCES, PERFORMANCES, st.integers(1, 4))
def test_ratios_are_within_bounds_and_each_others_inverse(one, other, size):
    window = CapabilityWindow(["a", "b"], size)
    for name, performances in (("a", one), ("b", other)):
        for performance in performances:
            window.update({name: performance})
    ratio, inverse = window.ratio("a", "b"), window.ratio("b", "a")
    assert RATIO_MIN <= ratio <= RATIO_MAX and window.ratio("a", "a") == 1.0
    assert math.isclose(ratio * inverse, 1.0, rel_tol=1e-9)
    known = [performance for performance in one if performance is not None][-size:]
    capability = window.capability("a")
    assert capability is None if not known else math.isclose(capability, sum(known) / len(known), abs_tol=1e-12)


@given(st.lists(VERDICTS, max_size=12), st.integers(0, 12), st.sampled_from(["mean_reward", "success_rate"]))
def test_counts_of_processes_add_up(rewards, cut, metric):
    whole = performance_counts(vector(rewards), metric)
    parts = [performance_counts(vector(part), metric) for part in (rewards[:cut], rewards[cut:])]
    assert tuple(map(sum, zip(*parts, strict=True))) == whole
    assert whole[1] == sum(not math.isnan(reward) for reward in rewards)


# ---- objectives -----------------------------------------------------------------------------------------------------
ADVANTAGES = st.one_of(st.floats(-5, -0.1), st.floats(0.1, 5))
EPSILONS = st.floats(1e-4, 0.5)
# Log-ratios of every size, also far beyond what exp can take in float32.
LOG_RATIOS = st.one_of(st.floats(-1, 1), st.floats(-1e4, 1e4))


def slope(function, x: float) -> tuple[float, float]:
    """Value and derivative of a function of a float64 vector of one element."""
    at = vector([x]).requires_grad_()
    value = function(at)
    (gradient,) = torch.autograd.grad(value.sum(), at)
    return float(value.detach()), float(gradient)


@given(st.floats(0.01, 3), ADVANTAGES, EPSILONS, EPSILONS)
def test_own_gradients_vanish_beyond_the_clip_range_and_nowhere_else(ratio, advantage, epsilon, epsilon_high):
    assume(min(abs(ratio - 1 + epsilon), abs(ratio - 1 - epsilon_high)) > 1e-9)
    value, gradient = slope(lambda s: own_objective(s, vector([advantage]), epsilon, epsilon_high), ratio)
    clipped = ratio < 1 - epsilon if advantage < 0 else ratio > 1 + epsilon_high
    assert math.isclose(gradient, 0.0 if clipped else advantage)
    # The objective never promises more than importance sampling does.
    assert value <= ratio * advantage + 1e-12


@given(st.floats(-4, 2), ADVANTAGES, st.floats(0.1, 10), st.floats(0, 4), st.floats(0, 1), st.integers(0, 40))
def test_peers_gradients_vanish_beyond_the_stepwise_bounds(log_ratio, advantage, weight, alpha, delta, update):
    bound = cross_lower_bound(delta, 0.025, update)
    ratio = math.exp(log_ratio)
    assume(min(abs(ratio - bound), abs(ratio - 1)) > 1e-9)

    def objective(s):
        return cross_objective(s, vector([advantage]), vector([weight]), alpha, bound)

    value, gradient = slope(objective, ratio)
    expected = min(ratio, 1.0) ** alpha * weight * advantage if bound < ratio < 1 else 0.0
    assert math.isclose(gradient, expected, rel_tol=1e-9)
    # Damping and clipping to at most 1: no peer's rollout counts for more than its weight and advantage.
    assert abs(value) <= weight * abs(advantage) * max(1.0, bound) + 1e-12


@given(st.floats(0, 1), st.floats(0, 0.2), st.integers(0, 50))
def test_the_lower_bound_rises_by_updates_and_stays_at_most_1(delta, delta_step, update):
    now, later = (cross_lower_bound(delta, delta_step, m) for m in (update, update + 1))
    assert 1 - delta <= now <= later <= 1


@given(st.floats(-3, 0), st.floats(0, 3), st.floats(0, 3))
def test_the_larger_alpha_the_less_an_unlikely_rollout_counts(log_ratio, alpha, more):
    values = [
        float(cross_objective(vector([log_ratio]).exp(), vector([1.0]), vector([1.0]), a, None))
        for a in (alpha, alpha + more)
    ]
    assert values[1] <= values[0] + 1e-12


@given(st.lists(LOG_RATIOS, min_size=1, max_size=4), st.sampled_from([-1.0, 1.0]), st.floats(0, 3))
def test_objectives_and_gradients_of_extreme_ratios_are_finite(log_ratios, advantage, alpha):
    """In float32, as in training, and down to the log-probabilities."""
    for normalization in ("source", "own"):
        logps = torch.tensor(log_ratios, requires_grad=True)
        ones = torch.ones(len(log_ratios))
        ratio = sequence_log_ratio(logps, ones * 0, ones, ones, normalization).exp()
        own = own_objective(ratio, advantage * ones, 0.2, 0.3)
        cross = cross_objective(ratio, advantage * ones, ones, alpha, 0.2)
        unclipped = cross_objective(ratio, advantage * ones, ones, alpha, None)
        kl = kl_to_reference(logps, ones * 0, ones.bool())
        (gradient,) = torch.autograd.grad((own + cross + unclipped + kl).sum(), logps)
        assert all(values.isfinite().all() for values in (own, cross, unclipped, kl, gradient))


@given(st.lists(st.floats(-500, 0), min_size=1, max_size=4), st.lists(st.integers(1, 50), min_size=4, max_size=4))
def test_normalizations_agree_where_the_counts_do(sums, counts):
    new, old = vector(sums), vector(sums[::-1])
    tokens = torch.tensor(counts[: len(sums)])
    by_source, by_own = (sequence_log_ratio(new, old, tokens, tokens, n) for n in ("source", "own"))
    torch.testing.assert_close(by_source, by_own)
    torch.testing.assert_close(by_source, ((new - old) / tokens).clamp(max=MAX_LOG_RATIO))


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.integers(0, 3), ADVANTAGES)
def test_padding_does_not_change_a_rows_objective(log_ratios, padding, advantage):
    def objective(pad):
        ratio = torch.cat([vector(log_ratios), vector([7.0] * pad)]).exp()[None]
        mask = torch.arange(ratio.shape[1])[None] < len(log_ratios)
        return token_objective(ratio, mask, vector([advantage]), 0.2, 0.28)

    torch.testing.assert_close(objective(padding), objective(0))


@given(st.floats(-30, 30), st.floats(-30, 30))
def test_kl_is_never_negative_and_0_where_policies_agree(logp, ref_logp):
    mask = torch.ones(1, dtype=torch.bool)
    assert float(kl_to_reference(vector([logp]), vector([ref_logp]), mask)) >= -1e-12
    assert float(kl_to_reference(vector([logp]), vector([logp]), mask)) == 0
    assert float(kl_to_reference(vector([logp]), vector([ref_logp]), ~mask)) == 0


@given(
    st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=5),
    st.sampled_from(["token", "sequence"]),
    st.one_of(st.none(), st.floats(0.1, 0.9)),
    st.one_of(st.none(), st.floats(1.1, 4)),
)
def test_weights_for_the_sampler_stay_within_their_bounds(pairs, level, low, high):
    """Truncated and masked weights agree where nothing lies beyond a bound; a masked one is then 0."""
    logps, sampler_logps = (vector(values) for values in zip(*pairs, strict=True))
    assume(low is not None or high is not None)
    truncated, masked = (
        sampler_weights(logps, sampler_logps, f"{level}_{mode}", low, high) for mode in ("truncate", "mask")
    )
    least, most = (-math.inf if low is None else low), (math.inf if high is None else high)
    assert ((truncated >= least) & (truncated <= most)).all()
    assert ((masked == 0) | (masked == truncated)).all()
    differences = logps - sampler_logps
    ratio = (differences if level == "token" else differences.sum().expand_as(differences)).exp()
    within = (ratio >= least) & (ratio <= most)
    torch.testing.assert_close(masked, torch.where(within, ratio, 0))
