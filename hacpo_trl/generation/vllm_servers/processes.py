"""Ending what was started: processes that lead groups of their own, and this one."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence


# Of Linux's prctl.
PR_SET_PDEATHSIG = 1
# Seconds that a process has to end in before it is killed.
GRACE = 20.0


class ServerFailed(RuntimeError):
    """A server ended before it was up."""


def signal_group(leader: subprocess.Popen, number: int):
    """Signals a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, number)


def end(processes: Sequence[subprocess.Popen]):
    """Ends processes that lead groups of their own, with their groups; kills what has not ended after a while.

    Ctrl-C kills at once.
    """
    for process in processes:
        signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(KeyboardInterrupt):
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        # Its workers, too, if they have outlived it.
        signal_group(process, signal.SIGKILL)
        process.wait()


def die_with_parent():
    """For `preexec_fn`: the new process gets SIGTERM when the one that starts it is gone, however it ended (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_on_signals():
    """Makes SIGTERM, with which Slurm and docker stop a program, the same as Ctrl-C; and Ctrl-C an interrupt even in a
    program that a shell has started in the background, where it is ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
