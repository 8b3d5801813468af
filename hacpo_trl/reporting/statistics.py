"""Means over seeds, with intervals: what a few repeated runs of an experiment say.

A run of another seed is another draw of everything: policies, prompts, samples. With five to ten runs the normal
distribution would give intervals that are too narrow, so they are Student's. Methods are compared seed by seed: two
runs of one seed begin with the same policies and the same prompts, and the difference has less noise than either.

`hacpo_trl.evaluation.metrics` has the bootstrap over problems of one evaluation; that is another question.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval.

    Attributes:
        value: The mean.
        low: Lower end of the interval.
        high: Upper end.
    """

    value: float
    low: float
    high: float


def student_central_probability(angle: float, degrees_of_freedom: int) -> float:
    """P(|T| < √ν tan θ) of Student's t with ν degrees of freedom.

    Under t = √ν tan θ the density becomes proportional to cos^(ν−1) θ, whose integral has the recursion

        n ∫ cosⁿ = cos^(n−1) θ sin θ + (n − 1) ∫ cos^(n−2).

    Args:
        angle: θ, in (0, π/2).
        degrees_of_freedom: ν, a whole number from 1 on.
    """

    def integral(n: int, theta: float) -> float:
        value = math.sin(theta) if n % 2 else theta
        for power in range(3 if n % 2 else 2, n + 1, 2):
            value = (math.cos(theta) ** (power - 1) * math.sin(theta) + (power - 1) * value) / power
        return value

    power = degrees_of_freedom - 1
    return integral(power, angle) / integral(power, math.pi / 2)


def student_quantile(confidence: float, degrees_of_freedom: int) -> float:
    """The t with P(|T| < t) = `confidence`: 2.776 for 95 % and 4 degrees of freedom."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}.")
    if degrees_of_freedom < 1:
        raise ValueError(f"Student's t needs at least 1 degree of freedom, not {degrees_of_freedom}.")
    low, high = 0.0, math.pi / 2
    # Each halving gains a binary digit; a double has 53.
    for _ in range(60):
        middle = (low + high) / 2
        if student_central_probability(middle, degrees_of_freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees_of_freedom) * math.tan(low)


def t_interval(values: Sequence[float] | np.ndarray) -> Estimate:
    """The mean of one value a seed, with Student's 95 % interval.

    Raises:
        ValueError: for fewer than two values, which say nothing about their spread.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        raise ValueError(f"An interval needs the values of at least 2 seeds, not {len(numbers)}.")
    half = student_quantile(CONFIDENCE, len(numbers) - 1) * numbers.std(ddof=1) / math.sqrt(len(numbers))
    return Estimate(float(numbers.mean()), float(numbers.mean() - half), float(numbers.mean() + half))


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    """The mean of `values` − `reference`, paired by seed, with Student's 95 % interval."""
    if len(values) != len(reference):
        raise ValueError(f"Pairs need as many values as references, not {len(values)} and {len(reference)}.")
    return t_interval(np.asarray(values, dtype=np.float64) - np.asarray(reference, dtype=np.float64))


def holm(differences: Sequence[Sequence[float]]) -> list[bool]:
    """Which of a family of paired differences are not 0, with at most 5 % that any one of them is named wrongly.

    Holm's step-down procedure ("A simple sequentially rejective multiple test procedure", 1979) over t tests: the
    largest |t| of m is compared with the quantile for 5 % / m, the next one with that for 5 % / (m − 1), and so on
    until one is below.

    Args:
        differences: Of each comparison one value a seed, of the same number of seeds.
    """
    statistic = []
    for values in differences:
        numbers = np.asarray(values, dtype=np.float64)
        error = numbers.std(ddof=1) / math.sqrt(len(numbers))
        statistic.append(abs(numbers.mean()) / error if error else math.inf * bool(numbers.mean()))
    survives = [False] * len(statistic)
    order = sorted(range(len(statistic)), key=lambda index: -np.nan_to_num(statistic[index], posinf=np.inf))
    for rank, index in enumerate(order):
        wanted = student_quantile(1 - (1 - CONFIDENCE) / (len(order) - rank), len(differences[index]) - 1)
        if not statistic[index] > wanted:
            break
        survives[index] = True
    return survives


def factorial_effects(responses: Mapping[tuple[bool, ...], Sequence[float]]) -> dict[tuple[int, ...], Estimate]:
    """Main effects and two-factor interactions of a full 2^k design that every seed went through.

    The main effect of factor a is the mean response with a on, minus that with a off, over all settings of the other
    factors. The interaction of a and b is half of what switching b on adds to a's effect. Both are computed for each
    seed; the intervals are over seeds.

    Args:
        responses: For each of the 2^k combinations of k factors, on or off, its response for each seed, `(S,)`.

    Returns:
        `{(a,): effect, ..., (a, b): interaction, ...}` by the factors' positions, a < b.
    """
    factors = len(next(iter(responses)))
    combinations = list(itertools.product((False, True), repeat=factors))
    if set(responses) != set(combinations):
        raise ValueError(
            f"A full design of {factors} factors has {len(combinations)} combinations; {len(responses)} were given, "
            f"{len(set(combinations) - set(responses))} are missing."
        )
    values = np.array([responses[combination] for combination in combinations], dtype=np.float64)
    signs = np.where(np.array(combinations), 1, -1)
    subsets = [subset for size in (1, 2) for subset in itertools.combinations(range(factors), size)]
    return {
        # Half of the combinations have each sign.
        subset: t_interval(signs[:, subset].prod(axis=1) @ values / (len(combinations) / 2))
        for subset in subsets
    }
