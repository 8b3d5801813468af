"""`hacpo`: the commands, and what to type first. Nothing heavy is imported before a command's arguments are read."""

import importlib
import sys
from collections.abc import Sequence

from ..options.names import unknown_name
from ..version import __version__
from .errors import fail, show


# What each command does; each is a module beside this one with a function `main(argv)`.
COMMANDS = {
    "train": "train agents together; without arguments two tiny ones, on any machine, in a minute or two",
    "recipes": "list the recipes and launch configurations that come with the package, and copy them",
    "serve": "start the vLLM servers of a recipe (`hacpo train --serve` does it by itself)",
    "evaluate": "evaluate models, or every agent of a run, on benchmarks",
    "report": "make a page of pictures and tables from the logs of runs",
}

OVERVIEW = f"""\
hacpo {__version__}: trains language models together by reinforcement learning (HACPO, arXiv 2603.02604)

{{commands}}

Begin with:
  hacpo train                          # two tiny models learn together, here
  hacpo recipes                        # what there is for your own
  hacpo recipes tiny > my.yaml         # copy one, put your models in
  hacpo train --config my.yaml

`hacpo COMMAND --help` lists a command's options. An error is one line; HACPO_TRL_TRACEBACK=1 shows where it arose.
"""


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = (f"  hacpo {name:{width}}  {does}" for name, does in COMMANDS.items())
    return OVERVIEW.format(commands="\n".join(lines))


def main(argv: Sequence[str] | None = None):
    command, *rest = (list(sys.argv[1:]) if argv is None else list(argv)) or ["--help"]
    if command in ("-h", "--help", "help"):
        show(overview())
    elif command == "--version":
        print(__version__)
    elif command in COMMANDS:
        importlib.import_module(f".{command}", __package__).main(rest)
    else:
        fail(unknown_name(command, list(COMMANDS), "command"))


if __name__ == "__main__":
    main()
