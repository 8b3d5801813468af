"""Draws the house: which room of `hacpo_trl/` imports which, as read from the code.

    python docs/house.py    # writes docs/house.svg

A room is a folder, or a module beside them. Rooms stand on floors: each above all that it imports, so that no arrow
points up; an import that runs in a circle is an error that names it. Imports for type checking alone count, too.
"""

import ast
import html
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path


REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "hacpo_trl"
# Their imports say nothing: the package's face, and modules that only give a command its old name.
FACES = {"__init__", "__main__", "evaluate", "recipes", "report", "serve", "train"}

WIDTH, BOX_WIDTH, BOX_HEIGHT, FLOOR_HEIGHT = 960, 262, 54, 92
FONT = "font-family='Helvetica, Arial, sans-serif'"


def room_of(module: tuple[str, ...]) -> str:
    """The room of a module, by its path within the package: `("rollouts", "rows")` is in `rollouts/`."""
    return module[0] + ("/" if (PACKAGE / module[0]).is_dir() else ".py")


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """The modules of this package that a file imports, by their path within it."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = here[: len(here) - node.level]
                target = (*base, *(node.module.split(".") if node.module else ()))
            elif node.module and node.module.split(".")[0] == "hacpo_trl":
                target = tuple(node.module.split(".")[1:])
            else:
                continue
            # `from . import x` and `from hacpo_trl import x` name modules behind the `import`.
            yield from [target] if target else [(alias.name,) for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("hacpo_trl."):
                    yield tuple(alias.name.split(".")[1:])


def read_house() -> dict[str, set[str]]:
    """For each room the rooms that it imports."""
    house: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").parts
        if module[0] in FACES:
            continue
        room = room_of(module)
        targets = {room_of(target) for target in imported(path) if target[0] not in FACES and target[0] != "version"}
        house.setdefault(room, set()).update(targets - {room})
    house.pop("version.py")
    return house


def floors_of(house: Mapping[str, set[str]]) -> dict[str, int]:
    """The floor of each room, 0 for those that import none.

    Raises:
        ValueError: if rooms import each other in a circle; it names them.
    """
    floors: dict[str, int] = {}
    while len(floors) < len(house):
        ready = [room for room in house if room not in floors and house[room] <= floors.keys()]
        if not ready:
            raise ValueError(f"Rooms import each other in a circle, among {sorted(house.keys() - floors.keys())}.")
        floors |= {room: 1 + max((floors[target] for target in house[room]), default=-1) for room in ready}
    return floors


def reachable(house: Mapping[str, set[str]], room: str) -> set[str]:
    """The rooms that a room imports, directly or through others."""
    return house[room].union(*(reachable(house, target) for target in house[room]))


def first_sentence(room: str) -> list[str]:
    """What a room says of itself first, in two short lines."""
    path = PACKAGE / room / "__init__.py" if room.endswith("/") else PACKAGE / room
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = docstring.split("\n\n")[0].replace("\n", " ").replace("`", "")
    line = re.split(r"[;(]|, and |, in the |\. ", line)[0].strip(" .")
    # What comes behind a colon is detail, unless there is but a name in front of it.
    if " " in line.split(": ")[0]:
        line = line.split(": ")[0]
    return textwrap.wrap(line, 50, max_lines=2, placeholder=" …")


def draw(house: Mapping[str, set[str]]) -> str:
    """The picture, as SVG: strong arrows to what no other room leads to, faint ones to the rest."""
    floors = floors_of(house)
    top = max(floors.values())
    height = (top + 1) * FLOOR_HEIGHT + 24
    place: dict[str, tuple[float, float]] = {}
    for floor in range(top + 1):
        rooms = sorted(room for room in house if floors[room] == floor)
        for i, room in enumerate(rooms):
            # Floors with one room take turns in standing a little left and right: arrows then pass beside them.
            shift = 0 if len(rooms) > 1 else (-60 if floor % 2 else 60)
            place[room] = ((i + 0.5) * WIDTH / len(rooms) + shift, 12 + (top - floor + 0.5) * FLOOR_HEIGHT)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' {FONT}>",
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>",
    ]
    for strong in (False, True):
        for room, targets in sorted(house.items()):
            for target in sorted(targets):
                implied = any(target in reachable(house, other) for other in targets - {target})
                if implied == strong:
                    continue
                (x, y), (x2, y2) = place[room], place[target]
                y, y2 = y + BOX_HEIGHT / 2, y2 - BOX_HEIGHT / 2 - (7 if strong else 0)
                bend = (y2 - y) / 2
                colour, width = ("#334155", 1.6) if strong else ("#cbd5e1", 1)
                parts.append(
                    f"<path d='M{x:g} {y:g} C{x:g} {y + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}' fill='none' "
                    f"stroke='{colour}' stroke-width='{width}'/>"
                )
                if strong:
                    tip = f"{x2 - 4:g},{y2:g} {x2 + 4:g},{y2:g} {x2:g},{y2 + 7:g}"
                    parts.append(f"<polygon points='{tip}' fill='{colour}'/>")
    for room, (x, y) in sorted(place.items()):
        left, up = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
        fill = "#eef2ff" if room.endswith("/") else "#fff7ed"
        parts += [
            f"<rect x='{left:g}' y='{up:g}' width='{BOX_WIDTH}' height='{BOX_HEIGHT}' rx='6' fill='{fill}' "
            "stroke='#64748b'/>",
            f"<text x='{x:g}' y='{y - 8:g}' text-anchor='middle' font-size='15' font-weight='bold' "
            f"fill='#0f172a'>{room}</text>",
        ]
        parts += [
            f"<text x='{x:g}' y='{y + 10 + 11 * i:g}' text-anchor='middle' font-size='9.5' fill='#475569'>"
            f"{html.escape(line)}</text>"
            for i, line in enumerate(first_sentence(room))
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "docs" / "house.svg"
    path.write_text(draw(read_house()), encoding="utf-8")
    print(path)
