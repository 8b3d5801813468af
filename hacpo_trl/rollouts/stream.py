"""Prompts from a stream: the counterpart of `StepSampler` for datasets that cannot be indexed."""

from collections.abc import Callable, Sequence
from typing import Any

from datasets import IterableDataset


def stream_of_steps(
    dataset: IterableDataset,
    layout: Sequence[int],
    repeats: int,
    seed: int | None,
    fits: Callable[[dict[str, Any]], bool],
) -> IterableDataset:
    """The prompts of each step, repeated for every micro-batch of the step's updates.

    The whole permutation of a dataset becomes a buffered shuffle, as in TRL. A last step that is not full is left out.

    Args:
        dataset: Rows with a column `prompt`.
        layout: In which order a step's prompts are dealt; see `step_layout`.
        repeats: Micro-batches of a step.
        seed: Seed of the shuffling; None keeps the order of the stream.
        fits: Whether a row's prompt is short enough for all agents.
    """

    def step(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {
            key: [values[position] for _ in range(repeats) for position in layout] for key, values in batch.items()
        }

    if seed is not None:
        dataset = dataset.shuffle(seed=seed)
    return dataset.filter(fits).map(step, batched=True, batch_size=len(layout), drop_last_batch=True)
