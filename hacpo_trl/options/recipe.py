"""Recipes: YAML files of settings."""

from pathlib import Path
from typing import Any

import yaml


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe's settings as they are written.

    Raises:
        ValueError: the file is no YAML, or holds something else than settings.
    """
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} must hold settings, `name: value` each, not {recipe!r:.40}.")
    return recipe
