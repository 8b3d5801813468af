"""The prompts of a run: what every agent can answer, for training and for evaluation."""

from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset, IterableDataset

from .agent import Agent
from .config import HACPOConfig
from .evaluation.benchmarks import filter_long_prompts
from .options.step import StepPlan


def training_prompts(
    dataset: Dataset | IterableDataset | None, agents: Mapping[str, Agent], args: HACPOConfig, plan: StepPlan
) -> Dataset | IterableDataset | None:
    """The dataset without prompts that are too long for one of the agents; of a stream they are left out as they come.

    Raises:
        ValueError: if there are too few prompts for a step, or settings that a stream cannot have.
    """
    if isinstance(dataset, IterableDataset):
        if args.max_steps <= 0:
            raise ValueError("train_dataset is a stream (IterableDataset), whose length nobody knows: set max_steps.")
        if args.dataloader_num_workers > 0:
            raise ValueError("A stream (IterableDataset) is read by one process: set dataloader_num_workers to 0.")
        # Rows hold texts, which Accelerate's main process could not deal out.
        args.accelerator_config.dispatch_batches = False
        return dataset
    if dataset is None:
        return None
    dataset = filter_long_prompts(dataset, agents, "train_dataset")
    if len(dataset) < plan.prompts:
        raise ValueError(
            f"train_dataset has {len(dataset)} prompts, but one step takes prompts_per_step={plan.prompts}."
        )
    return dataset


def usable_prompts(
    dataset: Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset] | None, agents: Mapping[str, Agent]
) -> Dataset | dict[str, Dataset] | None:
    """A dataset for evaluation, or each of several, without the prompts that are too long for one of the agents.

    Streams are read to their end.
    """

    def usable(part: Dataset | IterableDataset, name: str) -> Dataset:
        if isinstance(part, IterableDataset):
            part = Dataset.from_list(list(part))
        return filter_long_prompts(part, agents, name)

    if isinstance(dataset, Mapping):
        return {name: usable(part, f"eval_dataset['{name}']") for name, part in dataset.items()}
    return None if dataset is None else usable(dataset, "eval_dataset")


def fits_all(agents: Mapping[str, Agent]) -> Callable[[dict[str, Any]], bool]:
    """Tells of a row whether its prompt is short enough for every agent."""

    def fits(row: dict[str, Any]) -> bool:
        return all(len(agent.encode_prompt(row["prompt"])) <= agent.max_prompt_length for agent in agents.values())

    return fits
