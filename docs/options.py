"""Writes docs/configuration.md: every option, from the dataclasses that hold them.

python docs/options.py
"""

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from transformers import TrainingArguments

from hacpo_trl import AgentConfig, HACPOConfig
from hacpo_trl.commands.train_options import ScriptArguments
from hacpo_trl.options.checks import OPTIONS_OF
from hacpo_trl.reporting.tables import Table


PAGE = Path(__file__).with_name("configuration.md")
SECTION = re.compile(r"    # --- (.+?) -+$")
OPTION = re.compile(r"    (\w+): ")

INTRODUCTION = """\
# Configuration

Settings come from a recipe in YAML (`hacpo train --config recipe.yaml`), from the command line, which wins over it,
or from `HACPOConfig(...)` in Python, by the same names. What is wrong, or would be without effect, is an error that
names it.

This page is made from the code, by `make options`.

An option *of* some algorithms only is an error with the others. “–” as a default means that something else decides;
the text says what.
"""

AGENTS = """\
## One agent: `AgentConfig`

Each entry of `agents` in a recipe. Whatever is left out follows the run's option of the same name.

```yaml
agents:
  - name: qwen
    model_name_or_path: Qwen/Qwen3-1.7B-Base
    temperature: 0.9
  - name: llama
    model_name_or_path: meta-llama/Llama-3.2-1B-Instruct
    learning_rate: 5.0e-7
    peft_config: {r: 32, target_modules: all-linear}
```
"""

SCRIPT = """\
## What to train on: `hacpo train`

Beside the options above, recipes and the command line of `hacpo train` take these. In Python their place is taken by
datasets and reward functions.
"""

INHERITED = """\
## The rest: `TrainingArguments`

HACPOConfig is a [`TrainingArguments`](https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments)
and takes all of its options:
"""


def cell(value: Any) -> str:
    """A default as the table shows it."""
    return "–" if value is None else f"`{value}`"


def described(field: Field) -> list[str]:
    """A row about one option."""
    help_text = field.metadata.get("help", "")
    if get_origin(field.type) is Literal:
        choices = [f"`{choice}`" for choice in get_args(field.type)]
        help_text = f"{help_text} One of {', '.join(choices)}."
    if field.name in OPTIONS_OF:
        help_text = f"Of {', '.join(f'`{name}`' for name in OPTIONS_OF[field.name])}. {help_text}"
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return [f"`{field.name}`", cell(None if default is MISSING else default), help_text]


def sections() -> Iterator[tuple[str, list[Field]]]:
    """The options of HACPOConfig under the headings that its source has."""
    by_name = {field.name: field for field in fields(HACPOConfig)}
    title, found = "", []
    for line in inspect.getsource(HACPOConfig).splitlines():
        if heading := SECTION.match(line):
            if found:
                yield title, found
            title, found = heading[1], []
        elif title and (option := OPTION.match(line)) and option[1] in by_name:
            found.append(by_name[option[1]])
    yield title, found


def agent_rows() -> list[list[str]]:
    """AgentConfig's options with the text of its docstring."""
    documented = inspect.getdoc(AgentConfig).split("Attributes:\n")[1]
    entries = re.split(r"\n    (?=\w+: )", "\n" + documented)[1:]
    texts = dict(entry.split(": ", 1) for entry in entries)
    return [[f"`{field.name}`", " ".join(texts[field.name].split())] for field in fields(AgentConfig)]


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = ("option", "default", "")) -> str:
    return Table(header, rows, words=len(header)).markdown() + "\n"


def own_part() -> str:
    """The page without what transformers alone decides."""
    parts = [INTRODUCTION]
    for title, options in sections():
        parts += [f"## {title}\n", table([described(option) for option in options])]
    parts += [AGENTS, table(agent_rows(), ("option", ""))]
    parts += [SCRIPT, table([described(option) for option in fields(ScriptArguments) if option.init])]
    return "\n".join(parts)


def inherited_part() -> str:
    own = {option.name for _, options in sections() for option in options}
    names = [f"`{field.name}`" for field in fields(TrainingArguments) if field.init and field.name not in own]
    return f"\n{INHERITED}\n{', '.join(sorted(names))}.\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(own_part() + inherited_part(), encoding="utf-8")
    print(path)
