"""Verdicts of the math reward, and that no answer holds up the others."""

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from hacpo_trl.rewards import MathReward, worker_pool
from hacpo_trl.rewards.math_text import final_answer, last_boxed
from hacpo_trl.rewards.worker_pool import ItemFailure, WorkerPool


DATA = Path(__file__).parents[1] / "data"
TOWER = r"\boxed{9^{9^{9^9}}}"

# Gold, content of the box.
RIGHT = [
    ("1/2", "0.5"), ("0.5", "1/2"), (r"\frac{1}{2}", r"\frac12"), (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"137 \frac{1}{2}", "137.5"), ("1.5", r"1\frac{1}{2}"), (".5", "0.50"),
    # percent
    (r"50\%", "0.5"), ("0.5", r"50\%"), ("50%", "50"), ("50", r"50 \%"), ("62.5%", r"\frac{5}{8}"),
    ("20", r"20 \text{ percent}"),
    # thousands
    ("1,000", "1000"), ("1000", "1,000"), ("1000", "1{,}000"), ("1000", r"1,\!000"), ("1000", r"1\,000"),
    ("120,240", "240, 120"), (r"\$32,\!348", "32348"),
    # names
    ("5", "x=5"), ("x=5", "5"), ("f(x)=2x", "2x"), ("y = 2x + 3", "2x+3"), (r"x \in [-2,7]", "[-2,7]"),
    ("(1,2)", "(x,y)=(1,2)"), ("(1,2)", "x=1, y=2"), ("3", "x = 6/2 = 3"),
    # text
    ("A", r"\text{(A)}"), (r"\text{(A)}", "A"), ("C", r"\textbf{C}"), (r"\text{Evelyn}", "Evelyn"),
    (r"\text{even}", r"\text{Even}"),
    # roots, constants, decimals
    (r"\sqrt{50}", r"5\sqrt{2}"), (r"5\sqrt{2}", "7.07107"), ("1/3", "0.333333"), (r"\pi", "3.14159"),
    ("100", "100.0"),
    ("7", "7."), ("25", r"\sqrt{625}"), ("4.5e33", r"4.5 \times 10^{33}"), ("1e-5", "0.00001"), ("0", "0.0"),
    # degrees and units
    (r"90^\circ", "90"), ("90", r"90^{\circ}"), ("90", "90°"), ("90", r"90 \text{ degrees}"),
    ("10", r"10\,\mathrm{cm}"),
    (r"10 \text{ cm}", "10"), ("10", "10 cm"), ("10", "10 m"), (r"15\mbox{ cm}^2", "15"),
    (r"12\pi", r"12\pi \text{ units}^2"),
    ("6m", "6m"), ("18.90", r"\$18.9"),
    # sets, lists, tuples, intervals
    ("1,2,3", "3,2,1"), (r"\{1,2,3\}", r"\{3,1,2\}"), (r"\{1,2\}", "2, 1"), ("1,2", r"1 \text{ and } 2"),
    ("1,2", "1 or 2"),
    ("7,9", "9; 7"), ("2", r"\{2\}"), (r"1\pm\sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    ("(1,2)", r"\left( 1, 2 \right)"),
    ("(1,2)", "1,2"), ("(2,3),(3,2)", "(3,2), (2,3)"), (r"(3,\frac{\pi}{2})", r"\left(3,\dfrac{\pi}{2}\right)"),
    (r"(-\infty,3]", r"x \le 3"), (r"(0,1) \cup (2,3)", r"(2,3)\cup(0,1)"), ("$69$,$84$", "84, 69"),
    # expressions
    ("2k+2", "2(k+1)"), (r"\binom{2n}{n}", r"\frac{(2n)!}{(n!)^2}"), (r"\cot x", r"\frac{\cos x}{\sin x}"),
    ("6-5i", "-5i+6"), ("y = 2x + 3", "y - 2x = 3"),
    (r"\lfloor n/2 \rfloor", r"\left\lfloor \frac{n}{2} \right\rfloor"),
    (r"\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}", r"\begin{bmatrix} 0.5 \\ 2 \end{bmatrix}"),
    ("E_{1},E_{2}", "E_2, E_1"), ("np.arcsin(10/13)", r"\arcsin(10/13)"), (r"k \geqslant 2", r"k \ge 2"),
    # other bases
    ("52_8", "52_{8}"), ("52_8", "52"), ("42", "52_8"),
    # characters
    ("42", "4\u200b2\ufeff"), ("-3", "−3"), (r"\sqrt{2}", "√2"), (r"2\pi", "2π"), ("x^2", "x²"),
    # boxes
    ("5", r"\boxed{5}"), (r"\frac{1}{\frac{2}{3}}", r"\frac{3}{2}"),
]  # fmt: skip
WRONG = [
    ("0.5", "50"), ("50", "0.5"), (r"50\%", r"5\%"), ("62.5%", "6.25"), (r"\frac{1}{2}", r"\frac{2}{1}"),
    ("1000", "1,00"),
    ("x=5", "y=5"), ("x=5", "x=6"), ("A", r"\text{(B)}"), (r"\text{east}", r"\text{west}"), ("3", r"\text{three}"),
    ("(1,2)", "[1,2]"), ("[1,2]", "(1,2)"), ("[1,2)", "[1,2]"), ("(1,2)", "(2,1)"), ("1,2", "1"), ("1,2", "1,2,3"),
    ("2", "2,2"), ("5", r"5 \text{ or } 6"), (r"\{1,2\}", "[1,2]"), ("(2,3),(3,2)", "(2,3),(2,3)"),
    (r"(0,1) \cup (2,3)", r"(0,1)\cup(2,4)"), (r"1\pm\sqrt{19}", r"1+\sqrt{19}"), (r"\sqrt{50}", r"5\sqrt{3}"),
    ("1/3", "0.33"), (r"\pi", "3.14"), ("100", "99.9999"), ("1000000", "1000001"), ("1e-5", "1.2e-5"),
    ("2.88e-19", "0"),
    ("0", "0.0000001"), ("4.5e33", "4.6e33"), (r"90^\circ", r"80^\circ"), ("6m", "6"), ("2t", "2"), ("5", "5x"),
    (r"\frac{1}{\sqrt{2}}c", r"\frac{1}{\sqrt{2}}"), ("0", "M-m"), ("2k+2", "2k+1"), ("6-5i", "6+5i"),
    ("p - q", "q - p"),
    (r"k \ge 2", "k > 2"), ("52_8", "52_9"), ("52", "52_8"), ("2016", "2016!"), (r"\infty", r"-\infty"), ("-3", "3"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}"), ("2^k", "2^{k+1}"),
    ("1", r"\frac{0}{0}"),
    ("1", " "), ("7", "%"), ("7", "{,}"), ("7", "="),
]  # fmt: skip


@pytest.fixture(scope="module")
def reward():
    reward = MathReward(num_workers=2)
    yield reward
    reward.close()


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_equal_answers(reward, gold, answer):
    assert reward([rf"So it is \boxed{{{answer}}}."], answer=[gold]) == [1.0]


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_different_answers(reward, gold, answer):
    assert reward([rf"So it is \boxed{{{answer}}}."], answer=[gold]) == [0.0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        # Two that say different things are none; thoughts are no answers, finished or not.
        (r"First \boxed{7}, but then \boxed{42}.", 0.0),
        (r"First \boxed{42}, but then \boxed{7}.", 0.0),
        (r"\boxed{42}. We check: \boxed{42.}", 1.0),
        (r"<think>\boxed{7}?</think> It is \boxed{42}.", 1.0),
        (r"\boxed{7}?</think> It is \boxed{42}.", 1.0),
        (r"<think>\boxed{42}</think> It is \boxed{7}.", 0.0),
        (r"<think>\boxed{42}</think> It is so.", 0.0),
        (r"<think>It must be \boxed{42}", 0.0),
        (r"\boxed{42} <think>or rather \boxed{7}", 1.0),
        (r"\boxed{\boxed{42}}", 1.0),
        (r"\boxed {42}", 1.0),
        (r"\fbox{42}", 1.0),
        (r"\boxed{\frac{84}{\sqrt{{4}}}}", 1.0),
        ("The answer is 42.", 0.0),
        ("", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{42", 0.0),  # the beginning of an answer that was cut off
        (r"\boxed{42} or rather \boxed{4", 0.0),
        (r"\boxed", 0.0),
        (r"\boxed{42}" + " and so on" * 10_000, 1.0),
        (r"\boxed{" + "4" * 100_000 + "}", 0.0),
        (r"\boxed{" + "{" * 50_000 + "42" + "}" * 50_000 + "}", 0.0),
        (r"\boxed{42" + "{" * 100_000, 0.0),
        (r"\boxed{" * 15_000 + "42" + "}" * 15_000, 1.0),
    ],
    ids=lambda value: str(value)[:24],
)
def test_which_box_counts(reward, completion, expected):
    assert reward([completion], answer=["42"]) == [expected]


def test_boxes_side_by_side_are_one_answer(reward):
    completions = [r"$\boxed{1}$ and $\boxed{2}$", r"\boxed{2}, \boxed{1}", r"\boxed{1}. So \boxed{2}", r"\boxed{1}"]
    assert reward(completions, answer=["1,2"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert reward([r"$\boxed{1}$ and $\boxed{2}$"], answer=["2"]) == [0.0]


def test_braces_are_counted_as_latex_counts_them():
    assert last_boxed(r"\boxed{\left\{ x : \frac{1}{2} \right.} and }") == r"\left\{ x : \frac{1}{2} \right."
    assert last_boxed(r"\boxed{\{1,2\}}") == r"\{1,2\}"
    assert last_boxed(r"\boxed 5") == "5"
    assert last_boxed(r"\boxedtext{5}") is None


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"\boxed{42}", 1.0),
        ("The final answer is 42.", 1.0),
        ("We have 7 and 3.\n#### 42", 1.0),
        ("Answer: $x = 42$, since 6 times 7.", 1.0),
        (r"Hence \(\frac{84}{2}\)", 1.0),
        ("42 it is, or perhaps 7", 0.0),
        (r"The final answer is 42. \boxed{7}", 0.0),
        (r"The final answer is 42. \boxed{4", 0.0),
        ("<think>The answer is 7.</think> The answer is 42.", 1.0),
        ("<think>The answer is 42.", 0.0),
        ("I do not know", 0.0),
    ],
)
def test_any_final_answer(completion, expected):
    assert final_answer("The answer is east.") == "east"
    lenient = MathReward(strict_boxed=False, num_workers=1)
    assert lenient([completion], solution=["42"]) == [expected]
    lenient.close()


def test_gold_in_every_form(reward):
    golds = [
        6,
        "6",
        "$6$",
        "#### 6",
        r"We find \boxed{6}.",
        ["7", "6"],
        ["six", r"\frac{12}{2}"],
        r"6 \text{ apples}",
        6.0,
    ]
    assert reward([r"\boxed{6}"] * len(golds), answer=golds) == [1.0] * len(golds)
    assert reward([r"\boxed{8}"] * len(golds), answer=golds) == [0.0] * len(golds)


def test_a_gold_that_cannot_be_read_is_skipped(reward):
    golds = ["", None, float("nan"), "  ", "$$", r"\boxed{}", r"\frac{1}{", r"\boxed{4", [], ["", None], "t(0,4]"]
    golds.append("see the proof that was given in the text above")
    completions = [rf"\boxed{{{gold}}}" if isinstance(gold, str) else r"\boxed{1}" for gold in golds]
    assert reward(completions, answer=golds) == [None] * len(golds)


def test_benchmark_golds_equal_themselves_and_not_the_next(reward):
    answers = [json.loads(line)["answer"] for line in (DATA / "benchmark_rows.jsonl").read_text().splitlines()]
    boxed = [rf"\boxed{{{answer}}}" for answer in answers]
    assert reward(boxed, answer=answers) == [1.0] * len(answers)
    assert reward(boxed[1:] + boxed[:1], answer=answers) == [0.0] * len(answers)


def test_form_of_a_reward_function(reward):
    columns, metrics = {}, {}
    completions = [[{"role": "assistant", "content": r"\boxed{1}"}], [{"role": "assistant", "content": "none"}]]
    values = reward(
        completions,
        prompts=["1?", "2?"],
        answer=["1", ""],
        solution=["7", "7"],
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert values == [1.0, None]  # the column `answer` comes first
    assert columns == {"gold_parsed": ["1", "[unreadable]"], "answer_parsed": ["1", "[none]"]}
    assert 0.0 < metrics["math_reward/seconds"] < 5.0
    assert metrics["math_reward/timeouts"] == 0.0
    assert reward.__name__ == "math_reward"
    assert pickle.loads(pickle.dumps(reward)).num_workers == 2
    with pytest.raises(
        ValueError, match="needs a dataset column 'answer' or 'solution'; the other columns are: label"
    ):
        reward(completions, label=["1", "2"])
    with pytest.raises(ValueError, match="2 completions but 1 gold"):
        reward(completions, answer=["1"])
    with pytest.raises(TypeError, match="A completion is 3"):
        reward([3], answer=["1"])


def test_1000_answers_with_20_pathological_ones_from_a_thread(caplog):
    golds = [str(number if number % 3 else number + 1) for number in range(1000)]
    completions = [TOWER if number % 50 == 7 else rf"\boxed{{{number}}}" for number in range(1000)]
    expected = [0.0 if number % 50 == 7 or number % 3 == 0 else 1.0 for number in range(1000)]
    reward = MathReward(timeout=1.0, num_workers=2)
    reward([r"\boxed{1}"], answer=["1"])
    found = {}

    def score():
        start = time.monotonic()
        found["rewards"] = reward(completions, answer=golds)
        found["seconds"] = time.monotonic() - start

    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=score)
        thread.start()
        thread.join()
    reward.close()
    assert found["rewards"] == expected
    # 20 limits of 1 s on 2 workers; the rest is for 980 easy answers and what a busy machine adds.
    assert 9.0 < found["seconds"] < 25.0
    assert "20 of 1000 answers got no verdict" in caplog.text


def test_an_unreadable_gold_is_skipped_also_when_the_answer_is_pathological():
    reward = MathReward(timeout=0.5, num_workers=1)
    assert reward([TOWER, TOWER, r"\boxed{2}"], answer=["", "7", "2"]) == [None, 0.0, 1.0]
    reward.close()


# The pool itself, with a file of functions that misbehave.
FUNCTIONS = """
import os, signal, sys, time
def act(item):
    if item == "modules":
        return sorted(sys.modules)
    if item == "pid":
        return os.getpid()
    if item == "raise":
        raise KeyError("no")
    if item == "die":
        os._exit(1)
    if item == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "memory":
        return len(bytearray(8 << 30))
    if item == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if item == "hang":
        return len(str(7 ** (10 ** 9)))
    if item == "print":
        print("noise", flush=True)
    return item
"""


@pytest.fixture
def pool(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    pool = WorkerPool(tmp_path / "functions.py", ("act",), num_workers=2, timeout=0.5)
    yield pool
    pool.close()


def test_a_hang_is_no_crash_for_a_reader_who_is_late(tmp_path, monkeypatch):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    pool = WorkerPool(tmp_path / "functions.py", ("act",), num_workers=1, timeout=0.5)
    assert pool.map("act", ["a"]) == ["a"]
    delays = [0.3]

    def late(connections, timeout):
        time.sleep(delays.pop() if delays else 0)
        return wait(connections, timeout)

    monkeypatch.setattr(worker_pool, "wait", late)
    # One chunk holds the first two: "hang" begins when "a" is done, 0.3 s before that is read.
    assert pool.map("act", ["a", "hang", "b"]) == ["a", ItemFailure("timeout"), "b"]
    pool.close()


def test_pool_keeps_order_and_replaces_what_dies(pool):
    items = ["a", "die", "b", "raise", "kill", "c", "hang", "print", *map(str, range(100)), "memory"]
    results = pool.map("act", items)
    failures = {items[index]: result for index, result in enumerate(results) if isinstance(result, ItemFailure)}
    assert failures == {
        "die": ItemFailure("crash"),
        "kill": ItemFailure("crash"),
        "raise": ItemFailure("error", "KeyError: 'no'"),
        "hang": ItemFailure("timeout"),
        "memory": ItemFailure("error", "MemoryError: "),
    }
    assert [r for r in results if not isinstance(r, ItemFailure)] == [i for i in items if i not in failures]
    assert pool.map("act", []) == []
    with pytest.raises(ValueError, match="runs act, not 'other'"):
        pool.map("other", ["a"])


def test_workers_are_reused_and_light(pool):
    pids = set(pool.map("act", ["pid"] * 50))
    assert len(pids) <= 2 and os.getpid() not in pids
    assert set(pool.map("act", ["pid"] * 50)) == pids
    [modules] = pool.map("act", ["modules"])
    assert not {"torch", "transformers", "trl", "hacpo_trl"} & set(modules)


def test_a_stopped_worker_is_given_up(pool, monkeypatch):
    monkeypatch.setattr("hacpo_trl.rewards.worker_pool.GRACE_SECONDS", 0.5)
    assert pool.map("act", ["a", "stop", "b", "c"]) == ["a", ItemFailure("timeout"), "b", "c"]


def test_the_template_may_die_between_calls(pool):
    pool.map("act", ["a"])
    os.killpg(pool._template.process.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert pool.map("act", ["a", "b", "c"]) == ["a", "b", "c"]


def test_calls_from_several_threads_take_turns(pool):
    results = {}

    def work(number):
        results[number] = pool.map("act", [f"{number}-{index}" for index in range(200)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[number] == [f"{number}-{index}" for index in range(200)] for number in range(4))


def test_a_file_that_cannot_be_loaded_is_an_error(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module")
    with pytest.raises(RuntimeError, match="ended before it was ready"):
        WorkerPool(tmp_path / "broken.py", ("act",), num_workers=1).map("act", ["a"])
    with pytest.raises(ValueError, match="timeout is 0"):
        MathReward(timeout=0)
    with pytest.raises(ValueError, match="num_workers is 0"):
        MathReward(num_workers=0)


PROGRAM = r"""
import os, sys
from hacpo_trl.rewards import math_reward
math_reward([r"\boxed{1}"], answer=["1"])
print(math_reward._pool._template.process.pid, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


def group_is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("end", ["exits", "killed"])
def test_workers_end_with_their_program(end):
    # The program has no `if __name__ == "__main__"`, as many training scripts.
    root = Path(__file__).parents[2]
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", PROGRAM, end], cwd=root, capture_output=True, text=True, timeout=60)
    assert result.returncode == (0 if end == "exits" else -signal.SIGKILL), result.stderr
    group = int(result.stdout)
    while group_is_alive(group) and time.monotonic() - start < 30:
        time.sleep(0.1)
    assert not group_is_alive(group)


def test_a_forked_child_does_not_touch_the_workers_of_its_parent(pool):
    parent_pids = set(pool.map("act", ["pid"] * 20))
    child = os.fork()
    if child == 0:
        values = pool.map("act", ["pid", "a"])
        correct = values[1] == "a" and values[0] not in parent_pids
        pool.close()
        os._exit(0 if correct else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(pool.map("act", ["pid"] * 20)) == parent_pids
