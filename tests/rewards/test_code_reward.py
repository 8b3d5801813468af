"""The code reward's verdicts, and that no attack on its sandbox passes or does harm."""

import functools
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hacpo_trl.rewards import CodeReward, SandboxError, SandboxLimits, code_reward, sandbox
from hacpo_trl.rewards.code import extract_code


LIMITS = SandboxLimits(wall_seconds=3.0, cpu_seconds=3, memory_bytes=512 << 20, file_bytes=1 << 20, processes=8)
LAUNCHER = os.fsencode(sandbox.__file__)
TESTS = ["assert add(1, 2) == 3", "assert add(-5, 5) == 0"]
RIGHT = "def add(a, b):\n    return a + b\n"
# Both ways of containing the code are tested; the first needs namespaces and is the same as the second without them.
both_ways = pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "filter"])


USER = 12345


@functools.cache
def python_of_any_user():
    """A Python that a user without rights can run; None where there is none, or nobody to become that user."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            subprocess.run([python, "-I", "-c", "import json"], user=USER, group=USER, extra_groups=[], check=True)
            return python
        except (OSError, subprocess.CalledProcessError):
            continue
    return None


@pytest.fixture(params=["self", "user"])
def user(request, monkeypatch):
    """The sandbox is started by who runs the tests, and by a user without rights."""
    if request.param == "user":
        if python_of_any_user() is None:
            pytest.skip("another user cannot run Python here")
        popen = functools.partial(subprocess.Popen, user=USER, group=USER, extra_groups=[])
        monkeypatch.setattr("hacpo_trl.rewards.code.subprocess.Popen", popen)
        monkeypatch.setattr("sys.executable", python_of_any_user())


def reward_of(code, tests=TESTS, namespaces=True, all_or_nothing=False, limits=LIMITS, **columns):
    reward = CodeReward(all_or_nothing, limits, num_workers=2, namespaces=namespaces)
    [value] = reward([f"Here it is:\n```python\n{code}\n```\n"], test_list=[tests], **columns)
    return value


def processes_in_sandboxes():
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if LAUNCHER in command and state != "Z":
                found.append(entry.name)
    return found


@both_ways
def test_right_code_passes_and_share_counts_assertions(namespaces):
    assert reward_of(RIGHT, namespaces=namespaces) == 1.0
    wrong = "def add(a, b):\n    return a - b if a > 0 else a + b\n"
    assert reward_of(wrong, namespaces=namespaces) == 0.5
    assert reward_of(wrong, namespaces=namespaces, all_or_nothing=True) == 0.0
    assert reward_of("def add(a, b)\n    return a + b", namespaces=namespaces) == 0.0


def test_humaneval_style_counts_the_assertions_of_check():
    source = (
        "METADATA = {}\n\ndef check(candidate):\n    assert candidate([3, 1]) == [1, 3]\n"
        "    assert candidate([]) == [], 'empty'\n    for n in range(3):\n        assert candidate([n]) == [n]\n"
    )
    reward = CodeReward(all_or_nothing=False, limits=LIMITS, num_workers=2)
    completions = [
        [{"role": "assistant", "content": "```python\ndef order(x):\n    return sorted(x)\n```"}],
        [{"role": "assistant", "content": "```python\ndef order(x):\n    return sorted(x) if x else None\n```"}],
        # Two assertions hold, the one in the loop does not.
        [
            {
                "role": "assistant",
                "content": "```python\ndef order(x):\n    return sorted(x) if len(x) != 1 else x[0]\n```",
            }
        ],
    ]
    assert reward(completions, test=[source] * 3, entry_point=["order"] * 3) == [1.0, 0.5, 0.5]


def test_assertions_about_nothing_do_not_count():
    source = "def check(candidate):\n    assert True, 'prints if it fails'\n    assert candidate(1, 2) == 3\n"
    reward = CodeReward(all_or_nothing=False, limits=LIMITS, num_workers=1)
    assert reward(["import sys\nsys.exit(0)"], test=[source], entry_point=["add"]) == [0.0]
    assert reward([RIGHT], test=[source], entry_point=["add"]) == [1.0]


def test_an_exception_does_not_shorten_the_tests():
    tests = ["assert list(map(add, [1, 2], [3, 4])) == []", "assert all(add(n, n) == 0 for n in range(3))"]
    assert reward_of("def add(a, b):\n    raise StopIteration\n", tests) == 0.0


def test_input_and_output_style():
    reward = CodeReward(all_or_nothing=False, limits=LIMITS, num_workers=2)
    inputs, outputs = [["3\n1 2 3\n", "1\n7\n"]] * 4, [["6\n", "7"]] * 4
    completions = [
        "```python\nn = int(input())\nprint(sum(map(int, input().split())))\n```",
        "```python\nprint(6)\n```",  # one expected output, printed without computing
        "```python\nn = int(input())\nprint(sum(map(int, input().split())))\nraise ValueError('late')\n```",
        "```python\nimport os\nos.write(1, b'6')\nos._exit(3)\n```",
    ]
    assert reward(completions, inputs=inputs, outputs=outputs) == [1.0, 0.5, 0.0, 0.0]


def test_values_of_every_plain_type_return_unchanged():
    values = [None, True, 0, -0.1, 1 + 2j, "é\n", b"\xff", [1, (2,)], {"a": {1, 2}}, frozenset({3})]
    tests = [
        f"assert same({value!r}) == {value!r}\nassert type(same({value!r})) == type({value!r})" for value in values
    ]
    tests += ["assert same(2**20000) == 2**20000", "assert same(float('-inf')) == float('-inf')"]
    assert reward_of("def same(x):\n    return x\n", tests) == 1.0


def test_arguments_changed_in_place_exceptions_objects_and_setup():
    code = (
        "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n"
        "def longest(pairs):\n    return max(p.b for p in pairs)\n"
        "def clear(x):\n    x[:] = [0] * len(x)\n"
        "def root(x):\n    if x < 0:\n        raise ValueError('negative')\n    return math.sqrt(x)\nimport math\n"
        "def numbers(n):\n    yield from range(n)\n"
    )
    tests = [
        "assert longest([Pair(1, 5), Pair(2, 9)]) == 9",
        "assert Pair(1, 5).a == 1",
        "x = [1, 2]\nclear(x)\nassert x == [0, 0]",
        "try:\n    root(-1)\nexcept ValueError:\n    pass\nelse:\n    raise RuntimeError",
        "assert math.isclose(root(2), 1.41421356, rel_tol=TOLERANCE)",
        "assert list(numbers(3)) == [0, 1, 2]",
    ]
    assert reward_of(code, tests, test_setup_code=["import math\nTOLERANCE = 1e-6"]) == 1.0


MODULE = """
from __future__ import annotations
import abc, asyncio, collections, copy, dataclasses, enum, functools, inspect, pickle, subprocess, threading, typing

@dataclasses.dataclass(order=True, slots=True)
class Node:
    value: int
    children: list[Node] = dataclasses.field(default_factory=list)
    seen: typing.ClassVar[int] = 0

@dataclasses.dataclass
class Settings:
    size: dataclasses.InitVar[int]
    options: dataclasses.KW_ONLY
    name: str = "x"
    def __post_init__(self, size):
        self.size = size

class Pair(typing.NamedTuple):
    first: int
    second: Node

Point = collections.namedtuple("Point", "x y")
Color = enum.Enum("Color", "RED GREEN")

class Shade(enum.IntFlag):
    LIGHT = 1
    DARK = 2

class Shape(abc.ABC):
    pass

@functools.singledispatch
def name_of(value):
    return "any"

@name_of.register
def _(value: Node):
    return "node"

def in_thread():
    found = []
    thread = threading.Thread(target=found.append, args=(1,))
    thread.start()
    thread.join()
    return found

async def later():
    await asyncio.sleep(0)
    return 3

CHECKS = {
    "dataclass": lambda: Node(1, [Node(2)]) < Node(2) and "seen" not in [f.name for f in dataclasses.fields(Node)],
    "InitVar": lambda: Settings(3).size == 3 and not [f for f in dataclasses.fields(Settings) if f.name == "options"],
    "asdict": lambda: dataclasses.asdict(Node(1)) == {"value": 1, "children": []},
    "pickle": lambda: pickle.loads(pickle.dumps([Node(1), Pair(1, Node(2)), Point(1, 2), Color.RED, Shade(3), Node])),
    "pickle of a function": lambda: pickle.loads(pickle.dumps(in_thread)) is in_thread,
    "deepcopy": lambda: copy.deepcopy(Node(1, [Node(2)])) == Node(1, [Node(2)]),
    "get_type_hints": lambda: typing.get_type_hints(Pair) == {"first": int, "second": Node},
    "singledispatch": lambda: name_of(Node(1)) == "node" and name_of(1) == "any",
    "inspect": lambda: "found.append" in inspect.getsource(in_thread) and "first: int" in inspect.getsource(Pair),
    "getmodule": lambda: vars(inspect.getmodule(Node)) is globals() and vars(__import__(__name__)) is globals(),
    "thread": lambda: in_thread() == [1],
    "asyncio": lambda: asyncio.run(later()) == 3,
    "process": lambda: subprocess.run(["echo", "hi"], capture_output=True).stdout == b"hi\\n",
}

def broken():
    found = []
    for name, check in CHECKS.items():
        try:
            if not check():
                found.append(name)
        except Exception as error:
            found.append(f"{name}: {error!r}")
    return found
"""


def test_code_runs_in_a_module_that_python_knows(user):
    """As functions that are called, as a program, and beside the tests."""
    served = MODULE + "if __name__ == '__main__':\n    raise SystemExit\n"
    for namespaces in (True, False):
        assert reward_of(served, ["assert broken() == []", "assert Node(1).value == 1"], namespaces) == 1.0
    program = MODULE + "if __name__ == '__main__':\n    print(broken(), __name__, input())\n"
    reward = CodeReward(limits=LIMITS, num_workers=1)
    assert reward([f"```python\n{program}```"], inputs=[["x"]], outputs=[["[] __main__ x"]]) == [1.0]
    assert reward_of(RIGHT, ["assert broken() == []"], test_setup_code=[MODULE]) == 1.0


@both_ways
def test_a_program_ends_as_python_does(namespaces):
    """Threads are waited for, functions of atexit are called, and a failure is one, however it comes about."""
    endings = {
        "import threading, time\ninput()\nthreading.Thread(target=lambda: (time.sleep(0.1), print(1))).start()": 1.0,
        "import atexit\ninput()\natexit.register(print, 1)": 1.0,
        "import sys\ninput()\nprint(1)\nsys.exit()": 1.0,
        "import sys\ninput()\nprint(1)\nsys.exit(2)": 0.0,
        "import sys\ninput()\nprint(1)\nsys.exit('failed')": 0.0,
        "input()\nprint(1)\nraise KeyboardInterrupt": 0.0,
        "import os, signal\ninput()\nprint(1, flush=True)\nsignal.setitimer(0, 0.05)\nsignal.pause()": 0.0,
    }
    reward = CodeReward(limits=LIMITS, num_workers=2, namespaces=namespaces)
    programs = [f"```python\n{code}\n```" for code in endings]
    given = {"inputs": [["x"]] * len(programs), "outputs": [["1"]] * len(programs)}
    assert dict(zip(endings, reward(programs, **given), strict=True)) == endings


def test_a_test_that_calls_check_itself_is_run_once():
    source = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n\ncheck(add)\n"
    assert CodeReward(limits=LIMITS)([RIGHT], test=[source], entry_point=["add"]) == [1.0]


def test_names_of_the_tests_are_found_by_their_scope():
    """`add` is the code's, though a helper of the tests has a variable of this name."""
    test = (
        "def double(add):\n    return 2 * add\n\nassert double(add(1, 2)) == 6\nassert [add(x, 1) for x in [1]] == [2]"
    )
    assert reward_of(RIGHT, [test]) == 1.0


FORGERIES = {
    "sys.exit before the tests": "import sys\nsys.exit(0)",
    "os._exit before the tests": "import os\nos._exit(0)",
    "sys.exit in the function": "import sys\ndef add(a, b):\n    sys.exit(0)",
    "prints a verdict": "print('2 passed')\nprint('++')\ndef add(a, b):\n    print('+.+.')",
    "swallows AssertionError": (
        "import builtins, sys\nbuiltins.AssertionError = ValueError\nsys.excepthook = lambda *_: None\n"
        "def add(a, b):\n    try:\n        assert False\n    except AssertionError:\n        return None"
    ),
    "equal to everything": (
        "class Any(int):\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Any()"
    ),
    "replaces builtins": (
        "import builtins\nbuiltins.exec = builtins.bool = builtins.eval = lambda *_: True\n"
        "def __report_assert__(condition):\n    return True\ndef add(a, b):\n    return None"
    ),
    "writes to every open file": (
        "import os\nfor fd in range(3, 200):\n    try:\n        os.write(fd, b'+.+.+.')\n"
        "    except OSError:\n        pass\n"
        "def add(a, b):\n    return None"
    ),
    "kills what it can": (
        "import os, signal\nfor pid in (-1, os.getppid(), 1):\n    try:\n        os.kill(pid, signal.SIGKILL)\n"
        "    except OSError:\n        pass\ndef add(a, b):\n    return None"
    ),
    "reads the tests": (
        "import gc, glob, re, sys\nfound = repr(gc.get_objects())[:1_000_000]\n"
        "for path in glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/fd/*') + glob.glob('/tmp/*/*'):\n"
        "    try:\n        found += open(path, errors='replace').read(100_000)\n    except OSError:\n        pass\n"
        "frame = sys._getframe()\nwhile frame:\n    found += repr(frame.f_locals)\n    frame = frame.f_back\n"
        "def add(a, b):\n    match = re.search(r'add\\(%d, %d\\) == (-?\\d+)' % (a, b), found)\n"
        "    return int(match[1])"
    ),
    "raises AssertionError": "def add(a, b):\n    raise AssertionError",
}


@both_ways
@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES.keys())
def test_verdict_cannot_be_forged(code, namespaces):
    assert reward_of(code, namespaces=namespaces) == 0.0
    assert processes_in_sandboxes() == []


@both_ways
def test_a_test_that_is_not_reached_has_not_passed(namespaces):
    code = (
        "import os\ncalls = []\ndef add(a, b):\n    calls.append(a)\n"
        "    return a + b if len(calls) < 2 else os._exit(0)\n"
    )
    assert reward_of(code, namespaces=namespaces) == 0.5


@both_ways
def test_fork_bomb_is_bounded_and_leaves_no_process(namespaces):
    bomb = (
        "import os\nstarted = 0\ndef add(a, b):\n    while True:\n        try:\n            os.fork()\n"
        "        except OSError:\n            pass\n"
    )
    limits = SandboxLimits(wall_seconds=1.0, cpu_seconds=2, memory_bytes=256 << 20, processes=6)
    most, done = [0], threading.Event()

    def watch():
        while not done.wait(0.05):
            most[0] = max(most[0], len(processes_in_sandboxes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    try:
        assert reward_of(bomb, namespaces=namespaces, limits=limits) == 0.0
    finally:
        done.set()
        watcher.join()
    assert time.monotonic() - start < 5.0
    # Two launchers, two processes of the namespaces, the tests, and the bomb's own.
    assert 6 <= most[0] <= 5 + limits.processes
    assert processes_in_sandboxes() == []


@both_ways
def test_a_process_that_goes_its_own_way_is_killed(namespaces):
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        time.sleep(60)\n    os._exit(0)\n" + RIGHT
    )
    start = time.monotonic()
    assert reward_of(code, namespaces=namespaces) == 1.0
    assert time.monotonic() - start < 3.0
    assert processes_in_sandboxes() == []


@both_ways
def test_endless_loop_ends_at_its_limit(namespaces):
    limits = SandboxLimits(wall_seconds=1.0)
    start = time.monotonic()
    code = "def add(a, b):\n    while a > 0:\n        pass\n    return a + b\n"
    assert reward_of(code, ["assert add(-5, 5) == 0", *TESTS], namespaces, limits=limits) == pytest.approx(1 / 3)
    assert time.monotonic() - start < 3.0
    reward = CodeReward(limits=limits, namespaces=namespaces)
    assert reward(["```python\nwhile True:\n    pass\n```"], inputs=[["1"]], outputs=[["1"]]) == [0.0]
    assert processes_in_sandboxes() == []


@both_ways
def test_10_gb_allocation_fails(namespaces):
    code = "def add(a, b):\n    data = bytearray(10 << 30)\n    return a + b\n"
    assert reward_of(code, namespaces=namespaces) == 0.0
    caught = (
        "def add(a, b):\n    try:\n        bytearray(10 << 30)\n    except MemoryError:\n        return 'no memory'\n"
    )
    assert reward_of(caught, ["assert add(1, 2) == 'no memory'"], namespaces) == 1.0


@both_ways
def test_memory_that_is_shared_counts(namespaces, user):
    code = (
        "import mmap\ndef size(kind):\n    data = kind(10 << 30)\n    return len(data)\n"
        "def attempts():\n    found = []\n    for kind in (bytearray, lambda n: mmap.mmap(-1, n)):\n        try:\n"
        "            found.append(size(kind))\n        except (OSError, MemoryError):\n            pass\n"
        "    return found\n"
        "def disk():\n    written = 0\n    try:\n        for n in range(20):\n"
        "            with open(f'file{n}', 'wb') as file:\n                written += file.write(bytes(1 << 19))\n"
        "    except OSError:\n        pass\n    return written\n"
    )
    limits = SandboxLimits(wall_seconds=3.0, memory_bytes=512 << 20, file_bytes=1 << 20, disk_bytes=4 << 20)
    tests = ["assert attempts() == []", "assert disk() <= 4 << 20"]
    assert reward_of(code, tests, namespaces, limits=limits) == 1.0


REFUSED = """
import ctypes, errno, fcntl, os, platform, signal, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
arm = platform.machine() == "aarch64"
NAMESPACES = {"mnt": 0x20000, "cgroup": 1 << 25, "uts": 1 << 26, "ipc": 1 << 27, "user": 1 << 28, "pid": 1 << 29,
              "net": 1 << 30}

def clone(flags):
    pid = libc.syscall(220 if arm else 56, flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return pid

def clone3(flags):
    arguments = struct.pack("11Q", flags, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
    pid = libc.syscall(435, arguments, len(arguments))
    if pid == 0:
        os._exit(0)
    return pid

def ioctl(number):
    with open(os.__file__) as file:
        return libc.ioctl(file.fileno(), ctypes.c_ulong(number), ctypes.byref(ctypes.c_long()))

ATTACKS = {
    "shmget": lambda: libc.shmget(0, 4096, 0o1600),
    "shmget of much": lambda: libc.shmget(0, ctypes.c_size_t(2 << 30), 0o1600),
    "shmat": lambda: libc.shmat(0, None, 0),
    "shmctl": lambda: libc.shmctl(0, 13, ctypes.create_string_buffer(256)),
    "semget": lambda: libc.semget(0, 1000, 0o1600),
    "msgget": lambda: libc.msgget(0, 0o1600),
    "mq_open": lambda: libc.mq_open(b"/hacpo-test", os.O_CREAT | os.O_RDWR, 0o600, None),
    "memfd_create": lambda: libc.memfd_create(b"x", 0),
    "memfd_secret": lambda: libc.syscall(447, 0),
    "fspick": lambda: libc.syscall(433, -100, b".", 0),
    "io_uring_setup": lambda: libc.syscall(425, 1, ctypes.create_string_buffer(256)),
    "datagrams": lambda: len(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)),
    "another family": lambda: len(socket.socketpair(30, socket.SOCK_STREAM)),
    "ioctl of files": lambda: ioctl(0x80086601),
    "unshare": lambda: libc.unshare(1 << 28),
    "setns": lambda: libc.setns(os.open("/proc/self/ns/user", os.O_RDONLY), 0),
    **{f"clone {name}": lambda flag=flag: clone(flag) for name, flag in NAMESPACES.items()},
    **{f"clone3 {name}": lambda flag=flag: clone3(flag) for name, flag in NAMESPACES.items()},
    "clone of two": lambda: clone((1 << 28) | (1 << 30)),
}
UNCONTAINED = {
    "F_SETOWN": lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid()),
    "F_SETSIG": lambda: fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL),
    "kill": lambda: os.kill(os.getpid(), 0) or 0,
    "sched_setparam": lambda: libc.sched_setparam(0, ctypes.byref(ctypes.c_int(0))),
    "new calls": lambda: libc.syscall(463, -100, b".", 0, b"user.x", b"", 0),
}

def granted(uncontained):
    found = []
    for name, attack in {**ATTACKS, **(UNCONTAINED if uncontained else {})}.items():
        try:
            ctypes.set_errno(0)
            result = attack()
            if result != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
                found.append((name, result, ctypes.get_errno()))
        except PermissionError:
            pass
        except OSError as error:
            found.append((name, error.errno))
    return found

def capabilities():
    return [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapPrm", "CapInh"))]
"""


@both_ways
def test_what_the_filter_refuses(namespaces, user):
    """Memory that no limit counts, namespaces by every way to them, and what reaches others' processes and devices."""
    tests = [f"assert granted({not namespaces}) == [], granted({not namespaces})"]
    tests += ["assert capabilities() == ['0' * 16] * 3"]
    assert reward_of(REFUSED, tests, namespaces) == 1.0


@both_ways
def test_files_are_not_written_outside_and_do_not_remain(namespaces, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    tmp_path.chmod(0o777)
    existing = tmp_path / "existing"
    existing.write_text("kept")
    existing.chmod(0o666)
    shared = [f"{folder}/hacpo-test-written" for folder in ("/tmp", "/dev/shm", "/var/tmp")]
    places = [str(tmp_path / "new"), *shared]
    code = (
        f"import os\nplaces = {places!r}\nexisting = {str(existing)!r}\n"
        "def attempts():\n    written = []\n    for place in places:\n        try:\n"
        "            open(place, 'w').write('x')\n"
        "            written.append(place)\n        except OSError:\n            pass\n"
        "    for attack in (lambda: open(existing, 'w'), lambda: os.remove(existing),\n"
        "                   lambda: os.truncate(existing, 0), lambda: os.chmod(existing, 0),\n"
        "                   lambda: os.rename(existing, existing + '2')):\n"
        "        try:\n            attack()\n            written.append(existing)\n"
        "        except OSError:\n            pass\n"
        "    return written\n"
        "def large():\n    try:\n        with open('large', 'wb') as file:\n            file.write(bytes(64 << 20))\n"
        "        return True\n    except OSError:\n        return False\n"
    )
    assert reward_of(code, ["assert attempts() == []", "assert not large()"], namespaces) == 1.0
    assert existing.read_text() == "kept"
    assert not any(Path(place).exists() for place in places)
    assert list(temporary.iterdir()) == []


def has_namespaces():
    program = (
        f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({0x20000 if os.geteuid() == 0 else 0x10020000}))"
    )
    return subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.skipif(not has_namespaces(), reason="the system grants no namespaces")
def test_namespaces_give_a_directory_and_hide_the_rest():
    code = (
        "import os\ndef add(a, b):\n    open('note', 'w').write(str(a + b))\n    return int(open('note').read())\n"
        "def around():\n    processes = [name for name in os.listdir('/proc') if name.isdigit()]\n"
        "    return os.getpid(), sorted(processes), os.path.exists('/proc/net/dev') and open('/proc/net/dev').read()\n"
    )
    tests = ["pid, processes, devices = around()", "assert pid == 2", "assert processes == ['1', '2']"]
    tests += ["assert 'lo' in devices and devices.count(':') == 1"]
    assert reward_of(code, TESTS + tests) == 1.0


@both_ways
def test_no_socket_reaches_a_server(namespaces):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        code = (
            "import socket\ndef reach():\n    try:\n"
            f"        socket.create_connection(('127.0.0.1', {port}), timeout=1).send(b'hello')\n"
            "        return 'sent'\n    except OSError as error:\n        return type(error).__name__\n"
        )
        assert reward_of(code, ["assert reach() == 'PermissionError'"], namespaces) == 1.0
        with pytest.raises(TimeoutError):
            server.accept()


@both_ways
def test_no_datagram_reaches_a_socket_of_the_machine(namespaces, tmp_path, user):
    """As those of the system's log, which anybody may write to."""
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.settimeout(0.1)
        path = str(tmp_path / "log")
        server.bind(path)
        os.chmod(path, 0o666)
        code = (
            "import socket\nkinds = (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET)\n"
            "def reach():\n    for kind in kinds:\n"
            "        try:\n            ours, theirs = socket.socketpair(socket.AF_UNIX, kind)\n"
            f"            ours.sendto(b'read', {path!r})\n"
            f"            ours.sendmsg([b'read'], [], 0, {path!r})\n"
            "        except OSError:\n            pass\n    return 'done'\n"
        )
        assert reward_of(code, ["assert reach() == 'done'"], namespaces) == 1.0
        with pytest.raises(TimeoutError):
            server.recv(100)


def test_environment_of_the_trainer_is_not_visible(monkeypatch):
    monkeypatch.setenv("HACPO_TEST_SECRET", "s3cret")
    code = "import os\ndef secret():\n    return os.environ.get('HACPO_TEST_SECRET')\n"
    assert reward_of(code, ["assert secret() is None"]) == 1.0


def test_a_trainer_with_many_open_files_can_use_it():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2000:
        pytest.skip("not as many files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2000), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert reward_of(RIGHT) == 1.0
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_output_without_end_is_cut():
    reward = CodeReward(limits=SandboxLimits(wall_seconds=3.0, output_bytes=1 << 16))
    start = time.monotonic()
    assert reward(["```python\nwhile True:\n    print('x' * 1000)\n```"], inputs=[["1"]], outputs=[["1"]]) == [0.0]
    assert time.monotonic() - start < 3.0


def test_nothing_is_run_where_the_sandbox_cannot_be_set_up(monkeypatch):
    # The directory is gone when the launcher looks for it.
    monkeypatch.setattr(os, "chmod", lambda path, mode: os.rmdir(path))
    with pytest.raises(SandboxError, match="no code was run: FileNotFoundError"):
        reward_of(RIGHT)
    monkeypatch.undo()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(OSError, match="knows x86_64 and aarch64, not riscv64"):
        sandbox.seccomp_program(contained=True)
    with pytest.raises(ValueError, match="memory_bytes is 0"):
        SandboxLimits(memory_bytes=0)


def test_rows_without_tests_are_skipped_and_columns_are_checked():
    metrics = {}
    completions = ["```python\nx = 1\n```"] * 3
    rewards = code_reward(completions, test_list=[None, [], ["assert x"]], log_metric=metrics.__setitem__)
    assert rewards == [None, None, 1.0]
    assert 0.0 < metrics["code_reward/seconds"] < 5.0
    assert code_reward.__name__ == "code_reward"
    with pytest.raises(ValueError, match=r"needs a dataset column 'test_list'.*: answer"):
        code_reward(["x = 1"], answer=["1"])
    with pytest.raises(ValueError, match="2 inputs but 1 outputs"):
        code_reward(["x = 1"], inputs=[["1", "2"]], outputs=[["1"]])
    with pytest.raises(ValueError, match="without an 'entry_point'"):
        code_reward(["x = 1"], test=["def check(candidate):\n    pass"])


def test_code_is_found_in_a_completion():
    assert extract_code("Try\n```python\na = 1\n```\nor\n```python\na = 2\n```\nlike\n```\n$ python\n```") == "a = 2\n"
    assert extract_code("```\na = 1\n```") == "a = 1\n"
    assert extract_code("a = 1") == "a = 1"
    assert extract_code("I do not know how") is None
    assert extract_code("") is None
    assert extract_code("```python\n```") is None


ADD, DRAFT = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"
USE = "from answer import add\n\nresult = add(1, 2)\nprint(result)\n"


def block(code, fence="```", info="python", indent=""):
    return "".join(f"{indent}{line}\n" for line in [f"{fence}{info}", *code.splitlines(), fence])


@pytest.mark.parametrize(
    "text",
    [
        block(DRAFT) + "No, it is\n" + block(ADD),
        block(ADD) + "Use it:\n" + block(USE),
        block(ADD) + "It prints\n" + block("3", info=""),
        block(ADD) + block("def add(a, b); a + b; end", info="ruby") + block("$ python add.py", info="bash"),
        block(ADD, info="") + block(USE),
        block(USE) + block("3", info="text") + block(ADD, info=""),
        *(
            block(ADD, info=info)
            for info in ("Python", "python3", "py", "{.python .numberLines}", "PY title=a", " python")
        ),
        *(
            block(ADD, info=info) + block(DRAFT, info="c++")
            for info in ("add.py", "python3.11", "{python}", "ipython3")
        ),
        *(block(ADD, fence) for fence in ("~~~", "````", "~~~~~")),
        block(ADD, "~~~") + block(USE, "````"),
        *("1. This:\n\n" + block(ADD, indent=indent) for indent in ("  ", "   ", "    ", "\t", "        ")),
        "- " + block(ADD, indent="  ").lstrip() + "\n2. Use:\n" + block(USE, indent="   "),
        "10. " + block(ADD, indent="   ").lstrip() + "\n",
        "```python\n    def add(a, b):\n        return a + b\n```\n",
        block(DRAFT) + "No:\n```python\n" + ADD,
        block(ADD) + "~~~\n" + USE,
        block(ADD) + "```\n",
        block(DRAFT) + block(ADD).rstrip() + "<|im_end|>",
        block(ADD).rstrip() + " That is it.\n" + block(USE),
        block(ADD).replace("\n", "\r\n"),
        block("class Add:\n    def add(self):\n        pass\n")
        + block(ADD)
        + block("class C:\n    def add(self):\n        pass\n"),
    ],
)
def test_the_block_that_defines_what_is_tested_is_found(text):
    assert extract_code(text, ["add"]).replace("\r", "").strip() == ADD.strip()


def test_blocks_with_fences_names_and_faults_inside():
    documented = 'def add(a, b):\n    """\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b\n'
    assert extract_code(block(documented), ["add"]) == documented
    shown = 'def add(a, b):\n    return HELP\nHELP = """\n```python\n````python\n``` py\n"""\n'
    assert extract_code(block(shown), ["add"]) == shown
    # A list's text, which stands further left than the list.
    text = 'x = """\na\n   \n  b"""\ndef add(): pass\n'
    assert extract_code(block(text, indent="   "), ["add"]) == text
    assert extract_code("   ```python\n   x = 1\ny = 2\n   ```", []) == "x = 1\ny = 2\n"
    # The last version counts, right or wrong.
    assert extract_code(block(ADD) + block("def add(a, b)\n    return\n"), ["add"]) == "def add(a, b)\n    return\n"
    assert (
        extract_code(block(ADD) + "```python\ndef add(a, b):\n    return (a", ["add"])
        == "def add(a, b):\n    return (a"
    )
    # More of what is tested before later.
    pair = "class Pair:\n    pass\n"
    assert extract_code(block(pair + ADD) + block(DRAFT), ["add", "Pair"]) == pair + ADD
    for code in (
        "add = lambda a, b: a + b\n",
        "add: object = sum\n",
        "async def add(a, b): pass\n",
        "class add: pass\n",
    ):
        assert extract_code(block(code) + block("add == 3\nadded = add(a=1)\n"), ["add"]) == code


def test_a_program_is_the_block_that_reads_and_prints():
    program, use = "n = int(input())\nprint(n + 1)\n", "def solve(n):\n    return n + 1\n\nprint(solve(3))\n"
    for info in ("python", ""):
        assert extract_code(block(program, info=info) + block(use, info=info) + block("4", info=info)) == program
    other = "import sys\nsys.stdout.write(sys.stdin.read())\n"
    assert extract_code(block(program) + block(other)) == other
    assert extract_code(block("print(1)", info="") + block("1", info="")) == "print(1)\n"


def test_the_block_is_chosen_by_what_the_tests_use():
    """Named by the assertions, by `entry_point`, or read from the input."""
    text = block(ADD) + "For example\n" + block("import math\nfound = add(2, 3)\nprint(found, math.pi)\n")
    reward = CodeReward(limits=LIMITS, num_workers=2)
    assert reward([text], test_list=[TESTS], test_setup_code=["import math"]) == [1.0]
    assert reward([text], test=["def check(f):\n    assert f(1, 2) == 3\n"], entry_point=["add"]) == [1.0]
    program = block("print(int(input()) + 1)") + block("print(4)")
    assert reward([program], inputs=[["1"]], outputs=[["2"]]) == [1.0]
