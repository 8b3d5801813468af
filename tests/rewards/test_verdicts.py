"""Verdicts on more than a thousand pairs of gold and answer, ours beside those of math-verify alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from math_verify import parse, verify
from verdict_pairs import FAMILIES

from hacpo_trl.rewards.math_verification import judge


def ours(gold: str, answer: str) -> bool:
    return judge(([gold], rf"\boxed{{{answer}}}", True))[0] == 1.0


def math_verify_alone(gold: str, answer: str) -> bool:
    """As its documentation says, with its defaults; both sides in a box."""
    return verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{answer}}}"))


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[tuple[str, str, bool, bool, bool]]]:
    """By family: gold, answer, what is right, ours, math-verify's."""
    return {
        family.__name__: [
            (gold, answer, right, ours(gold, answer), math_verify_alone(gold, answer))
            for gold, answer, right in family()
        ]
        for family in FAMILIES
    }


def counts(rows) -> tuple[int, ...]:
    """Pairs; false positives and false negatives of ours; and of math-verify."""
    errors = [
        sum(row[column] is not row[2] and row[column] is accepted for row in rows)
        for column in (3, 4)
        for accepted in (True, False)
    ]
    return (len(rows), *errors)


def test_the_pairs_are_many_and_each_is_there_once(verdicts):
    pairs = [row[:2] for rows in verdicts.values() for row in rows]
    assert len(set(pairs)) >= 1000
    rights = {}
    for rows in verdicts.values():
        for gold, answer, right, *_ in rows:
            assert rights.setdefault((gold, answer), right) is right, (gold, answer)


def test_no_wrong_answer_is_accepted_that_math_verify_rejects_and_fewer_of_both(verdicts, repository):
    print(f"\n{'':20}pairs  ours: wrong accepted, right refused   math-verify: wrong accepted, right refused")
    for name, rows in verdicts.items():
        n, *errors = counts(rows)
        print(f"{name:20}{n:5}  {errors[0]:10} {errors[1]:14} {errors[2]:30} {errors[3]:14}")
    every = [row for rows in verdicts.values() for row in rows]
    n, accepted, refused, of_math_verify, refused_there = counts(every)
    print(f"{'all':20}{n:5}  {accepted:10} {refused:14} {of_math_verify:30} {refused_there:14}")
    assert [row[:2] for row in every if row[3] and not row[2]] == []
    assert accepted < of_math_verify / 10 and refused < refused_there / 10
    readme = (repository / "README.md").read_text(encoding="utf-8")
    found = re.search(
        r"\| of (\d+) wrong answers, accepted \| (\d+) \| (\d+) \|\n\| of (\d+) right ones, refused", readme
    )
    right = sum(row[2] for row in every)
    assert tuple(map(int, found.groups())) == (n - right, accepted, of_math_verify, right)
    assert f"\n| of {right} right ones, refused | {refused} | {refused_there} |\n" in readme


def test_no_verdict_depends_on_the_order_of_sets(verdicts):
    """Which Python changes from run to run: the same in a process with another seed of hashes."""
    program = """
import json, sys
sys.path[:0] = sys.argv[1:]
from test_verdicts import FAMILIES, ours
print(json.dumps([ours(gold, answer) for family in FAMILIES for gold, answer, _ in family()][::3]))
"""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", program, str(here), str(here.parent)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [row[3] for rows in verdicts.values() for row in rows][::3]
