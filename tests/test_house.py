"""The plan of the house: imports run downwards, rooms say what they are, and nothing is too long to read at once."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest


REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "docs"))
import house  # noqa: E402


MODULES = sorted((REPOSITORY / "hacpo_trl").rglob("*.py"))
PROGRAMS = sorted((REPOSITORY / "examples").glob("*.py"))


def test_imports_run_downwards():
    """A circle among rooms has no floors."""
    rooms = house.read_house()
    floors = house.floors_of(rooms)
    assert all(floors[room] > floors[target] for room, targets in rooms.items() for target in targets)
    # The mathematics and the embedded setting stand on the ground: they use no other room.
    assert {room for room in ("algorithm/", "embedded/") if rooms[room]} == set()
    # And nothing uses the command line.
    assert not any("commands/" in targets for targets in rooms.values())


def test_an_arrow_upwards_is_named():
    with pytest.raises(ValueError, match=r"in a circle, among \['agent.py', 'rollouts/'\]"):
        house.floors_of({"agent.py": {"rollouts/"}, "rollouts/": {"agent.py"}, "options/": set()})


def test_every_kind_of_import_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    (tmp_path / "rollouts").mkdir()
    module = tmp_path / "rollouts" / "rows.py"
    module.write_text(
        "import torch\nfrom .. import agent\nfrom ..options.step import StepPlan\nfrom . import rollout\n"
        "import hacpo_trl.config\nfrom hacpo_trl import files\n"
        "def late():\n    from hacpo_trl.trainer import HACPOTrainer\n"
    )
    seen = {target[0] for target in house.imported(module)}
    assert seen == {"agent", "options", "rollouts", "config", "files", "trainer"}


def test_the_picture_is_the_codes():
    drawn = (REPOSITORY / "docs" / "house.svg").read_text(encoding="utf-8")
    assert drawn == house.draw(house.read_house()), "docs/house.svg is old: run `python docs/house.py`"


def test_every_room_says_what_it_is():
    for room in house.read_house():
        assert house.first_sentence(room), room


@pytest.mark.parametrize("path", [*MODULES, *PROGRAMS], ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nothing_is_too_long_to_read(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 600
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            assert node.end_lineno - node.lineno < 400, node.name


def test_the_public_names_are_there_and_come_late():
    program = (
        "import sys, hacpo_trl\n"
        "assert not {'torch', 'transformers', 'trl'} & set(sys.modules)\n"
        "assert hacpo_trl.__all__ == sorted(hacpo_trl.__all__) == dir(hacpo_trl)\n"
        "objects = [getattr(hacpo_trl, name) for name in hacpo_trl.__all__]\n"
        "from hacpo_trl import *\n"
        "assert HACPOTrainer is hacpo_trl.HACPOTrainer and rewards.math_reward and embedded.policy_path\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)
