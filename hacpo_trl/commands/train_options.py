"""The options of `hacpo train`: `ScriptArguments` and `HACPOConfig`, from a recipe and from the command line."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser

from ..config import HACPOConfig
from ..options.kinds import converted, kinds_of
from ..options.recipe import read_recipe
from .early_checks import check_keys, unknown_option
from .errors import CommandParser
from .launch_options import is_default, split_recipe


@dataclass
class ScriptArguments:
    """What to train on, and how to look at it."""

    # Whether it is the embedded default that is run, for want of a recipe.
    is_embedded_default: bool = field(default=False, init=False)

    task: str | None = field(
        default=None,
        metadata={
            "help": "'conv_words' and 'conv', the embedded procedural tasks; 'math', problems whose boxed answers are "
            "checked; or 'module:function', a function that is given these arguments and the HACPOConfig, and returns "
            "a dataset to train on, one to evaluate on or None, and the reward functions. Without a task: "
            "dataset_name and reward_funcs."
        },
    )
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "What to train on: a benchmark (math_train, gsm8k_train ...), the id of a dataset on the Hub, or "
            "a .jsonl or .parquet file. Without a task it has a column `prompt`, and its others go to the rewards; "
            "for the task 'math' it has problems and answers."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of an id on the Hub."})
    dataset_train_split: str | None = field(
        default=None, metadata={"help": "Split to train on, of an id. Default: train."}
    )
    dataset_test_split: str | None = field(default=None, metadata={"help": "Split to evaluate on, of an id."})
    dataset_columns: str | None = field(
        default=None,
        metadata={"help": "Columns of the task 'math', if they have other names: problem=question,answer=final."},
    )
    test_dataset_name: list[str] | None = field(
        default=None,
        metadata={"help": "What to evaluate on, one or several. Default: dataset_name's dataset_test_split."},
    )
    train_size: int | None = field(default=None, metadata={"help": "Train on so many prompts at most."})
    test_size: int | None = field(default=256, metadata={"help": "Evaluate on so many held-out prompts at most."})
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions in place of the task's, which is named again to be kept: conv, math, code, "
            "boxed_format, think_format; import paths, such as my_rewards.length_penalty; ids or folders of reward "
            "models."
        },
    )
    resume: bool = field(
        default=False, metadata={"help": "Continue from the last checkpoint in output_dir, if there is one."}
    )


class TrainParser(CommandParser, HfArgumentParser):
    """Both dataclasses' options; what is wrong is said in a line, with the option that was probably meant."""

    def __init__(self):
        super().__init__((ScriptArguments, HACPOConfig), prog="hacpo train", add_help=False)

    @property
    def settings(self) -> list[str]:
        return [field.name for dataclass in self.dataclass_types for field in fields(dataclass) if field.init]

    def set_defaults_of(self, recipe: dict[str, Any], source: Path):
        """Takes a recipe's settings as defaults, which the command line wins over."""
        check_keys(recipe, self.settings, source)
        kinds = {name: kind for of in self.dataclass_types for name, kind in kinds_of(of).items()}
        for action in self._actions:
            if action.dest not in recipe:
                continue
            value = recipe[action.dest]
            if action.nargs == "+" and value is not None and not isinstance(value, list):
                value = [value]
            if action.dest in kinds:
                value = converted(value, kinds[action.dest], f"{source}: {action.dest}")
            action.default, action.required = value, False

    def read(self, argv: Sequence[str]) -> tuple[ScriptArguments, HACPOConfig]:
        values = vars(self.parse_args(list(argv)))
        return tuple(
            dataclass(**{field.name: values[field.name] for field in fields(dataclass) if field.init})
            for dataclass in self.dataclass_types
        )

    def refuse(self, argument: str) -> NoReturn:
        if not argument.startswith("--"):
            super().refuse(argument)
        self.error(unknown_option(argument, self.settings))


def prepared_parser(argv: Sequence[str]) -> tuple[TrainParser, Path | None, list[str]]:
    """A parser with the settings of the recipe as defaults, the recipe, and the rest of the command line.

    The recipe is that of `--config`, or the embedded default. As in TRL, its `env` is a mapping of environment
    variables to set.
    """
    source, rest = split_recipe(argv)
    parser = TrainParser()
    if source is not None:
        recipe = read_recipe(source)
        environment = recipe.pop("env", {})
        if not isinstance(environment, dict):
            raise ValueError(f"{source}: env must map environment variables to values, not {environment!r}.")
        os.environ.update({name: str(value) for name, value in environment.items()})
        if is_default(source):
            _fit_to_this_machine(recipe)
        parser.set_defaults_of(recipe, source)
    return parser, source, rest


def _fit_to_this_machine(recipe: dict[str, Any]):
    """The embedded default makes the same updates on however many processes; one of its own needs one GPU."""
    if "WORLD_SIZE" not in os.environ:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    rows, processes = recipe["per_device_train_batch_size"], int(os.environ.get("WORLD_SIZE", 1))
    if rows % processes == 0:
        recipe["per_device_train_batch_size"] = rows // processes


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[ScriptArguments, HACPOConfig]:
    """The arguments of a run, from its recipe and the command line."""
    parser, source, rest = prepared_parser(sys.argv[1:] if argv is None else argv)
    script_args, training_args = parser.read(rest)
    script_args.is_embedded_default = is_default(source)
    if training_args.agents is None:
        raise ValueError(
            "there are no agents. A recipe lists them: agents: [{name: qwen, model_name_or_path: Qwen/Qwen3-4B-Base}]."
        )
    return script_args, training_args
