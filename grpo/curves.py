"""The curves of runs as panels of inline SVG, by matplotlib, which is optional and imported only to draw.

The same numbers give the same bytes: a fixed hash salt, text as text, nobody's own style.
"""

import io
import math
import re
from collections.abc import Callable
from statistics import fmean

from grpo.history import RunData, dead_stretches

COLORS = "#3b82f6 #e8710a #1a9c5b #d6409f #8b5cf6 #0e9fb3 #b8860b #ef4444 #7c8794 #7d9b10".split()  # one a run
STYLES = ("solid", "dashed", "dotted") * 4  # of lines: for eyes that colours do not tell apart
CLASSES = {"mixed": "#1a9c5b", "all_correct": "#93c5fd", "all_wrong": "#fbbf24", "all_failed": "#991b1b"}
SHARES = [f"groups/{name}_ratio" for name in CLASSES]
VAL = "val/execution_accuracy"
POINTS = 300  # of a curve, at most


def evenly(items: list, count: int) -> list:
    """So many of the items, evenly spaced, with the first and the last. Example: 0 to 4, 3 -> 0, 2, 4"""
    count = min(count, len(items))
    return [items[i * (len(items) - 1) // max(count - 1, 1)] for i in range(count)]


def thin(rows: list[dict], name: str) -> tuple[list[float], list[float]]:
    """(steps, values) of a curve, NaN where there is none: the first, the last, and means of bins between them.

    Means and not every n-th value, so that a dead stretch pulls a share down wherever it lies.
    """
    rows = [row for row in rows if name in row]
    cuts = evenly([*range(1, len(rows))], POINTS - 1)  # where the rows are few, each is a bin
    bins = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True) if rows]
    known = [[row[name] for row in part if row[name] is not None] for part in bins]
    return [fmean(row["step"] for row in part) for part in bins], [fmean(part) if part else math.nan for part in known]


def paint_curve(axes: object, name: str, runs: list[RunData]) -> None:
    """One metric of all runs, with its interval as a band where it has one."""
    for run, style, color in zip(runs, STYLES, COLORS, strict=False):
        steps, values = thin(run.rows, name)
        axes.plot(steps, values, color=color, linestyle=style, linewidth=1.2, marker="." if len(steps) < 20 else "")
        if name == VAL:
            low, high = (thin(run.rows, f"{VAL}_{end}")[1] for end in ("low", "high"))
            axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)


def paint_classes(axes: object, run: RunData) -> None:
    """The classes of groups, stacked, and a bar above them for every dead stretch."""
    rows = [dict.fromkeys(SHARES, 0.0) | row for row in run.rows if SHARES[0] in row]
    steps, _ = thin(rows, SHARES[0])
    axes.stackplot(steps, *(thin(rows, name)[1] for name in SHARES), colors=CLASSES.values(), step="mid")
    dead = [(steps[0] - 0.5, steps[-1] - steps[0] + 1) for steps in dead_stretches(run)]
    axes.broken_barh(dead, (1.03, 0.06), color="black", linewidth=0.5)  # a line: one step of many stays visible


def draw(paint: Callable, *arguments: object) -> str:
    """A panel as SVG inside a page: text stays text, black becomes the text's colour, no ids that two could share."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not anybody's own style
        matplotlib.rcParams.update({"svg.hashsalt": "grpo", "svg.fonttype": "none", "axes.formatter.limits": (-3, 4)})
        panel = Figure(figsize=(4.6, 2.2))
        paint(panel.add_axes((0.11, 0.12, 0.87, 0.78)), *arguments)
        panel.savefig(text := io.StringIO(), format="svg", transparent=True)
    svg = re.sub(r'<metadata>.*?</metadata>|(?<=<g) id="[^"]*"', "", text.getvalue(), flags=re.DOTALL)
    return svg[svg.index("<svg") :].replace("<svg", '<svg aria-hidden="true"', 1).replace("#000000", "currentColor")
