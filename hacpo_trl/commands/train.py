"""`hacpo train`: agents learn together, as a recipe says.

Without arguments it is the embedded default. What is about launching (`--accelerate_config`, `--num_processes`,
`--serve`) starts further processes, see `launch.py`; each of them, or this one, is a run, see `training.py`.
"""

import os
import sys
from collections.abc import Sequence

from .early_checks import check_names
from .errors import fail, show, user_errors
from .heavy import heavy_imports
from .launch_options import split_launching
from .train_help import HELP


def main(argv: Sequence[str] | None = None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if "-h" in argv or "--help" in argv:
        show(HELP.read_text(encoding="utf-8"))
        return
    launching, rest = split_launching(argv)
    with user_errors():
        check_names(rest)
    try:
        if not launching.given:
            run(rest)
            return
        if "LOCAL_RANK" in os.environ:
            fail(f"--{launching.given[0]} is for the process that starts others, and a launcher has started this one.")
        from .launch import launch

        status = launch(launching, rest)
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("\nBroken off. --resume continues from the last checkpoint.", file=sys.stderr)
        status = 130
    raise SystemExit(status)


def run(argv: Sequence[str]):
    """A run in this process."""
    with heavy_imports():
        from .train_options import parse_arguments
    with user_errors():
        script_args, training_args = parse_arguments(argv)
    with heavy_imports():
        from .training import run_training
    run_training(script_args, training_args)


if __name__ == "__main__":
    main()
