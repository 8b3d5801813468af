"""Names in a recipe and on the command line of `hacpo train`, checked before anything heavy is imported.

What there is stands in the help text. That was made with one version of transformers; with another one the names are
checked later, by the parser itself.
"""

import importlib.metadata
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..options.grpo_names import unknown_setting
from ..options.recipe import read_recipe
from .launch_options import NOT_OF_A_RUN, split_recipe
from .train_help import HELP, MADE_WITH


OPTION = re.compile(r"^  --(\w+)", re.MULTILINE)


def check_names(argv: Sequence[str]):
    """Refuses a recipe that cannot be read, and names that do not exist.

    Args:
        argv: The command line without what is about launching.
    """
    source, rest = split_recipe(argv)
    recipe = {} if source is None else read_recipe(source)
    text = HELP.read_text(encoding="utf-8")
    if MADE_WITH.format(importlib.metadata.version("transformers")) not in text:
        return
    settings = [name for name in OPTION.findall(text) if name not in ("config", *NOT_OF_A_RUN)]
    if source is not None:
        check_keys(recipe, settings, source)
    for argument in rest:
        if argument.startswith("--") and setting_of(argument) not in settings:
            raise ValueError(unknown_option(argument, settings))


def setting_of(argument: str) -> str:
    """The setting that an option on the command line is about: `--no-shuffle-dataset` is about shuffle_dataset."""
    name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
    return name.removeprefix("no_")


def unknown_option(argument: str, settings: Sequence[str]) -> str:
    name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
    if name in NOT_OF_A_RUN:
        return f"--{name} is for `hacpo train`, which starts processes; this process is one of them."
    return unknown_setting(name, settings, "option")


def check_keys(recipe: Iterable[str], settings: Sequence[str], source: Path):
    """Refuses keys of a recipe that are no settings of a run; `env` is one of TRL's parser."""
    for name in recipe:
        if name in NOT_OF_A_RUN:
            raise ValueError(f"{source}: {name} is about launching. Give it on the command line: --{name}.")
        if name not in settings and name != "env":
            raise ValueError(f"{source}: {unknown_setting(name, settings)}")
