import itertools
import math

import numpy as np
import pytest

from hacpo_trl.reporting.statistics import factorial_effects, holm, paired_difference, student_quantile, t_interval


@pytest.mark.parametrize(
    ("confidence", "degrees_of_freedom", "tabulated"),
    # Any printed table of Student's t; two-sided 95 % is the column 0.975.
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 3, 3.182),
        (0.95, 4, 2.776),
        (0.95, 5, 2.571),
        (0.95, 9, 2.262),
        (0.95, 10, 2.228),
        (0.95, 30, 2.042),
        (0.95, 120, 1.980),
        (0.99, 4, 4.604),
        (0.90, 7, 1.895),
        (0.50, 1, 1.000),
    ],
)
def test_students_quantiles_are_the_tabulated_ones(confidence, degrees_of_freedom, tabulated):
    assert student_quantile(confidence, degrees_of_freedom) == pytest.approx(tabulated, abs=5.1e-4)


def test_students_quantiles_have_the_known_closed_forms():
    for confidence in (0.2, 0.8, 0.95, 0.999):
        # Cauchy, and two degrees of freedom: P(|T| < t) = t / √(2 + t²).
        assert student_quantile(confidence, 1) == pytest.approx(math.tan(confidence * math.pi / 2), rel=1e-9)
        expected = confidence * math.sqrt(2 / (1 - confidence**2))
        assert student_quantile(confidence, 2) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match="between 0 and 1, not 95"):
        student_quantile(95, 4)
    with pytest.raises(ValueError, match="at least 1 degree of freedom, not 0"):
        student_quantile(0.95, 0)


def test_interval_by_hand():
    # Mean 3, variance (4 + 1 + 0 + 1 + 4) / 4 = 2.5, standard error √(2.5 / 5) = 0.7071, times 2.7764.
    estimate = t_interval([1, 2, 3, 4, 5])
    assert estimate.value == 3
    assert estimate.low == pytest.approx(3 - 1.96324, abs=1e-5)
    assert estimate.high == pytest.approx(3 + 1.96324, abs=1e-5)
    with pytest.raises(ValueError, match="at least 2 seeds, not 1"):
        t_interval([1.0])


def test_interval_covers_the_truth_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(7.0, 3.0, (4000, 5))
    covered = np.mean([estimate.low < 7.0 < estimate.high for estimate in map(t_interval, draws)])
    # ± 3 standard errors; the normal distribution's 1.96 would cover 88 %.
    assert covered == pytest.approx(0.95, abs=0.0104)


def test_difference_is_paired():
    # The seeds differ by far more than the methods do: 0.1, 0.2, 0.3. Standard error 0.1 / √3, times 4.3027.
    estimate = paired_difference([1.1, 5.2, 9.3], [1.0, 5.0, 9.0])
    assert estimate.value == pytest.approx(0.2)
    assert estimate.high - estimate.value == pytest.approx(0.248414, abs=1e-6)
    with pytest.raises(ValueError, match="not 2 and 3"):
        paired_difference([1, 2], [1, 2, 3])


def test_factorial_effects_by_hand():
    # y = 10 + 3a + 1b + 2ab with a, b of 0 or 1, and seeds that shift everything.
    responses = {
        (False, False): [10, 20],
        (True, False): [13, 23],
        (False, True): [11, 21],
        (True, True): [16, 26],
    }
    effects = factorial_effects(responses)
    # a: (3 + 5) / 2, b: (1 + 3) / 2, ab: half of 5 − 3. The seeds' shift is in none of them.
    assert {subset: effect.value for subset, effect in effects.items()} == {(0,): 4, (1,): 2, (0, 1): 1}
    assert all(effect.low == effect.value == effect.high for effect in effects.values())


def test_factorial_effects_are_a_regressions_coefficients():
    rng = np.random.default_rng(1)
    combinations = list(itertools.product((False, True), repeat=4))
    values = rng.normal(size=(16, 6))
    # Any order of the combinations will do.
    order = rng.permutation(16)
    effects = factorial_effects({combinations[i]: values[i] for i in order})
    assert len(effects) == 4 + 6
    signs = np.where(np.array(combinations), 1.0, -1.0)
    columns = {
        subset: signs[:, list(subset)].prod(1)
        for size in range(5)
        for subset in itertools.combinations(range(4), size)
    }
    coefficients = np.stack([2 * np.linalg.solve(np.stack(list(columns.values()), 1), values[:, s]) for s in range(6)])
    for subset, effect in effects.items():
        expected = t_interval(coefficients[:, list(columns).index(subset)])
        assert (effect.value, effect.low, effect.high) == pytest.approx((expected.value, expected.low, expected.high))


def test_a_design_that_is_not_full_is_an_error():
    with pytest.raises(ValueError, match="has 4 combinations; 3 were given, 1 are missing"):
        factorial_effects({(False, False): [1, 2], (True, False): [1, 2], (False, True): [1, 2]})


def test_holm_by_hand():
    # 5 seeds, so 4 degrees of freedom. |t| = 3, 10, 0, 4 by construction; of 4 comparisons the largest is compared
    # with 4.315 (98.75 %), then with 3.961 (98.33 %), 3.495 (97.5 %), 2.776 (95 %).
    spread = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    error = spread.std(ddof=1) / math.sqrt(5)
    family = [list(spread + t * error) for t in (3.0, -10.0, 0.0, 4.0)]
    assert holm(family) == [False, True, False, True]
    # Alone each would be judged by 2.776; behind one that fails none is named.
    assert holm(family[:1]) == [True]
    assert holm([list(spread + 4.2 * error)] * 4) == [False] * 4
    assert holm([[0.1] * 3, [0.0] * 3]) == [True, False]
