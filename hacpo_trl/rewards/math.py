r"""Math reward: 1.0 for a completion whose final answer equals the gold answer, 0.0 for another, None without a gold.

Differs from `trl.rewards.accuracy_reward`: the verdicts come from a pool of processes with a hard limit on each, so
they can be had from any thread and one pathological answer (`\boxed{9^{9^{9^9}}}`) costs its own limit and nothing
else; a gold may be a list of alternatives; what counts as equal is stated in `math_verification`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .worker_pool import ItemFailure, WorkerPool


logger = logging.getLogger(__name__)


def completion_text(completion: str | list[dict]) -> str:
    """Text of a completion: a string, or the content of the last message of a conversation.

    Raises:
        TypeError: the completion is neither.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        content = completion[-1].get("content")
        if isinstance(content, list):  # the parts of a multimodal message
            return "".join(part.get("text") or "" for part in content)
        return content or ""
    raise TypeError(
        f"A completion is {completion!r:.80}, but has to be a string or a list of messages with role and content."
    )


class MathReward:
    r"""Reward function that compares the answer in the last `\boxed{...}` with the gold answer.

    Args:
        strict_boxed: only a boxed answer counts. `False` takes, where there is no box, what follows "answer is", else
            the last formula or number.
        timeout: limit for one answer, in seconds. An answer that exceeds it gets 0.0.
        num_workers: number of processes; `None` for the CPUs this process may use, 8 at most.

    Raises:
        ValueError: `timeout` or `num_workers` is not positive.
    """

    def __init__(self, strict_boxed: bool = True, timeout: float = 5.0, num_workers: int | None = None):
        self.__name__ = "math_reward"
        self.strict_boxed = strict_boxed
        self.timeout = timeout
        self.num_workers = num_workers
        self._pool = WorkerPool(
            Path(__file__).with_name("math_verification.py"),
            ("judge", "gold_is_readable"),
            num_workers=num_workers,
            timeout=timeout,
        )

    def __reduce__(self):
        # Processes stay behind when the trainer sends its reward functions to another process.
        return type(self), (self.strict_boxed, self.timeout, self.num_workers)

    def __call__(
        self,
        completions: Sequence[str | list[dict]],
        answer: list | None = None,
        solution: list | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs,
    ) -> list[float | None]:
        r"""Rewards of a batch of completions.

        Args:
            completions: texts, or conversations whose last message is judged.
            answer: gold answers, one for each completion: an answer (`6`, `$\frac{1}{2}$`, `1,000`, `(1,2]`, `10 cm`),
                a solution that ends in `\boxed{...}` or `#### 42`, or a list of alternatives of which any is right.
            solution: the same, used when the dataset has no column `answer`.
            log_extra: given by the trainer; receives the columns `gold_parsed` and `answer_parsed`.
            log_metric: given by the trainer; receives `math_reward/seconds` and `math_reward/timeouts`.

        Returns:
            1.0 for a right answer, 0.0 for a wrong one or none, `None` (skip) where no gold is readable.

        Raises:
            ValueError: there is neither `answer` nor `solution`, or their number is not that of the completions.
        """
        golds = answer if answer is not None else solution
        if golds is None:
            found = ", ".join(sorted(kwargs)) or "none"
            raise ValueError(
                f"math_reward needs a dataset column 'answer' or 'solution'; the other columns are: {found}."
            )
        if len(golds) != len(completions):
            raise ValueError(f"math_reward got {len(completions)} completions but {len(golds)} gold answers.")
        start = time.perf_counter()
        alternatives = [list(gold) if isinstance(gold, (list, tuple)) else [gold] for gold in golds]
        items = [
            (gold, completion_text(completion), self.strict_boxed)
            for gold, completion in zip(alternatives, completions, strict=True)
        ]
        outcomes = self._pool.map("judge", items)
        failed = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, ItemFailure)]
        if failed:
            # A gold that cannot be read is skipped, also when it is the gold that exceeds the limit.
            readable = self._pool.map("gold_is_readable", [alternatives[index] for index in failed])
            logger.warning(
                "%d of %d answers got no verdict within %.1f s and the memory limit. "
                "The first ends in %r; its gold answer is %.80r.",
                len(failed),
                len(items),
                self.timeout,
                items[failed[0]][1][-80:],
                golds[failed[0]],
            )
            for index, is_readable in zip(failed, readable, strict=True):
                reason = outcomes[index].reason
                outcomes[index] = (0.0 if is_readable is True else None, str(golds[index]), f"[{reason}]")
        if log_extra is not None:
            log_extra("gold_parsed", [gold or "[unreadable]" for _, gold, _ in outcomes])
            log_extra("answer_parsed", [text or "[none]" for _, _, text in outcomes])
        if log_metric is not None:
            log_metric("math_reward/seconds", time.perf_counter() - start)
            log_metric("math_reward/timeouts", float(len(failed)))
        return [reward for reward, _, _ in outcomes]

    def close(self) -> None:
        """End the processes. The next call starts new ones."""
        self._pool.close()


math_reward = MathReward()
