"""The code reward's verdicts, and that no attack on its sandbox passes or does harm."""

import os
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


def test_environment_of_the_trainer_is_not_visible(monkeypatch):
    monkeypatch.setenv("HACPO_TEST_SECRET", "s3cret")
    code = "import os\ndef secret():\n    return os.environ.get('HACPO_TEST_SECRET')\n"
    assert reward_of(code, ["assert secret() is None"]) == 1.0


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
