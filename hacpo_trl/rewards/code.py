"""Code reward: runs the code of a completion against unit tests in a sandbox (Linux).

The verdict is never taken from the process that runs the code under test:

1. *Input and output*: the code runs as a program. Its output is compared here, with an expected output that the
   sandbox never sees.
2. *Assertions* (MBPP's `test_list`, HumanEval's `check(candidate)`): the tests run in a sandbox of their own. Each
   call of the function under test goes to the sandbox with the code and back as a plain value. The code cannot read
   the assertions, reach the process that evaluates them, or return an object with a treacherous `__eq__`. Ending the
   process, printing a verdict, catching `AssertionError` or replacing builtins changes nothing there.

What the sandbox protects from: network access, writing outside a temporary directory, endless loops, memory, disk and
process exhaustion, processes that outlive the test, signals to and inspection of other processes. What it does not: a
fault in the kernel or the interpreter, use of CPU time within the limits, and reading of files that any user may read
(as root: every file readable by others; otherwise: the user's own files). What is read cannot leave the sandbox except
as the output that is compared. Without namespaces and not as root, the user's other processes can be read as far as
the kernel lets a user read them (`kernel.yama.ptrace_scope`), among them the trainer, which knows the tests. Without
namespaces, as in most containers, the code cannot write files at all. Code that answers the tests' inputs from memory,
without computing, is right by every test.

Limits of the assertions: a value has to be made of None, numbers, strings, bytes, lists, tuples, sets and dicts to be
compared. Other objects can be passed back, called, iterated and read attribute by attribute. A function given to the
code as an argument by the tests is not supported; such a test fails.
"""

import ast
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .code_runner import reported_asserts
from .math import completion_text


# Beyond its limit, for starting and for killing what it started.
LAUNCHER_GRACE_SECONDS = 10.0
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


class SandboxError(RuntimeError):
    """The sandbox cannot be set up on this machine, so no code was run."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits on the code under test.

    Attributes:
        wall_seconds: time for all assertions of one completion, or for one run with an input.
        cpu_seconds: CPU time of one process.
        memory_bytes: address space of one process; times `processes` for all of them.
        file_bytes: size of one file.
        disk_bytes: size of all files together; they are in memory.
        processes: number of processes and threads at one time.
        output_bytes: length of the output; more of it is a failed test.

    Raises:
        ValueError: a limit is not positive.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    processes: int = 8
    output_bytes: int = 4 << 20

    def __post_init__(self):
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"{name} is {value} but has to be positive.")


def extract_code(text: str) -> str | None:
    """The last Python block of a Markdown text, else its last block, else the text itself when it is Python.

    Returns:
        The code; `None` where there is none.
    """
    blocks = _FENCE.findall(text)
    python = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    if blocks:
        return (python or [code for _, code in blocks])[-1]
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text if text.strip() else None


class CodeReward:
    """Reward function that runs a completion's code against the tests of its row.

    Args:
        all_or_nothing: 1.0 only when every test passes, else 0.0. `False` gives the share of tests that pass.
        limits: limits on the code under test.
        num_workers: completions tested at one time; `None` for the CPUs this process may use, 8 at most.
        namespaces: use Linux namespaces where the system grants them. `False` is for tests of the other way.
    """

    def __init__(
        self,
        all_or_nothing: bool = True,
        limits: SandboxLimits | None = None,
        num_workers: int | None = None,
        namespaces: bool = True,
    ):
        self.__name__ = "code_reward"
        self.all_or_nothing = all_or_nothing
        self.limits = limits or SandboxLimits()
        self.num_workers = num_workers or min(8, len(os.sched_getaffinity(0)))
        self.namespaces = namespaces

    def __call__(
        self,
        completions: list[str] | list[list[dict]],
        test_list: list | None = None,
        test: list | None = None,
        entry_point: list | None = None,
        test_setup_code: list | None = None,
        inputs: list | None = None,
        outputs: list | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs,
    ) -> list[float | None]:
        """Rewards of a batch of completions. Each row has tests of one style; a dataset may mix them.

        Args:
            completions: texts, or conversations whose last message is judged; see `extract_code`.
            test_list: assertions as in MBPP, a list of strings for each completion.
            test: source with `check(candidate)` as in HumanEval; needs `entry_point`.
            entry_point: name of the function under test.
            test_setup_code: source to run before the assertions.
            inputs: standard inputs, a list of strings for each completion.
            outputs: expected standard outputs, as many as `inputs`. White space at the end of lines does not count.
            log_metric: given by the trainer; receives `code_reward/seconds`.

        Returns:
            The share of tests passed, or 1.0 and 0.0; `None` (skip) for a row without tests.

        Raises:
            SandboxError: no sandbox can be set up here.
            ValueError: the dataset has no column with tests, or a row's inputs and outputs differ in number.
        """
        if test_list is None and test is None and inputs is None:
            found = ", ".join(sorted(kwargs)) or "none"
            raise ValueError(
                "code_reward needs a dataset column 'test_list', 'test' with 'entry_point', or 'inputs' with "
                f"'outputs'; the other columns are: {found}."
            )
        start = time.perf_counter()
        columns = (test_list, test, entry_point, test_setup_code, inputs, outputs)
        rows = zip(*(column if column is not None else [None] * len(completions) for column in columns), strict=True)
        with ThreadPoolExecutor(self.num_workers) as executor:
            rewards = list(executor.map(self._score, completions, rows))
        if log_metric is not None:
            log_metric("code_reward/seconds", time.perf_counter() - start)
        return rewards

    def _score(self, completion: str | list[dict], row: tuple) -> float | None:
        test_list, test, entry_point, setup, inputs, outputs = row
        if inputs and len(inputs) != len(outputs or []):
            raise ValueError(f"code_reward got {len(inputs)} inputs but {len(outputs or [])} outputs in one row.")
        if test and not entry_point:
            raise ValueError("code_reward got a 'test' without an 'entry_point', the name of the function to check.")
        if not (test_list or test or inputs):
            return None
        code = extract_code(completion_text(completion))
        if code is None:
            return 0.0
        if inputs:
            passed, total = self._run_with_inputs(code, inputs, outputs)
        else:
            tests = [f"{test}\n\ncheck({entry_point})\n"] if test else list(test_list)
            passed, total = self._run_assertions(code, tests, entry_point or "", setup or "")
        return float(passed == total) if self.all_or_nothing else passed / total

    def _run_with_inputs(self, code: str, inputs: list[str], outputs: list[str]) -> tuple[int, int]:
        passed = 0
        for given, expected in zip(inputs, outputs, strict=True):
            with tempfile.TemporaryFile() as stdin, _Pipe() as stdout:
                stdin.write(given.encode())
                stdin.seek(0)
                config = {"role": "script", "code": code}
                with _Sandbox(config, self.limits, self.namespaces, stdin=stdin.fileno(), stdout=stdout.write) as run:
                    stdout.close_write()
                    output = _read(stdout.read, run.deadline, self.limits.output_bytes)
                    ended_well = output is not None and run.wait() == 0
            # What is printed before a crash does not count as an answer.
            if ended_well and _lines(output.decode(errors="replace")) == _lines(expected):
                passed += 1
            elif self.all_or_nothing:
                break
        return passed, len(inputs)

    def _run_assertions(self, code: str, tests: list[str], entry_point: str, setup: str) -> tuple[int, int]:
        """Number of assertions that hold, and of all that should have been reached."""
        counts = [_count_asserts(source) for source in tests]
        total = sum(max(count, 1) for count in counts)
        ours, theirs = socket.socketpair()
        with ours, theirs, _Pipe() as verdicts:
            serve: dict[str, Any] = {"role": "serve", "code": code, "channel_fd": theirs.fileno()}
            check: dict[str, Any] = {"role": "test", "tests": tests, "setup": setup, "entry_point": entry_point}
            check |= {"channel_fd": ours.fileno(), "report_fd": verdicts.write}
            with (
                _Sandbox(serve, self.limits, self.namespaces, role_fds=[theirs.fileno()]),
                _Sandbox(check, self.limits, self.namespaces, role_fds=[ours.fileno(), verdicts.write]) as run,
            ):
                # Each side sees the other's end only when no copy is left here.
                ours.close()
                theirs.close()
                verdicts.close_write()
                report = _read(verdicts.read, run.deadline, total + len(tests) + 1) or b""
        passed, position = 0, 0
        for count in counts:
            end = re.compile(rb"[.!]").search(report, position)
            asserts = report[position : end.start() if end else len(report)]
            held = asserts.count(b"+")
            position = end.end() if end else len(report)
            if count:
                # A test that was broken off by an exception has failed, though all its assertions were reached.
                passed += held - (held == count and (end is None or end[0] == b"!"))
            else:
                passed += end is not None and end[0] == b"."
        return passed, total


def _count_asserts(source: str) -> int:
    try:
        return len(reported_asserts(ast.parse(source)))
    except SyntaxError as error:
        raise ValueError(f"A test is not Python: {error}. It reads: {source!r:.200}") from None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _read(descriptor: int, deadline: float, max_bytes: int) -> bytes | None:
    """Everything until the other end is closed or the time is over; `None` when it is more than `max_bytes`."""
    parts, length = [], 0
    while (remaining := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], remaining)[0]:
            break
        part = os.read(descriptor, 1 << 16)
        if not part:
            break
        parts.append(part)
        length += len(part)
        if length > max_bytes:
            return None
    return b"".join(parts)


class _Pipe:
    def __enter__(self):
        self.read, self.write = os.pipe()
        self._open = {self.read, self.write}
        return self

    def close_write(self) -> None:
        self._open.discard(self.write)
        os.close(self.write)

    def __exit__(self, *exception):
        for descriptor in self._open:
            os.close(descriptor)


class _Sandbox:
    """One run of sandbox.py, killed with everything in it when the block is left."""

    def __init__(
        self,
        config: dict,
        limits: SandboxLimits,
        namespaces: bool,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        role_fds: list[int] | None = None,
    ):
        self.config = config | {"limits": asdict(limits), "namespaces": namespaces, "role_fds": role_fds or []}
        self.stdin, self.stdout = stdin, stdout
        self.deadline = time.monotonic() + limits.wall_seconds + LAUNCHER_GRACE_SECONDS

    def __enter__(self):
        self.directory = tempfile.mkdtemp(prefix="hacpo-sandbox-")
        os.chmod(self.directory, 0o711)
        self.config["directory"] = self.directory
        control, self.control = os.pipe()
        # Not a file with a name: the code under test must not find the tests.
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(self.config).encode())
            file.seek(0)
            program = str(Path(__file__).with_name("sandbox.py"))
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-W", "ignore", program, str(file.fileno()), str(control)],
                stdin=self.stdin,
                stdout=self.stdout,
                stderr=subprocess.PIPE,
                pass_fds=[file.fileno(), control, *self.config["role_fds"]],
                start_new_session=True,
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},  # no tokens, no keys
            )
        os.close(control)
        return self

    def wait(self) -> int:
        """Exit status of the code under test; not 0 when it was killed."""
        try:
            return self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def __exit__(self, kind, value, traceback):
        os.close(self.control)  # the launcher takes it as the order to kill and end
        try:
            _, errors = self.process.communicate(timeout=LAUNCHER_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            _, errors = self.process.communicate()
        shutil.rmtree(self.directory, ignore_errors=True)
        # The code under test cannot write here (see sandbox.run_role).
        if kind is None and errors.strip():
            raise SandboxError(
                "The sandbox cannot be set up here, so no code was run: " + errors.decode(errors="replace").strip()
            )


code_reward = CodeReward()
