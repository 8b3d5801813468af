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
fault in the kernel or the interpreter, use of CPU time within the limits, writing to named pipes and terminals that it
finds, and reading of files that any user may read (as root: every file readable by others; otherwise: the user's own
files). What is read cannot leave the sandbox except there and as the output that is compared. Without namespaces and
not as root, the user's other processes can be read as far as the kernel lets a user read them
(`kernel.yama.ptrace_scope`), among them the trainer, which knows the tests. Without namespaces, as in most containers,
the code cannot write files at all. Code that answers the tests' inputs from memory, without computing, is right by
every test.

Limits of the assertions: a value has to be made of None, numbers, strings, bytes, lists, tuples, sets and dicts to be
compared. Other objects can be passed back, called, iterated and read attribute by attribute. A function given to the
code as an argument by the tests is not supported; such a test fails.
"""

import ast
import builtins
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from .code_runner import global_names, reported_asserts
from .math import completion_text


# Beyond its limit, for starting and for killing what it started.
LAUNCHER_GRACE_SECONDS = 10.0
# A block of Markdown between fences of backticks or tildes, perhaps in a list. Where the text is cut, the second fence
# is missing. It is at most three spaces further in than the first: one in a docstring is none. Nor is one with a
# language; anything else may follow, such as the special token at an answer's end.
_BLOCK = re.compile(
    r"^(?P<indent>[ \t]*)(?:(?:[-*+]|\d+[.)])[ \t]+)?(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)\n"
    r"(?P<code>.*?)(?:^(?:(?P=indent))? {0,3}(?P=fence)[`~]*+(?![ \t]*[\w{.][^\s`]*[ \t\r]*$)|\Z)",
    re.DOTALL | re.MULTILINE,
)
_LANGUAGE = re.compile(r"[{. \t]*([\w+#.-]*)")
_PYTHON = re.compile(r"(?:i?python|(?:.*\.)?py)[\d.]*", re.IGNORECASE)  # also the name of a file
# What a program does to its input and output; a block that shows its use or what it prints does not do both.
_PROGRAM = [
    re.compile(r"\binput\(|\bstdin\b|\bopen\(0|\bfileinput\b"),
    re.compile(r"\bprint\(|\bstdout\b|\bos\.write\("),
]


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


def extract_code(text: str, names: Iterable[str] = ()) -> str | None:
    """The code under test in an answer: the last block of its Markdown that defines what is tested.

    That is the block with the most of the names. Among equals Python goes before a block without a language, and later
    before earlier. Blocks in other languages count where there are no others. A text without blocks is the code itself
    when it is Python. A block that the text ends in the middle of is one.

    Args:
        text: the answer.
        names: functions and classes that the tests use. Without any, what is tested is a program; its block is the one
            that both reads an input and prints.

    Returns:
        The code; `None` where there is none.
    """
    blocks = []
    for block in _BLOCK.finditer(text):
        if indents := re.findall(r"(?m)^([ \t]*)\S", block["code"]):
            code = re.sub(rf"(?m)^[ \t]{{0,{len(indents[0])}}}", "", block["code"])
            blocks.append((code, _LANGUAGE.findall(block["info"])[0]))
    if not blocks:
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return text if text.strip() else None
    # Looked for in the text, so that a last version with a syntax error still replaces the draft before it.
    defines = r"^(?:(?:async[ \t]+)?def|class)[ \t]+{0}\b|^{0}\b[^=\n(]*=(?!=)"
    patterns = [re.compile(defines.format(re.escape(name)), re.MULTILINE) for name in names] or _PROGRAM

    def rank(block: tuple[str, str]) -> tuple[int, bool]:
        return sum(pattern.search(block[0]) is not None for pattern in patterns), block[1] != ""

    blocks = [block for block in blocks if not block[1] or _PYTHON.fullmatch(block[1])] or blocks
    return max(reversed(blocks), key=rank)[0]


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
        text = completion_text(completion)
        if inputs:
            passed, total = self._run_with_inputs(text, inputs, outputs)
        else:
            if test and not re.search(r"^check\(", test, re.MULTILINE):
                test = f"{test}\n\ncheck({entry_point})\n"
            tests = [test] if test else list(test_list)
            passed, total = self._run_assertions(text, tests, entry_point or "", setup or "")
        return float(passed == total) if self.all_or_nothing else passed / total

    def _run_with_inputs(self, text: str, inputs: list[str], outputs: list[str]) -> tuple[int, int]:
        passed, code = 0, extract_code(text)
        for given, expected in zip(inputs, outputs, strict=True):
            if code is None:
                break
            with tempfile.TemporaryFile() as stdin:
                stdin.write(given.encode())
                stdin.seek(0)
                with self._sandbox({"role": "script", "code": code}, stdin.fileno()) as process:
                    output = self._output(process, self.limits.output_bytes)
            # What is printed before a crash does not count as an answer.
            ended_well = output is not None and process.returncode == 0
            if ended_well and _lines(output.decode(errors="replace")) == _lines(expected):
                passed += 1
            elif self.all_or_nothing:
                break
        return passed, len(inputs)

    def _run_assertions(self, text: str, tests: list[str], entry_point: str, setup: str) -> tuple[int, int]:
        """Number of assertions that hold, and of all that should have been reached."""
        counts, names = zip(*map(_contents, tests), strict=True)
        total = sum(max(count, 1) for count in counts)
        code = extract_code(text, set().union(*names, [entry_point] if entry_point else []))
        if code is None:
            return 0, total
        check = {"role": "test", "tests": tests, "setup": setup, "entry_point": entry_point}
        ours, theirs = socket.socketpair()
        with (
            ours,
            theirs,
            self._sandbox({"role": "serve", "code": code}, theirs.fileno()),
            self._sandbox(check, ours.fileno()) as process,
        ):
            # Each side sees the other's end only when no copy is left here.
            ours.close()
            theirs.close()
            report = self._output(process, total + len(tests)) or b""
        passed = 0
        for count, (asserts, end) in zip(counts, re.findall(rb"([+-]*)([.!]|$)", report)):  # noqa: B905
            held = asserts.count(b"+")
            # A test that was broken off by an exception has failed, though all its assertions were reached.
            passed += held - (held == count and end != b".") if count else end == b"."
        return passed, total

    @contextmanager
    def _sandbox(self, config: dict, stdin: int) -> Iterator[subprocess.Popen]:
        """One run of sandbox.py, killed with everything in it when the block is left."""
        config |= {"limits": asdict(self.limits), "namespaces": self.namespaces}
        with tempfile.TemporaryDirectory(prefix="hacpo-sandbox-", ignore_cleanup_errors=True) as directory:
            os.chmod(directory, 0o711)
            # Not a file with a name: the code under test must not find the tests.
            with tempfile.TemporaryFile() as file:
                file.write(json.dumps(config | {"directory": directory}).encode())
                file.seek(0)
                theirs, control = os.pipe()
                program = str(Path(__file__).with_name("sandbox.py"))
                process = subprocess.Popen(
                    [sys.executable, "-I", "-W", "ignore", program, str(file.fileno()), str(theirs)],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL if config["role"] == "serve" else subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[file.fileno(), theirs],
                    start_new_session=True,
                    env={"PATH": os.defpath, "LANG": "C.UTF-8"},  # no tokens, no keys
                )
                os.close(theirs)
            try:
                yield process
            finally:
                os.close(control)  # the launcher takes it as the order to kill and end
                if process.stdout:
                    process.stdout.close()
                try:
                    _, errors = process.communicate(timeout=LAUNCHER_GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    _, errors = process.communicate()
        # The code under test cannot write here (see sandbox.become_role).
        if errors.strip():
            raise SandboxError(
                "The sandbox cannot be set up here, so no code was run: " + errors.decode(errors="replace").strip()
            )

    def _output(self, process: subprocess.Popen, max_bytes: int) -> bytes | None:
        """Waits for the process and returns what it writes until its time is over; `None`: more than `max_bytes`."""
        deadline = time.monotonic() + self.limits.wall_seconds + LAUNCHER_GRACE_SECONDS
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        output = bytearray()
        while (seconds := deadline - time.monotonic()) > 0 and poll.poll(seconds * 1000):
            part = os.read(process.stdout.fileno(), 1 << 16)
            output += part
            if len(output) > max_bytes:
                return None
            if not part:
                break
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        return bytes(output)


def _contents(test: str) -> tuple[int, set[str]]:
    """Number of a test's assertions, and the names that it has from elsewhere."""
    try:
        names = {name for name in global_names(test) if not hasattr(builtins, name)}
        return len(reported_asserts(ast.parse(test))), names
    except SyntaxError as error:
        raise ValueError(f"A test is not Python: {error}. It reads: {test!r:.200}") from None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


code_reward = CodeReward()
