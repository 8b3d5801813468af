"""A pool of small processes that runs a function on many items with a hard limit on the time of each.

Differs from `concurrent.futures.ProcessPoolExecutor`:

1. The limit is on one item, starts when the item starts, and holds in C code that never returns to Python.
2. An item that exceeds it costs its worker and nothing else: the rest of its chunk goes on in other workers, and the
   new worker is forked from a template that has imported everything.
3. The processes import one file, not the package and not `__main__`: no torch, no second run of a training script.
4. Items travel in chunks and results one by one, so a thousand easy items need no thousand round trips.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, cast


START_SECONDS = 120.0
# A worker that is silent for so long after its limit did not get the kernel's signal: it is stopped or swapped out.
GRACE_SECONDS = 10.0
MAX_CHUNK = 32
MAX_FAILED_STARTS = 3


@dataclass(frozen=True)
class ItemFailure:
    """Stands for the result of an item that has none.

    Attributes:
        reason: `"timeout"` for an item that exceeded its limit, `"crash"` for one whose worker died earlier (memory, a
            fault in C code), `"error"` for an exception.
        detail: the exception's type and message; empty otherwise.
    """

    reason: Literal["timeout", "crash", "error"]
    detail: str = ""


class WorkerPool:
    """Processes that are started at the first call and reused until `close` or the end of the program.

    Safe to call from any thread; concurrent calls take turns.

    Args:
        module_file: file with the functions. It is run by path: it must not use relative imports.
        functions: names of the functions in it; each takes one picklable item and returns a picklable result.
        num_workers: number of processes; `None` for the CPUs this process may use, 8 at most.
        timeout: limit for one item, in seconds of wall-clock time.
        memory_limit: limit on the address space of one worker, in bytes. Exceeding it raises `MemoryError` there.

    Raises:
        ValueError: `timeout` or `num_workers` is not positive.
    """

    def __init__(
        self,
        module_file: str | Path,
        functions: tuple[str, ...],
        num_workers: int | None = None,
        timeout: float = 5.0,
        memory_limit: int = 4 << 30,
    ):
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout} but has to be a positive number of seconds.")
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"num_workers is {num_workers} but has to be at least 1.")
        self.module_file = Path(module_file)
        self.functions = tuple(functions)
        self.num_workers = num_workers or min(8, len(os.sched_getaffinity(0)))
        self.timeout = timeout
        self.memory_limit = memory_limit
        self._lock = threading.Lock()
        self._template: _Template | None = None
        self._idle: list[Connection] = []

    def map(self, function: str, items: list) -> list[Any]:
        """Results of `function` on the items, in their order, with an `ItemFailure` where there is none.

        Raises:
            RuntimeError: the processes cannot be started; what they printed is on stderr.
            ValueError: the pool was not made for this function.
        """
        if function not in self.functions:
            raise ValueError(f"The pool runs {', '.join(self.functions)}, not {function!r}.")
        if not items:
            return []
        with self._lock:
            return self._map(function, items)

    def _map(self, function: str, items: list) -> list[Any]:
        results: list[Any] = [None] * len(items)
        queue = deque(range(len(items)))
        running: dict[Connection, deque[int]] = {}
        progress: dict[Connection, float] = {}
        failed_starts = 0
        try:
            while queue or running:
                while queue and len(running) < self.num_workers:
                    # Shorter chunks towards the end, so that the workers finish together.
                    size = min(MAX_CHUNK, -(-len(queue) // (2 * self.num_workers)))
                    chunk = deque(queue.popleft() for _ in range(size))
                    connection = self._worker()
                    try:
                        connection.send((function, [(index, items[index]) for index in chunk]))
                    except OSError:
                        connection.close()
                        queue.extendleft(reversed(chunk))
                        failed_starts += 1
                        if failed_starts > MAX_FAILED_STARTS:
                            raise RuntimeError(
                                f"{failed_starts} workers died before they took an item of {self.module_file.name}. "
                                "Their messages are on stderr."
                            ) from None
                        self._discard_workers()
                        break
                    running[connection], progress[connection] = chunk, time.monotonic()
                if not running:
                    continue
                oldest = min(progress.values())
                ready = wait(list(running), timeout=max(0.0, oldest + self.timeout + GRACE_SECONDS - time.monotonic()))
                for connection in cast(list[Connection], ready):
                    chunk = running[connection]
                    try:
                        index, succeeded, value, progress_made = connection.recv()
                    except (EOFError, OSError):
                        elapsed = time.monotonic() - progress.pop(connection)
                        del running[connection]
                        connection.close()
                        results[chunk.popleft()] = ItemFailure("timeout" if elapsed >= self.timeout else "crash")
                        queue.extendleft(reversed(chunk))
                        continue
                    results[index] = value if succeeded else ItemFailure("error", value)
                    chunk.popleft()
                    progress[connection] = progress_made
                    if not chunk:
                        del running[connection], progress[connection]
                        self._idle.append(connection)
                if not ready:
                    for connection, chunk in running.items():
                        connection.close()
                        results[chunk.popleft()] = ItemFailure("timeout")
                        queue.extendleft(reversed(chunk))
                    running.clear()
                    progress.clear()
                    self.close()
        except BaseException:
            # A worker with unread results would answer the next call with them.
            for connection in running:
                connection.close()
            self.close()
            raise
        return results

    def _worker(self) -> Connection:
        if self._template is not None and self._template.owner != os.getpid():
            # This process was forked from the one that started the pool, which goes on using these workers.
            self._template, self._idle = None, []
        if self._template is None:
            self._template = _Template(self)
        return self._idle.pop() if self._idle else self._template.fork_worker()

    def _discard_workers(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle = []
        if self._template is not None:
            self._template.stop()
            self._template = None

    def close(self) -> None:
        """End the processes, at once. The next call of `map` starts new ones."""
        if self._template is None or self._template.owner == os.getpid():
            self._discard_workers()


class _Template:
    """The process that workers are forked from (see worker_main.py), leader of the process group of all of them."""

    def __init__(self, pool: WorkerPool):
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spec = {
            "sys_path": [path for path in sys.path if path],
            "module_file": str(pool.module_file.resolve()),
            "functions": pool.functions,
            "memory_limit": pool.memory_limit,
            "timeout": pool.timeout,
        }
        program = Path(__file__).with_name("worker_main.py")
        # SymPy's order of terms, and with it a verdict on the edge of a limit, depends on the hash seed.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(program), str(theirs.fileno()), str(self.owner), json.dumps(spec)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self.stop = weakref.finalize(self, _stop_template, self.process, self.control, self.owner)
        readable, _, _ = select.select([self.control], [], [], START_SECONDS)
        if not readable or not self._received_ready():
            self.stop()
            raise RuntimeError(
                f"The worker process for {pool.module_file.name} "
                + ("ended before it was ready" if readable else f"was not ready after {START_SECONDS:.0f} s")
                + ". Its messages are on stderr."
            )

    def _received_ready(self) -> bool:
        try:
            return self.control.recv(16) == b"ready"
        except ConnectionError:
            return False

    def fork_worker(self) -> Connection:
        ours, theirs = socket.socketpair()
        # A failure shows when the worker is used: a template that died leaves `ours` without another end.
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.control, [b"fork"], [theirs.fileno()])
        return Connection(ours.detach())


def _stop_template(process: subprocess.Popen, control: socket.socket, owner: int) -> None:
    control.close()
    if owner != os.getpid():
        return
    # Not reaped before this line, so the number still names this group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
