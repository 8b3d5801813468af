"""One self-contained HTML page: each panel as a picture, its numbers as a table beside it."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from .panels import Panel
from .runs import Group


# So many points of a curve are in its table: the first, the last, and some between.
TABLE_POINTS = 5

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 68rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
figure { margin: 0; } img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: .5rem 0; }
th, td { border-bottom: 1px solid #bbb; padding: .15rem .6rem; text-align: right; }
th:first-child, td:first-child, th.text, td.text { text-align: left; }
summary { cursor: pointer; } .scroll { overflow-x: auto; }
@media print { details > * { display: block; } }
"""


def number(value: float) -> str:
    """Four significant digits; whole numbers from 10,000 on."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def table_rows(panel: Panel) -> list[list[str]]:
    """A panel's numbers: for each curve some points, each as `value at x`, with its band where it has one."""
    rows = []
    for subplot in panel.subplots:
        for curve in subplot.curves:
            last = len(curve.x) - 1
            shown = sorted({round(i * last / (TABLE_POINTS - 1)) for i in range(TABLE_POINTS)})
            row = [subplot.title, curve.label]
            for i in shown:
                band = f" [{number(curve.low[i])}, {number(curve.high[i])}]" if curve.low is not None else ""
                row.append(f"{number(curve.y[i])}{band} at {number(curve.x[i])}")
            rows.append(row + [""] * (2 + TABLE_POINTS - len(row)))
    return rows


def _table(panel: Panel) -> str:
    head = ["", "curve", "first", *[""] * (TABLE_POINTS - 2), "last"]
    cells = [f'<th scope="col"{" class=text" if i < 2 else ""}>{html.escape(c)}</th>' for i, c in enumerate(head)]
    body = []
    for row in table_rows(panel):
        columns = [f"<td{' class=text' if i < 2 else ''}>{html.escape(cell)}</td>" for i, cell in enumerate(row)]
        body.append(f"<tr>{''.join(columns)}</tr>")
    caption = f"{panel.y_label} at {panel.x_label}"
    return (
        f'<div class="scroll"><table><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{''.join(cells)}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _section(panel: Panel, picture: Path) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    agents = ", ".join(subplot.title for subplot in panel.subplots)
    lines = sorted({f"{name}: {value:.6g}" for subplot in panel.subplots for name, value in subplot.lines})
    marked = f"<p>Lines: {html.escape('; '.join(lines))}.</p>" if lines else ""
    return (
        f'<section><h2 id="{panel.name}">{html.escape(panel.title)}</h2><p>{html.escape(panel.text)}</p>'
        f'<figure><img alt="{html.escape(panel.title)} for {html.escape(agents)}; numbers in the table below." '
        f'src="data:image/png;base64,{data}"></figure>{marked}'
        f"<details open><summary>The numbers</summary>{_table(panel)}</details></section>"
    )


def _runs(groups: Sequence[Group]) -> str:
    rows = []
    for group in groups:
        args = group.runs[0].args
        seeds = ", ".join(str(run.args.seed) for run in group.runs)
        last = max(int(run.log[-1]["step"]) for run in group.runs)
        cells = [group.label, args.algorithm, ", ".join(group.agents), seeds, str(last)]
        rows.append(f"<tr>{''.join(f'<td class=text>{html.escape(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(
        f"<th class=text scope=col>{name}</th>" for name in ("runs", "algorithm", "agents", "seeds", "updates")
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def write_page(groups: Sequence[Group], panels: Sequence[Panel], pictures: Sequence[Path], path: Path):
    """Writes the page; pictures are part of it."""
    title = "Runs: " + ", ".join(group.label for group in groups)
    several = any(len(group.runs) > 1 for group in groups)
    note = "Curves are means over seeds, bands Student's 95 % intervals over seeds. " if several else ""
    links = " · ".join(f'<a href="#{panel.name}">{html.escape(panel.title)}</a>' for panel in panels)
    sections = "\n".join(_section(panel, picture) for panel, picture in zip(panels, pictures, strict=True))
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><main><h1>{html.escape(title)}</h1>{_runs(groups)}<p>{note}{links}</p>\n{sections}\n</main></body></html>\n",
        encoding="utf-8",
    )
