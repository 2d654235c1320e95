"""report.html: one self-contained page about a run, or several: what it taught, its curves, a reader of its rollouts.

python -m grpo.report runs/quickstart [runs/other ...] [--out FILE]

A killed run is a run: what is missing or torn is named on the page and never raises. What models, databases and users
wrote becomes text by html.escape, or JSON that cannot end its element. The same run gives the same bytes. Curves need
matplotlib, an optional extra; without it the page has their numbers in tables.
"""

import argparse
import html
import json
import re
import sys
from itertools import product
from pathlib import Path
from string import Template

from grpo.curves import CLASSES, COLORS, SHARES, STYLES, VAL, draw, evenly, paint_classes, paint_curve
from grpo.difficulty import gate
from grpo.history import FLAT, RunData, dead_stretches, read_run
from grpo.watch import diagnose
from model.config import write_text

LENGTH = "completions/mean_length"
CURVES = ["reward", "rewards/.+/mean", VAL, "entropy", LENGTH, "completions/clipped_ratio", "kl"]
CURVES += ["clip_ratio/region_mean", "grad_norm", "learning_rate"]
COLUMNS = 20  # of a table of numbers, at most


def escape(value: object) -> str:
    """Anybody's text as HTML; a lone surrogate, which no file can hold, becomes a question mark."""
    return html.escape(str(value).encode("utf-8", "replace").decode())


def embed(value: object) -> str:
    """JSON in ASCII, without the characters that could end a script element or begin markup."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def figure(values: dict, key: str) -> str:
    """A number, with its interval if it has one, or a dash. Example: 0.5, _low 0, _high 1 -> 0.500 [0.000, 1.000]"""
    found = [values[name] for name in (key, f"{key}_low", f"{key}_high") if values.get(name) is not None]
    texts = [f"{x:.3f}" if not x or abs(x) >= 0.001 else f"{x:.2g}" for x in found]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]" if len(texts) == 3 else "".join(texts[:1]) or "–"


def table(caption: str, head: list, rows: list[list]) -> str:
    """A table in a box that scrolls by itself; the first cell of a row names it."""
    lines = "<tr>" + "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    for name, *cells in rows:
        lines += f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    box = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
    return f"{box}<table><caption>{escape(caption)}</caption>{lines}</table></div>" if rows else ""


def describe(run: RunData) -> str:
    """What a run did, in words; the test before and after; the config."""
    steps, total, watch = [row for row in run.rows if FLAT in row], run.config.grpo.max_steps, run.config.watch
    at = f"step {steps[-1]['step'] if steps else 0}" + (f" of {total}" if total > 0 else "")
    lines = [("verdict", run.summary.get("verdict") or f"running (or killed), {at}")]
    if (finding := diagnose(steps, watch, run.config.reward.weights)) and finding.reason not in lines[0][1]:
        lines.append(("finding", f"The last steps: {finding}"))
    k = run.config.eval.num_generations
    needed = (VAL, f"{VAL}_low", f"{VAL}_high", f"val/pass@{k}")
    for start in (row for row in run.rows[:1] if None not in map(row.get, needed)):  # val before the first step
        accuracy, low, high, pass_at_k = map(start.get, needed)
        lines.append(("gate", f"Gate: {gate(accuracy, (high - low) / 2, pass_at_k, k)}"))
    if dead := dead_stretches(run):
        longest, count = max(dead, key=len), sum(map(len, dead))
        text = f"Dead steps (at least {watch.flat_groups:.0%} of the groups flat): {count} of {len(steps)}"
        lines.append(("dead", f"{text}; the longest stretch from {longest[0]} to {longest[-1]}"))
    lines += [("note", note) for note in run.notes]
    text = "".join(f'<p class="{name}">{escape(line)}</p>' for name, line in lines)
    head = ["", *(f"{when} (n = {t.get('n', '–')})" for when, t in zip(("before", "after"), run.tests, strict=True))]
    keys = dict.fromkeys(key for test in run.tests for key in test if f"{key}_low" in test)
    rows = [[key, *(figure(test, key) for test in run.tests)] for key in keys]
    tests = table("Test, with 95 % intervals", head, rows)
    counts = [test.get("outcomes", {}) for test in run.tests]
    rows = [[name, *(count.get(name, 0) if count else "–" for count in counts)] for name in counts[0] | counts[1]]
    tests += table("Outcomes of the test", head, rows)
    config = f"<details><summary>Config</summary><pre>{escape(run.config_text)}</pre></details>"
    return f'<section><h2>{escape(run.name)}</h2>{text}<div class="grid">{tests}</div>{config}</section>'


def curves(runs: list[RunData]) -> str:
    """Every curve of all runs as a panel, the classes of groups as a panel a run, and the numbers of both in tables."""
    known = dict.fromkeys(key for run in runs for row in run.rows for key, value in row.items() if value is not None)
    names = [key for pattern in CURVES for key in known if re.fullmatch(pattern, key)]
    if not names:
        return '<p class="note">No step has been logged.</p>'
    numbers = ""
    for run, (kind, key) in product(runs, {"steps": FLAT, "validation": VAL}.items()):  # they differ in their steps
        rows = evenly([row for row in run.rows if key in row], COLUMNS)
        lines = [[n, *(figure(row, n) for row in rows)] for n in (*names, *SHARES) if any(n in row for row in rows)]
        numbers += table(f"{run.name}: {kind}", ["step", *(row["step"] for row in rows)], lines)
    try:
        panels = [(name, draw(paint_curve, name, runs)) for name in names]
        stepped = [run for run in runs if any(SHARES[0] in row for row in run.rows)]
        panels += [(f"groups of {run.name}", draw(paint_classes, run)) for run in stepped]
    except ImportError:
        return f'<p class="note">To see curves: pip install matplotlib, then python -m grpo.report RUN</p>{numbers}'
    keys = [(run.name, f"3px {style} {color}") for run, style, color in zip(runs, STYLES, COLORS, strict=False)]
    keys += [*((name, f".7rem solid {color}") for name, color in CLASSES.items()), ("dead steps", ".2rem solid")]
    legend = "".join(f'<li><i style="border-top: {line}"></i>{escape(name)}</li>' for name, line in keys)
    figures = "".join(f"<figure><figcaption>{escape(name)}</figcaption>{svg}</figure>" for name, svg in panels)
    return f"""<p class="note">Against the step.</p><ul class="legend">{legend}</ul><div class="grid">{figures}</div>
<details><summary>Numbers</summary>{numbers}</details>"""


def write_report(folders: list[Path], out: Path) -> None:
    """Write the page about these runs; ValueError if a folder is no run."""
    if not 1 <= len(folders) <= len(COLORS):
        raise ValueError(f"{len(folders)} runs; expected 1 to {len(COLORS)} to compare on a page")
    runs = [read_run(Path(folder), share=len(folders)) for folder in folders]
    groups = [{"name": run.name, "steps": run.logged_steps, "groups": run.groups} for run in runs]
    parts = {"title": escape(", ".join(run.name for run in runs)), "runs": "\n".join(map(describe, runs))}
    page = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    write_text(Path(out), page.substitute(parts, curves=curves(runs), data=embed({"runs": groups})))


def main(arguments: list[str] | None = None) -> int:
    """The command line; a mistake in what the user gave is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description="one page about runs: report.html")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("--out", type=Path, help="default: RUN/report.html; of several runs ./report.html")
    options = parser.parse_args(arguments)
    out = options.out or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html"))
    try:
        write_report(options.runs, out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
