"""Recipes: YAML files of settings."""

import re
from pathlib import Path
from typing import Any

import yaml


class RecipeLoader(yaml.SafeLoader):
    """YAML as its version 1.2 has it in one thing: 1e-6, without a dot, is a number wherever it stands."""


RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe's settings as they are written.

    Raises:
        ValueError: the file is no YAML, or holds something else than settings.
    """
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), RecipeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} must hold settings, `name: value` each, not {recipe!r:.40}.")
    return recipe
