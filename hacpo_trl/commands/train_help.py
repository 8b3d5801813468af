"""What `hacpo train --help` prints: a file that is made from the options' own descriptions.

The descriptions are in dataclasses whose modules import torch, for which nobody who asks for help should wait. A test
holds the file equal to what `make options` writes.
"""

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from .launch_options import Launching


HELP = Path(__file__).with_name("train_help.txt")
WIDTH = 100
INDENT = 6

# How it is told which options of TrainingArguments these are.
MADE_WITH = "TrainingArguments of transformers {}:"

BEGINNING = """\
usage: hacpo train [--config RECIPE] [options]

Trains agents together, as a recipe says. Without --config two tiny models learn an embedded task,
on any machine. The command line wins over the recipe, and the options below can be lines of it:
`delta: 0.2`.

  --config RECIPE
      A YAML file, or a name that `hacpo recipes` lists.
"""

# The sections of HACPOConfig in the order in which they are shown; those it has beside these follow.
FIRST_SECTIONS = ("HACPO", "The step", "Own rollouts", "Sampling", "Rewards")
SECTION = re.compile(r"    # --- (.+?) -+$|    (\w+): ")


def sections_of(source: str) -> dict[str, list[str]]:
    """The names of a dataclass's fields under the headings that comments in its source are: `# --- Heading ---`."""
    sections: dict[str, list[str]] = {}
    names: list[str] = []
    for line in source.splitlines():
        match = SECTION.match(line)
        if match and match[1]:
            names = sections.setdefault(match[1], [])
        elif match:
            names.append(match[2])
    return sections


def _kind(annotation: Any) -> str:
    """A field's type as the command line has it."""
    choices = [argument for argument in get_args(annotation) if isinstance(argument, str)]
    if choices:
        return "{" + ",".join(choices) + "}"
    kinds = [part for part in get_args(annotation) or (annotation,) if part is not type(None)]
    if any(getattr(kind, "__origin__", kind) in (dict, list) and str in kinds for kind in kinds):
        return "JSON"
    if annotation in (list[str], list[float]) or list[str] in kinds or list[float] in kinds:
        return "VALUE ..."
    return {bool: "BOOL", int: "INT", float: "NUMBER"}.get(kinds[0], "TEXT")


def _option(name: str, kind: str, help_text: str, default: Any = None) -> str:
    shown = "" if default in (None, dataclasses.MISSING, "") else f" Default: {default}."
    if "Default:" in help_text:
        shown = ""
    text = " ".join(help_text.split()) + shown
    body = textwrap.fill(text, WIDTH, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT)
    return f"  --{name} {kind}".rstrip() + (f"\n{body}" if text else "")


def _fields(names: Iterable[str], of: type, first_sentence: bool = False) -> Iterator[str]:
    fields = {field.name: field for field in dataclasses.fields(of)}
    # Not the fields' own types, which HfArgumentParser overwrites.
    kinds = get_type_hints(of)
    for name in names:
        help_text = fields[name].metadata.get("help", "")
        if first_sentence:
            help_text = re.split(r"(?<=[.!?])\s", " ".join(help_text.split()))[0]
        # What is about launching has flags; a recipe's settings are given as they are written there.
        kind = "" if of is Launching and kinds[name] is bool else _kind(kinds[name])
        yield _option(name, kind, help_text, fields[name].default if kind else None)


def _names_of(dataclass: type) -> list[str]:
    return [field.name for field in dataclasses.fields(dataclass) if field.init]


def make_help() -> str:
    """The whole text."""
    import inspect

    from transformers import TrainingArguments, __version__

    from ..config import HACPOConfig
    from ..options.agent import AgentConfig
    from .train_options import ScriptArguments

    sections = sections_of(inspect.getsource(HACPOConfig))
    agents = sections.pop("Agents")
    shown = {name for names in sections.values() for name in names} | set(agents)
    keys = ", ".join(_names_of(AgentConfig))
    parts = [
        BEGINNING,
        "Agents:",
        *_fields(agents, HACPOConfig),
        textwrap.fill(f"Keys of an agent: {keys}.", WIDTH, initial_indent="  ", subsequent_indent="  "),
        "\nTask:",
        *_fields(_names_of(ScriptArguments), ScriptArguments),
    ]
    for title in [*FIRST_SECTIONS, *(title for title in sections if title not in FIRST_SECTIONS)]:
        parts += [f"\n{title}:", *_fields(sections[title], HACPOConfig)]
    parts += ["\nLaunching (not in a recipe):", *_fields(_names_of(Launching), Launching)]
    parts.append("\n" + MADE_WITH.format(__version__))
    parts += _fields(
        [name for name in _names_of(TrainingArguments) if name not in shown], HACPOConfig, first_sentence=True
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    HELP.write_text(make_help(), encoding="utf-8")
