"""What `hacpo train` trains on: from the script's arguments to datasets and reward functions."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset

from .. import rewards
from ..config import HACPOConfig
from ..embedded import conv_dataset, conv_reward
from ..evaluation.benchmarks import BENCHMARKS, LOCAL_FORMATS, load_problems
from ..options.names import unknown_name
from ..rewards import math_reward
from ..rewards.verification import RewardFunction
from .train_options import ScriptArguments


# A dataset to train on, one to evaluate on, and what answers are worth.
Task = tuple[Dataset | IterableDataset, Dataset | None, RewardFunction | Sequence[RewardFunction]]

# The ready-made rewards by the names that recipes have for them: math is `hacpo_trl.rewards.math_reward`.
REWARDS = {
    name.removesuffix("_reward"): getattr(rewards, name) for name in rewards.__all__ if name.endswith("_reward")
} | {"conv": conv_reward}

DATASET_OPTIONS = (
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "dataset_columns",
    "test_dataset_name",
)


def load_task(script_args: ScriptArguments, training_args: HACPOConfig) -> Task:
    """The datasets and reward functions that the arguments ask for; `reward_funcs` replace the task's own."""
    name = script_args.task
    own_rewards = [reward_function(reward) for reward in script_args.reward_funcs or []]
    if name is None:
        train, test, reward_funcs = _dataset(script_args)
    elif name in TASKS:
        train, test, reward_funcs = TASKS[name](script_args, training_args)
    elif ":" in name:
        train, test, reward_funcs = _own_task(name, script_args, training_args)
    else:
        raise ValueError(f"{unknown_name(name, list(TASKS), 'task')} A task of one's own is 'module:function'.")
    return train, test, own_rewards or reward_funcs


def _refuse(script_args: ScriptArguments, names: Sequence[str], where: str):
    for name in names:
        if getattr(script_args, name) is not None:
            raise ValueError(f"{name}={getattr(script_args, name)!r} has no effect {where}. Leave it out.")


# ---- tasks ----------------------------------------------------------------------------------------------------------
def conv_task(script_args: ScriptArguments, training_args: HACPOConfig) -> Task:
    """The embedded tasks: three symbols, their three digits, or those in words (see `hacpo_trl.embedded`)."""
    _refuse(script_args, DATASET_OPTIONS, f"with task '{script_args.task}', which makes its prompts itself")
    words = script_args.task == "conv_words"
    train = conv_dataset("train", script_args.train_size or 5000, training_args.seed, words)
    return train, conv_dataset("test", script_args.test_size or 512, words=words), conv_reward


def math_task(script_args: ScriptArguments, training_args: HACPOConfig) -> Task:
    """Problems asked for step by step with a boxed answer, which is compared as mathematics with the gold answer."""
    train_name, test_names = script_args.dataset_name, script_args.test_dataset_name
    if train_name is None:
        raise ValueError("task 'math' needs dataset_name, such as math_train.")
    if test_names is None and script_args.dataset_test_split is None:
        raise ValueError(
            "task 'math' needs held-out problems: test_dataset_name, such as math500, or dataset_test_split."
        )
    if all(name in BENCHMARKS for name in (train_name, *(test_names or []))):
        _refuse(script_args, ["dataset_columns"], "on benchmarks, whose columns are known")

    def load(name: str, split: str | None, size: int | None) -> Dataset:
        columns = None if name in BENCHMARKS else script_args.dataset_columns
        return load_problems(name, split, script_args.dataset_config, columns, max_rows=size)

    train = load(train_name, script_args.dataset_train_split, script_args.train_size)
    tests = [load(name, script_args.dataset_test_split, script_args.test_size) for name in test_names or [train_name]]
    return train, concatenate_datasets(tests), math_reward


TASKS: dict[str, Callable[[ScriptArguments, HACPOConfig], Task]] = {
    "conv": conv_task,
    "conv_words": conv_task,
    "math": math_task,
}


def _own_task(name: str, script_args: ScriptArguments, training_args: HACPOConfig) -> Task:
    made = import_object(name, "task")(script_args, training_args)
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        raise ValueError(
            f"task '{name}' must return a dataset to train on, one to evaluate on or None, and the reward functions, "
            f"not {made!r:.80}."
        )
    train, test, reward_funcs = made
    if not isinstance(train, Dataset | IterableDataset) or not isinstance(test, Dataset | None):
        raise ValueError(
            f"task '{name}' must return datasets.Dataset objects, to evaluate on also None, not "
            f"{type(train).__name__} and {type(test).__name__}."
        )
    return train, test, reward_funcs


def _dataset(script_args: ScriptArguments) -> Task:
    """A dataset as it is: its column `prompt` is answered, and its others go to the reward functions."""
    if script_args.dataset_name is None:
        raise ValueError(
            "there is nothing to train on: give a task (conv_words, math, module:function) or dataset_name."
        )
    if not script_args.reward_funcs:
        raise ValueError(
            "dataset_name without a task needs reward_funcs, such as [math]. Problems with answers to be boxed are "
            "the task 'math'."
        )
    _refuse(script_args, ["dataset_columns"], "without task 'math'")
    train = _load(script_args.dataset_name, script_args.dataset_train_split, "train", script_args)
    train = _first(train, script_args.train_size)
    tests = script_args.test_dataset_name
    if tests is None and script_args.dataset_test_split is None:
        return train, None, []
    split = script_args.dataset_test_split
    loaded = [_load(name, split, "test", script_args) for name in tests or [script_args.dataset_name]]
    return train, concatenate_datasets([_first(test, script_args.test_size) for test in loaded]), []


def _load(name: str, split: str | None, default_split: str, script_args: ScriptArguments) -> Dataset:
    if name in BENCHMARKS:
        return load_problems(name, split)
    suffix = Path(name).suffix
    if suffix in LOCAL_FORMATS:
        if split is not None:
            raise ValueError(f"{name} is a local file: it has no split {split!r}. Leave it out.")
        if not Path(name).is_file():
            raise ValueError(f"There is no file {name}.")
        of_file = {".jsonl": Dataset.from_json, ".parquet": Dataset.from_parquet}[suffix]
        dataset = of_file(name)
    elif "/" in name:
        dataset = load_dataset(name, script_args.dataset_config, split=split or default_split)
    else:
        raise ValueError(
            f"{name!r} is no benchmark, no id of a dataset (owner/name) and no {' or '.join(LOCAL_FORMATS)} file. The "
            f"benchmarks are: {', '.join(BENCHMARKS)}."
        )
    if "prompt" not in dataset.column_names:
        raise ValueError(
            f"{name} has no column 'prompt'; it has {dataset.column_names}. Problems and answers are the task 'math'."
        )
    return dataset


def _first(dataset: Dataset, size: int | None) -> Dataset:
    return dataset if size is None else dataset.select(range(min(size, len(dataset))))


# ---- reward functions -----------------------------------------------------------------------------------------------
def reward_function(name: str) -> RewardFunction:
    """A reward function as a recipe names it: a ready-made one, an import path, or a reward model."""
    if (ready := name.removesuffix("_reward")) in REWARDS:
        return REWARDS[ready]
    if "/" in name or Path(name).is_dir():
        return name
    if "." in name or ":" in name:
        return import_object(name, "reward_funcs")
    raise ValueError(
        f"reward_funcs: {unknown_name(name, list(REWARDS), 'reward')} One of one's own is an import path, such as "
        "my_rewards.length_penalty; a reward model is an id (owner/name) or a folder."
    )


def import_object(path: str, option: str) -> Callable[..., Any]:
    """What `module:name` or `module.name` names; modules are looked for in the current directory, too.

    Args:
        path: The import path.
        option: The option that it was given as, for errors.
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # One that the module itself imports is another matter.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{option}: there is no module {module_name!r} for {path!r}, neither installed nor in {os.getcwd()}."
        ) from error
    if not callable(found := getattr(module, name, None)):
        known = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        raise ValueError(f"{option}: {module_name} has no such function: {unknown_name(name, known, 'function')}")
    if isinstance(found, type):
        raise ValueError(f"{option}: {path} is a class. Name a function, or an object that can be called like one.")
    return found
