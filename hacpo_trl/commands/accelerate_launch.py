"""Accelerate's launcher, with a run of `hacpo train` in each process.

It does what `accelerate launch` does, but for errors: what a process has said already is not followed by a traceback
of the launcher's own, and the exit status of the process is passed on.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..signals import STATUS_AFTER
from .errors import STATUS, user_errors
from .launch import LAUNCHED, count_gpus, shell_status
from .launch_options import Launching, split_launching
from .recipes import find_launch


def accelerate_options(launching: Launching) -> list[str]:
    """The options of `accelerate launch`. Several processes without a configuration are those of DDP."""
    config = launching.accelerate_config or find_launch("multi_gpu" if count_gpus() else "cpu_2proc")
    others = [option for option in launching.for_accelerate if not option.startswith("--accelerate_config=")]
    return ["--config_file", str(config), *others]


def pass_on_signals():
    """Leaves it to the processes of the run what a signal means: they finish their update and save."""

    def pass_on(number, frame):
        children = psutil.Process().children()
        if not children:
            raise KeyboardInterrupt
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    for number in STATUS_AFTER:
        signal.signal(number, pass_on)


def end_with_parent():
    """Ends the run as SIGTERM does when the program that has started this one is killed."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main(argv: Sequence[str] | None = None):
    launching, rest = split_launching(sys.argv[1:] if argv is None else argv)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = accelerate_options(launching)
    args = launch_command_parser().parse_args([*options, "--module", "hacpo_trl.train", *rest])
    # Torch's launcher would give them half a minute to end in, which an update may not fit in.
    args.signals_to_handle = "SIGQUIT"
    pass_on_signals()
    if LAUNCHED in os.environ:
        end_with_parent()
    try:
        with user_errors():
            launch_command(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode not in (STATUS, STATUS_AFTER[signal.SIGINT]):
            print(f"error: process {rank} ended with exit status {failure.exitcode}", file=sys.stderr)
        raise SystemExit(shell_status(failure.exitcode)) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(shell_status(error.returncode)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
