"""Metrics of an evaluation with n samples of each problem, and their uncertainty.

For one problem with rewards r_1..r_n, of which c are right (1), and k <= n:

- avg@k   the mean reward. Its expectation does not depend on k, so all n samples count.
- pass@k  the probability that k of the n samples hold a right one, 1 - C(n-c, k) / C(n, k): the unbiased estimator of
          Chen et al. 2021 (arXiv 2107.03374), which the naive 1 - (1 - c/n)^k is not.
- best@k  the expected largest reward of k of the n samples, pass@k where rewards are 0 or 1. With k = n it is the
          largest reward: best@30 of 30 samples, as the paper reports AIME.
- maj@k   whether the most frequent answer of k samples is right. Answers that are equal as mathematics vote together;
          a sample without an answer does not vote. Where several answers lead, the score is the mean over them, the
          expectation of drawing one. Without any vote it is 0. With n > k it is the mean over consecutive blocks of k
          samples; what is left of the last block does not count.

A benchmark's value is the mean over its problems. Its interval is a percentile bootstrap over problems, not over
samples: another draw of problems is what a reader wants to know about. Two models are compared on the same resampled
problems, which removes the part of the uncertainty that the problems' difficulty makes.
"""

import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from ..reporting.statistics import Estimate


NUM_RESAMPLES = 10_000
# Resamples drawn at a time: 1,000 x 7,500 problems are 60 MB.
CHUNK = 1_000
BOOTSTRAP_SEED = 0
# A reward of 1 is a right answer; rounding may have made it a little less.
RIGHT = 1 - 1e-6

Kind = Literal["avg", "pass", "best", "maj"]
METRIC = re.compile(r"(avg|pass|best|maj)@([1-9]\d*)")


@dataclass(frozen=True)
class Metric:
    """A metric and its k, such as best@30.

    Attributes:
        kind: Which metric.
        k: Samples of a problem that it speaks about.
    """

    kind: Kind
    k: int

    @classmethod
    def parse(cls, text: str) -> "Metric":
        match = METRIC.fullmatch(text)
        if match is None:
            raise ValueError(f"A metric is avg@k, pass@k, best@k or maj@k with a number k, not {text!r}.")
        return cls(cast(Kind, match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.kind}@{self.k}"

    def __call__(self, rewards: Sequence[float], groups: Sequence[Hashable | None]) -> float:
        """The metric of one problem.

        Args:
            rewards: The n samples' rewards.
            groups: For each sample what its answer is equal to; None for a sample without an answer.
        """
        if self.k > len(rewards):
            raise ValueError(f"{self} needs {self.k} samples of each problem; there are {len(rewards)}.")
        if self.kind == "avg":
            return float(np.mean(rewards))
        if self.kind == "pass":
            return pass_at_k(len(rewards), sum(reward >= RIGHT for reward in rewards), self.k)
        if self.kind == "best":
            return best_at_k(rewards, self.k)
        blocks = range(0, len(rewards) - self.k + 1, self.k)
        votes = [majority(rewards[start : start + self.k], groups[start : start + self.k]) for start in blocks]
        return float(np.mean(votes))


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that k of n samples, `right` of which are right, hold a right one (Chen et al. 2021, Eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected largest reward of k of the n samples: the i-th smallest is it in C(i - 1, k - 1) of C(n, k) draws."""
    draws = math.comb(len(rewards), k)
    return sum(math.comb(i, k - 1) / draws * reward for i, reward in enumerate(sorted(rewards)))


def best_with_replacement(rewards: Sequence[float]) -> float:
    """best@n of n rewards of 0 or 1 as verl has it: n draws *with replacement*, 1 - (1 - c/n)^n with c right ones.

    It is less than the best of them all.
    """
    return 1 - (1 - sum(rewards) / len(rewards)) ** len(rewards)


def majority(rewards: Sequence[float], groups: Sequence[Hashable | None]) -> float:
    """Reward of the most frequent answer; the mean over the answers that lead, 0 if no sample has an answer."""
    members: dict[Hashable, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        if group is not None:
            members.setdefault(group, []).append(reward)
    if not members:
        return 0.0
    most = max(map(len, members.values()))
    return float(np.mean([np.mean(of_group) for of_group in members.values() if len(of_group) == most]))


def group_equal_answers(
    answers: Sequence[Sequence[str | None]], equal: Callable[[list[tuple[str, str]]], list[bool]]
) -> list[list[int | None]]:
    """Puts the answers to each problem into groups of equal ones.

    Every answer is compared with one representative of each group, the group's most frequent text; of two texts that
    are as frequent, the first. Round by round all problems are compared in one call.

    Args:
        answers: For each problem its samples' answers, None for a sample without one.
        equal: Tells of pairs (representative, answer) whether they are equal.

    Returns:
        For each problem and sample the number of its group, None without an answer.
    """
    group_of: list[dict[str, int]] = [{} for _ in answers]
    waiting = []
    for texts in answers:
        given = [text for text in texts if text is not None]
        # Sorting is stable: of equally frequent texts the first stays first.
        waiting.append(sorted(dict.fromkeys(given), key=lambda text: -given.count(text)))
    number = 0
    while any(waiting):
        pairs = [(texts[0], text) for texts in waiting for text in texts[1:]]
        verdicts = iter(equal(pairs))
        for problem, texts in enumerate(waiting):
            if not texts:
                continue
            group_of[problem][texts[0]] = number
            rest = []
            for text in texts[1:]:
                if next(verdicts):
                    group_of[problem][text] = number
                else:
                    rest.append(text)
            waiting[problem] = rest
        number += 1
    return [
        [None if text is None else numbers[text] for text in texts]
        for texts, numbers in zip(answers, group_of, strict=True)
    ]


def bootstrap(
    values: Sequence[float] | np.ndarray, num_resamples: int = NUM_RESAMPLES, seed: int = BOOTSTRAP_SEED
) -> Estimate:
    """Mean of the problems' values with its 95% percentile bootstrap interval over problems.

    For a paired comparison of two models, `values` are the differences on the same problems.

    Args:
        values: `(P,)`, one value a problem.
        num_resamples: Number of resamples.
        seed: Seed of the resamples; the same one gives the same interval.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers):
        raise ValueError("There is no problem to take a mean over.")
    rng = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    for start in range(0, num_resamples, CHUNK):
        drawn = rng.integers(0, len(numbers), (min(CHUNK, num_resamples - start), len(numbers)))
        means[start : start + len(drawn)] = numbers[drawn].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(numbers.mean()), float(low), float(high))
