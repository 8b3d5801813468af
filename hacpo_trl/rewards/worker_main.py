"""Program of a worker pool's processes: one template that imports the function once and forks a worker on request.

Run by path, in a fresh interpreter: `python -P worker_main.py CONTROL_FD PARENT_PID SPEC`. Forking from this template
is safe where forking from a trainer is not, for it has one thread and neither torch nor a GPU, and it costs
milliseconds where a fresh interpreter needs a second for SymPy. Each message on the control socket brings one end of
a worker's connection. The workers' limit on an item is the kernel's timer with its default action, which ends the
process whatever it is doing: a Python handler would wait for the arithmetic on a number of 9^9^9 digits to return.
"""

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from multiprocessing.connection import Connection


PARENT_CHECK_SECONDS = 5.0


def load_function(path: str, name: str):
    # By file and not by package: importing the package would bring torch into every worker. The file may import those
    # beside it, as modules of a package that has nothing else.
    folder, file = os.path.split(path)
    package = sys.modules.setdefault("_pool_target", types.ModuleType("_pool_target"))
    package.__path__ = [folder]
    return getattr(importlib.import_module(f"_pool_target.{os.path.splitext(file)[0]}"), name)


def serve(connection: Connection, functions: dict, timeout: float) -> None:
    while True:
        try:
            name, chunk = connection.recv()
        except EOFError:
            return
        for index, item in chunk:
            signal.setitimer(signal.ITIMER_REAL, timeout)
            try:
                outcome = (index, True, functions[name](item))
            except Exception as error:
                outcome = (index, False, f"{type(error).__name__}: {error}"[:500])
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            # The clock is the machine's: whoever reads this late knows from when the next item has had its time.
            connection.send((*outcome, time.monotonic()))


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    spec = json.loads(sys.argv[3])
    sys.path[:] = spec["sys_path"]
    functions = {name: load_function(spec["module_file"], name) for name in spec["functions"]}
    resource.setrlimit(resource.RLIMIT_AS, (spec["memory_limit"], spec["memory_limit"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    gc.freeze()
    control.send(b"ready")
    while True:
        # A child that the trainer forked may hold the other end open, so its death is looked for as well.
        readable, _, _ = select.select([control], [], [], PARENT_CHECK_SECONDS)
        if not readable:
            if os.getppid() != parent:
                break
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            break
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(Connection(descriptors[0]), functions, spec["timeout"])
            os._exit(0)
        os.close(descriptors[0])
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
