"""Prints which share of the package's lines the last run of the tests has run, for each room and in all.

What other processes run (launched trainers, workers of rewards, servers) is not counted.
"""

import sys
from collections import defaultdict
from pathlib import Path

from coverage import Coverage


def room_of(file: Path) -> str:
    """The folder below the package that a file lies in; the package's own modules are a room, too."""
    parts = file.parts[file.parts.index("hacpo_trl") :]
    return parts[1] if len(parts) > 2 else "(modules)"


def main():
    coverage = Coverage()
    coverage.load()
    lines: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name in coverage.get_data().measured_files():
        _, statements, _, missing, _ = coverage.analysis2(name)
        of_room = lines[room_of(Path(name))]
        of_room[0] += len(statements) - len(missing)
        of_room[1] += len(statements)
    if not lines:
        sys.exit("There is no coverage data. `make test COVERAGE=1` leaves some.")
    lines["all"] = [sum(column) for column in zip(*lines.values(), strict=True)]
    print(f"{'room':<12} {'lines':>6} {'run':>6}")
    for room, (run, total) in sorted(lines.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{room:<12} {total:>6} {run / total:>6.1%}")


if __name__ == "__main__":
    main()
