"""What the theorems promise, by numbers: the example's own functions on smaller problems, and what follows by hand."""

import pytest
import torch

from hacpo_trl.reporting.tables import Table
from hacpo_trl.theory import baselines, gradients


# ---- the baseline (Theorem 4.1) -------------------------------------------------------------------------------------
@pytest.mark.parametrize("learner", [0, 1])
def test_with_a_window_of_one_the_mean_baseline_is_the_learners_mean_reward(learner):
    """An identity, step by step: ω^(k,j) P^(j) = P^(k)."""
    generator = torch.Generator().manual_seed(0)
    success = baselines.population("complementary", 32)
    rewards = (torch.rand(32, 2, 8, generator=generator, dtype=torch.float64) < success[..., None]).double()
    means = rewards.mean((0, 2))
    baseline = baselines.baseline("capability, no fallback", rewards, learner, means[learner] / means)
    assert baseline.mean().item() == pytest.approx(means[learner].item(), abs=1e-12)
    # Pooling is off by half the difference between the agents.
    pooled = baselines.baseline("pooled", rewards, learner, means[learner] / means)
    gap = (means[1 - learner] - means[learner]) / 2
    assert abs(gap) > 0.04 and (pooled.mean() - means[learner]).item() == pytest.approx(gap.item(), abs=1e-12)


@pytest.mark.parametrize("window", [1, 5])
def test_averaged_over_prompts_the_capability_aware_baseline_is_unbiased(window):
    success = baselines.population("complementary")
    names = ["pooled", "capability, no fallback"]
    errors = baselines.simulate(success, names, window=window, steps=300)
    for learner in (0, 1):
        e = errors["capability, no fallback", learner]
        assert abs(e.mean) < 4 * e.standard_error < 0.012
        expected = float(success[:, 1 - learner].mean() - success[:, learner].mean()) / 2
        pooled = errors["pooled", learner]
        assert pooled.mean == pytest.approx(expected, abs=4 * pooled.standard_error) and abs(expected) > 0.07


def test_prompt_by_prompt_it_is_not():
    """The bias on a prompt is (1/n) Σ_j ω^(k,j) p_j(q) − p_k(q): 0 where success is proportional, else not."""
    success = baselines.population("complementary")
    errors = baselines.simulate(success, ["capability, no fallback", "pooled", "own"], window=20, steps=300)
    for learner in (0, 1):
        mean = success.mean(0)
        scaled = (success * mean[learner] / mean).mean(1)
        expected = float(((scaled - success[:, learner]) ** 2).mean().sqrt())
        assert errors["capability, no fallback", learner].bias == pytest.approx(expected, abs=0.01) and expected > 0.2
        assert errors["own", learner].bias < 0.01
    # For the stronger agent it is even further off than the pooled mean.
    assert errors["capability, no fallback", 1].bias > errors["pooled", 1].bias + 0.03
    proportional = baselines.simulate(baselines.population("proportional"), ["capability, no fallback"], steps=300)
    assert all(e.bias < 0.02 for e in proportional.values())


def test_the_fallback_lowers_the_stronger_agents_baseline():
    errors = baselines.simulate(baselines.population("same order"), ["capability"], steps=300)
    stronger, weaker = errors["capability", 1], errors["capability", 0]
    assert stronger.mean < -10 * stronger.standard_error and stronger.mean == pytest.approx(-0.037, abs=0.006)
    assert abs(weaker.mean) < 4 * weaker.standard_error


def test_a_long_window_lags_behind_a_learner_that_improves():
    """P̂ of K steps is (K − 1)/2 steps old on average, and half of the baseline is the peer's mean, scaled by it: with
    a gain of .005 a step the bias is −.005·(K − 1)/2·1/2."""
    for window in (1, 5, 20):
        expected = -0.005 * (window - 1) / 2 / 2
        assert baselines.improving_learner(window, runs=40) == pytest.approx(expected, abs=0.003)


def test_shrinkage_errs_less_than_capability_and_own():
    """In rms error to the learner's success probability, in every population, for both agents but for the weaker one
    where both find the same prompts hard: there it is as good as the capability-aware baseline."""
    for kind in ("proportional", "same order", "complementary"):
        errors = baselines.simulate(baselines.population(kind), ["capability", "own", "shrinkage"], steps=200)
        for learner in (0, 1):
            rmse = {name: errors[name, learner].rmse for name in ("capability", "own", "shrinkage")}
            assert rmse["shrinkage"] < min(rmse["own"], rmse["capability"] + 0.005)
            assert abs(errors["shrinkage", learner].mean) < 0.015
    # Where the agents are good at different things its bias on a prompt is a fraction of the others'.
    assert all(errors["shrinkage", k].bias < errors["capability", k].bias / 3 for k in (0, 1))


# ---- gradients on peers' rollouts (Theorem 4.3) ---------------------------------------------------------------------
def test_own_gradient_by_hand():
    """One prompt, answers of probability .5, .3, .2, the first right. ∂J/∂z_y = π_y (A_y − E_π A), whatever the
    baseline; divided by σ."""
    learner = torch.tensor([[[0.5, 0.3, 0.2]]], dtype=torch.float64).log()
    rewards = torch.tensor([[[1.0, 0.0, 0.0]]], dtype=torch.float64)
    features = torch.eye(3, dtype=torch.float64).view(1, 3, 3)
    pairs = gradients.Pairs(learner.view(1, 3), features, torch.tensor([[[0.7, 0.2, 0.1]]]).double().log(), rewards)
    own, cross = gradients.gradients(pairs, gradients.CrossSettings(1, alpha=0.0, clip=False))
    # Pooled success (.5 + .7)/2 = .6: σ = √(.6·.4).
    scale = 0.24**0.5 + 1e-4
    expected = torch.tensor([[0.5 * 0.5, -0.3 * 0.5, -0.2 * 0.5]], dtype=torch.float64) / scale
    torch.testing.assert_close(own, expected)
    # α = 0, |y| = 1: plain importance sampling, weighted by ω^(j,k) = .7/.5.
    torch.testing.assert_close(cross, 1.4 * expected)


def test_clipping_and_damping_by_hand():
    """The same with α = 1 and clipping: of s = 5/7, 3/2 and 2 only the first stays, with weight s²·ω·π_j·A, and moves
    the learner by ∇log π = e_1 − π."""
    learner, source = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.7, 0.2, 0.1]).double()
    rewards = torch.tensor([[[1.0, 0.0, 0.0]]], dtype=torch.float64)
    features = torch.eye(3, dtype=torch.float64).view(1, 3, 3)
    pairs = gradients.Pairs(learner.log()[None], features, source.log().view(1, 1, 3), rewards)
    _, cross = gradients.gradients(pairs, gradients.CrossSettings(1))
    # The baseline is (.5 + 5/7·.7)/2 = .5.
    advantage = 0.5 / (0.24**0.5 + 1e-4)
    push = 0.7 * (5 / 7) ** 2 * 1.4 * advantage
    torch.testing.assert_close(cross, push * (torch.tensor([[1.0, 0, 0]]).double() - learner))


@pytest.mark.parametrize("shared", [False, True])
def test_plain_importance_sampling_gives_the_own_gradient_whatever_the_confidence(shared):
    """τ = 1: one token, α = 0."""
    own, cross = gradients.gradients(
        gradients.random_pairs(100, shared), gradients.CrossSettings(1, alpha=0.0, clip=False)
    )
    cosine = torch.nn.functional.cosine_similarity(own, cross)
    torch.testing.assert_close(cosine, torch.ones_like(cosine))


def test_confidence_counts_for_more_in_long_answers_and_for_less_in_short_ones():
    """e^{(1−τ)c}: the first-order change of the right answers' share in the gradient has the sign of (1 − τ)·c."""
    learner = torch.tensor([[[0.4, 0.4, 0.2]]], dtype=torch.float64).log()
    source = torch.tensor([[[0.5, 0.3, 0.2]]], dtype=torch.float64).log()
    rewards = torch.tensor([[[1.0, 1.0, 0.0]]], dtype=torch.float64)
    pairs = gradients.Pairs(learner.view(1, 3), torch.eye(3, dtype=torch.float64).view(1, 3, 3), source, rewards)
    for tokens, confident_first in ((1, False), (8, True)):
        _, cross = gradients.gradients(pairs, gradients.CrossSettings(tokens, clip=False))
        assert bool(cross[0, 0] > cross[0, 1]) == confident_first


def test_unclipped_gradients_of_separate_prompts_agree_whatever_the_correlation():
    """With a parameter of its own for each answer the inner product was positive for every one of the pairs, also
    where ρ < 0: the assumption is not needed there."""
    pairs = gradients.random_pairs(1000, shared=False)
    rho = gradients.confidence_correlation(pairs.log_learner(pairs.parameters), pairs.log_source, pairs.rewards)
    assert 0.4 < (rho > 0).double().mean() < 0.6
    for tokens in (1, 8):
        own, cross = gradients.gradients(pairs, gradients.CrossSettings(tokens, clip=False))
        assert ((own * cross).sum(-1) > 0).all()


def test_a_positive_correlation_does_not_guarantee_agreement():
    """With shared parameters and HACPO's clipping there are counterexamples, few where ρ > 0 and more where ρ < 0."""
    pairs = gradients.random_pairs(2000, shared=True)
    rho = gradients.confidence_correlation(pairs.log_learner(pairs.parameters), pairs.log_source, pairs.rewards)
    own, cross = gradients.gradients(pairs, gradients.CrossSettings(64))
    opposed = (own * cross).sum(-1) < 0
    where_positive, where_negative = opposed[rho > 0].double().mean(), opposed[rho < 0].double().mean()
    assert 0 < where_positive < where_negative < 0.2
    assert 0.5 < gradients.separation(rho, ~opposed) < 0.75


def test_correlation_and_its_logged_estimate():
    """ρ by hand: π_j = .6, .4 against π_k = .5, .5, the first right: two answers, so c is a straight line in R."""
    learner, source = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.6, 0.4]]).double().log()
    rewards = torch.tensor([[1.0, 0.0]]).double()
    assert gradients.confidence_correlation(learner, source, rewards).item() == pytest.approx(1.0)
    assert gradients.confidence_correlation(learner, source, 1 - rewards).item() == pytest.approx(-1.0)

    pairs = gradients.random_pairs(20, shared=False)
    generator = torch.Generator().manual_seed(0)
    log_learner = pairs.log_learner(pairs.parameters)
    exact = gradients.confidence_correlation(log_learner, pairs.log_source, pairs.rewards)
    for row, expected in enumerate(exact):
        logged = gradients.logged_alignment(
            log_learner[row], pairs.log_source[row], pairs.rewards[row], 8, 2000, generator
        )
        assert logged == pytest.approx(expected.item(), abs=0.06)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tokens", "agree"), [(1, (0.28, 0.45)), (8, (0.6, 0.75)), (64, (0.6, 0.75))])
def test_assumption_d12_makes_the_theorem_immediate_and_its_proxy_is_another_thing(shared, tokens, agree):
    pairs, settings = gradients.random_pairs(2000, shared), gradients.CrossSettings(tokens, clip=False)
    rho, inner = gradients.assumption_correlation(pairs, settings)
    assert (inner[rho > 0] > 0).all() and 0.4 < (rho > 0).double().mean() < 0.6
    proxy = gradients.confidence_correlation(pairs.log_learner(pairs.parameters), pairs.log_source, pairs.rewards)
    assert agree[0] < ((proxy > 0) == (rho > 0)).double().mean() < agree[1]
    if shared:  # where ρ(C, Z) < 0 the gradients mostly agree all the same
        assert 0.9 < (inner[rho < 0] > 0).double().mean() < 1


def test_assumption_d12_is_of_the_gradients_that_the_objective_has():
    """E[C Z] is the inner product of the exact gradients where nothing is clipped and nothing dampened away: α = 0."""
    pairs, settings = gradients.random_pairs(50, shared=True), gradients.CrossSettings(8, alpha=0.0, clip=False)
    _, inner = gradients.assumption_correlation(pairs, settings)
    own, cross = gradients.gradients(pairs, settings)
    # These are sums over prompts, of sums over tokens over |y|.
    scale = (settings.tokens / pairs.rewards.shape[1]) ** 2
    torch.testing.assert_close(inner, (own * cross).sum(-1) * scale)


def test_separation_by_hand():
    # Of the pairs (positive, negative) 3 of 4 are in order: (2, 1), (4, 1), (4, 3), not (2, 3).
    score, positive = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([False, True, False, True])
    assert gradients.separation(score, positive) == 0.75


def test_tables_as_markdown():
    result = Table(["of", "|y|", "mean"], [["one", "1", "0.5"]], title="a title")
    expected = "**a title**\n\n| of | \\|y\\| | mean |\n| --- | ---: | ---: |\n| one | 1 | 0.5 |\n"
    assert result.markdown() == expected
