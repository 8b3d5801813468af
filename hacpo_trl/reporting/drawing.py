"""Draws panels so that they can be read without colour: every curve has a line style and a marker of its own, and its
name at its end."""

from collections.abc import Sequence
from pathlib import Path

from .panels import Panel, Subplot


STYLES = [
    ("-", "o"),
    ("--", "s"),
    ("-.", "^"),
    (":", "D"),
    ((0, (6, 1, 1, 1, 1, 1)), "v"),
    ((0, (1, 3)), "x"),
    ((0, (9, 2)), "P"),
]
# Okabe and Ito's colours, which most colour-blind people tell apart; they also differ in lightness.
COLOURS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
# Of a subplot's height: as far apart are the names of curves at least.
LABEL_GAP = 0.065
LABEL_SIZE = 8

# Inches.
AXES_WIDTH, AXES_HEIGHT = 3.3, 2.5
LEFT, BOTTOM, TOP = 0.75, 0.55, 0.35
LABEL_OFFSET, CHARACTER = 0.12, 0.068


def _spread_out(heights: Sequence[float], low: float, high: float) -> list[float]:
    """Heights for labels, in the same order, at least `LABEL_GAP` of the span apart and, if they fit, within it."""
    gap = LABEL_GAP * (high - low)
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = [0.0] * len(heights)
    floor = low
    for i in order:
        placed[i] = max(heights[i], floor)
        floor = placed[i] + gap
    # What was pushed out at the top pushes back down.
    ceiling = high
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed


def _draw_curves(axes, subplot: Subplot):
    for i, curve in enumerate(subplot.curves):
        line, marker = STYLES[i % len(STYLES)]
        colour = COLOURS[i % len(COLOURS)]
        style = {"linestyle": line, "linewidth": 1.3, "marker": marker, "markersize": 4}
        axes.plot(curve.x, curve.y, color=colour, markevery=max(1, len(curve.x) // 12), **style)
        if curve.low is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.12, linewidth=0)
    for _, value in subplot.lines:
        axes.axhline(value, color="0.45", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_title(subplot.title, fontsize=10, parse_math=False)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)


def _name_curves(axes, subplot: Subplot):
    """Names each curve and line at its end, beside the subplot; after all limits are set."""
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    ends = [
        (curve.label, curve.x[-1], curve.y[-1], COLOURS[i % len(COLOURS)]) for i, curve in enumerate(subplot.curves)
    ]
    ends += [(label, right, value, "0.35") for label, value in subplot.lines]
    heights = _spread_out([y for _, _, y, _ in ends], low, high)
    for (label, x, y, colour), height in zip(ends, heights, strict=True):
        axes.annotate(
            label,
            xy=((x - left) / (right - left), (y - low) / (high - low)),
            xytext=(1 + LABEL_OFFSET / AXES_WIDTH, (height - low) / (high - low)),
            xycoords="axes fraction",
            va="center",
            fontsize=LABEL_SIZE,
            color=colour,
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "0.6", "shrinkA": 0, "shrinkB": 0},
            annotation_clip=False,
            # A dollar in a label is a dollar.
            parse_math=False,
        )


def draw(panel: Panel, path: Path):
    """Draws a panel as a PNG. Its subplots have the same scale upwards."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = [name for s in panel.subplots for name in [*(c.label for c in s.curves), *(label for label, _ in s.lines)]]
    right = LABEL_OFFSET + CHARACTER * max(map(len, names)) + 0.1
    gap = right + LEFT - 0.2  # the axis has a name at the first subplot only
    count = len(panel.subplots)
    width, height = LEFT + count * AXES_WIDTH + (count - 1) * gap + right, BOTTOM + AXES_HEIGHT + TOP
    figure, all_axes = pyplot.subplots(1, count, figsize=(width, height), squeeze=False, sharey=True)
    figure.subplots_adjust(
        left=LEFT / width,
        right=1 - right / width,
        bottom=BOTTOM / height,
        top=1 - TOP / height,
        wspace=gap / AXES_WIDTH,
    )
    for axes, subplot in zip(all_axes[0], panel.subplots, strict=True):
        _draw_curves(axes, subplot)
        axes.set_xlabel(panel.x_label, fontsize=9)
        # Shared axes hide the numbers of all subplots but the first; they are far apart here.
        axes.tick_params(labelleft=True)
    all_axes[0][0].set_ylabel(panel.y_label, fontsize=9)
    for axes, subplot in zip(all_axes[0], panel.subplots, strict=True):
        _name_curves(axes, subplot)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
