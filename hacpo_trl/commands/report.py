"""Makes a page of pictures and tables from the logs of runs:

    hacpo report outputs/tiny
    hacpo report HACPO=outputs/h1,outputs/h2,outputs/h3 GSPO=outputs/g1,outputs/g2,outputs/g3

Several groups of runs are overlaid; the runs of one group, `LABEL=FOLDER,FOLDER,...`, are seeds of the same settings,
drawn as their mean with an interval. It writes `index.html`, which needs no other file, and each picture as a PNG.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from .errors import CommandParser, user_errors


def main(argv: Sequence[str] | None = None):
    parser = CommandParser(
        prog="hacpo report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an output_dir, or LABEL=FOLDER,FOLDER,...")
    parser.add_argument("--output", type=Path, default=Path("outputs/report"), help="where page and pictures go")
    args = parser.parse_args(argv)
    from ..reporting.drawing import draw
    from ..reporting.page import write_page
    from ..reporting.panels import panels_of
    from ..reporting.runs import read_group

    with user_errors():
        groups = [read_group(text) for text in args.runs]
        labels = [group.label for group in groups]
        if len(set(labels)) < len(labels):
            raise ValueError(f"two groups share a label: {', '.join(labels)}. Name them: LABEL=FOLDER.")
    args.output.mkdir(parents=True, exist_ok=True)
    panels = panels_of(groups)
    pictures = [args.output / f"{panel.name}.png" for panel in panels]
    for panel, picture in zip(panels, pictures, strict=True):
        draw(panel, picture)
    page = args.output / "index.html"
    write_page(groups, panels, pictures, page)
    print(page)


if __name__ == "__main__":
    main()
