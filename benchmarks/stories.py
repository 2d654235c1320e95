"""The two published failures on the embedded task: tables, paired tests and a figure from run directories.

python benchmarks/stories.py runs/*-seed? --out results/stories.json --figure results/story_one.png

Runs are named KIND-seedN; runs of one seed are measured on the same questions, so that they can be compared in pairs.
The README gives the command of every kind.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo.config import WatchConfig
from grpo.curves import CLASSES, paint_classes, paint_curve
from grpo.history import read_run
from sqlenv.metrics import mcnemar_exact

KINDS = {
    "both": "gold's columns only; format + exact",
    "dead_reward": "full schemas; format + exact",
    "trimmed": "gold's columns only; execution",
    "quickstart": "full schemas; execution",
    "tenth": "the same, stopped at a tenth of a pass",
    "small": "the same, from a start a third the size",
    "mastered": "questions of pass rate above .8",
    "band": "questions of pass rate .2 to .8",
    "halfway": "all questions, after 20 supervised steps and not 300",
}
STORY_ONE, STORY_TWO = (*KINDS,)[:6], (*KINDS,)[6:]
PAIRS = {
    ("both", "dead_reward"): "schemas, under the dead reward",
    ("both", "trimmed"): "reward, under trimmed schemas",
    ("trimmed", "quickstart"): "schemas, under the execution reward",
    ("dead_reward", "quickstart"): "reward, under full schemas",
    ("both", "quickstart"): "both repairs",
    ("small", "quickstart"): "a start three times larger",
    ("tenth", "quickstart"): "a whole pass and not a tenth",
    ("mastered", "band"): "the band and not the mastered questions",
}
HEAD = ["run", "EX before", "EX after", "mean@8", "pass@8", "vote@8", "flat groups"]
HEAD += ["mixed / all right / all wrong / all failed", "reward std", "gradient norm", "dead from step"]


def read(folder: Path) -> dict:
    """What a run says about itself, small enough to commit."""
    run = read_run(folder)
    steps = [row for row in run.rows if "reward" in row]
    keys = ("execution_accuracy", "mean@8", "pass@8", "vote@8", "bootstrap_low", "bootstrap_high", "n", "databases")
    before, after = ({key: round(test[key], 4) for key in keys} for test in run.tests)
    for figures, test in zip((before, after), run.tests, strict=True):
        figures |= {"questions": test["questions"], "correct": "".join(map(str, test["correct"]))}
    kind, seed = folder.name.rsplit("-seed", 1)
    result = {"kind": kind, "seed": int(seed), "steps": len(steps), "versions": run.summary["versions"]}
    result["groups"] = {name: round(mean(row[f"groups/{name}_ratio"] for row in steps), 4) for name in CLASSES}
    result["flat"] = round(mean(row["frac_reward_zero_std"] for row in steps), 4)
    result["reward_std"], result["grad_norm"] = (
        round(mean(row[k] for row in steps), 4) for k in ("reward_std", "grad_norm")
    )
    correct = [row["rewards/correct/mean"] for row in steps]
    result["correct"] = [round(mean(part), 4) for part in (correct[:10], correct[-10:])]  # first, last ten steps
    result["dead_from"] = dead_from([row["frac_reward_zero_std"] for row in steps], run.config.watch)
    if result["dead_from"]:
        late = [row["step_time"] for row in steps if row["step"] >= result["dead_from"]]
        result["time_after"] = round(sum(late) / sum(row["step_time"] for row in steps), 3)
    if (rates := folder / "pass_rates.json").is_file():
        result["pass_rates"] = json.loads(rates.read_text("utf-8"))["counts"]
    if (leak := folder / "eval-gold.json").is_file():  # evaluate.py --set eval.schema=gold: what the published run saw
        result["trimmed_test"] = round(json.loads(leak.read_text("utf-8"))["execution_accuracy"], 4)
    return result | {"before": before, "after": after}


def dead_from(flat: list[float], watch: WatchConfig) -> int | None:
    """The step from which on nearly all groups were flat, to the end and for at least `watch.steps` steps.

    Example: flat .5, then 1.0 for 20 steps, the limits those of [watch] (.95, 20 steps) -> 2
    """
    limit, late = watch.flat_groups, range(max(0, len(flat) - watch.steps + 1))
    return next((start + 1 for start in late if flat[start] >= limit and mean(flat[start:]) >= limit), None)


def spread(values: list[float]) -> str:
    """Mean and standard deviation. Example: .1 and .3 -> .200 ± .141"""
    texts = [f"{value:.3f}".replace("0.", ".", 1) for value in (mean(values), stdev(values) if values[1:] else 0.0)]
    return " ± ".join(texts)


def rows(results: list[dict], kinds: tuple[str, ...]) -> list[str]:
    """A line of the table for every kind of run: means over its seeds."""
    lines = []
    for kind in kinds:
        runs = [result for result in results if result["kind"] == kind]
        if not runs:
            continue
        cells = [KINDS[kind], spread([run["before"]["execution_accuracy"] for run in runs])]
        keys = ("execution_accuracy", "mean@8", "pass@8", "vote@8")
        cells += [spread([run["after"][key] for run in runs]) for key in keys]
        cells += [f"{mean(run['flat'] for run in runs):.1%}"]
        cells += [" / ".join(f"{mean(run['groups'][name] for run in runs):.0%}" for name in CLASSES)]
        cells += [f"{mean(run[key] for run in runs):.3f}" for key in ("reward_std", "grad_norm")]
        cells += [", ".join(str(run["dead_from"] or "-") for run in runs)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def paired(pairs: list[tuple[dict, dict]], name: str) -> str:
    """A line: points in every seed, their mean, and the exact McNemar test over the questions of all seeds."""
    points, gained, lost = [], 0, 0
    for first, second in pairs:
        assert first["questions"] == second["questions"], f"{name}: other questions"
        both = list(zip(first["correct"], second["correct"], strict=True))
        ups, downs = both.count(("0", "1")), both.count(("1", "0"))
        gained, lost = gained + ups, lost + downs
        points.append(100 * (ups - downs) / len(both))
    p = mcnemar_exact(gained, lost)
    verdict = "noise" if p >= 0.05 else "p < 1e-6" if p < 1e-6 else f"p = {p:.2g}"
    verdict += f" (p = {p:.2f})" if p >= 0.05 else ""
    each = ", ".join(f"{value:+.1f}" for value in points)
    return f"| {name} | {each} | {mean(points):+.1f} | {gained} / {lost} | {verdict} |"


def comparisons(results: list[dict]) -> list[str]:
    """The differences between kinds of runs, and what story two's runs changed, in points of execution accuracy."""
    found = {(result["kind"], result["seed"]): result for result in results}
    lines = []
    for (a, b), name in PAIRS.items():
        seeds = [seed for kind, seed in found if kind == a and (b, seed) in found]
        if seeds:
            lines.append(paired([(found[a, s]["after"], found[b, s]["after"]) for s in seeds], name))
    for kind in STORY_TWO:
        runs = [result for result in results if result["kind"] == kind]
        if runs:
            lines.append(paired([(run["before"], run["after"]) for run in runs], f"100 steps on {KINDS[kind]}"))
    return lines


def draw(folders: list[Path], file: Path) -> None:
    """Reward against held-out accuracy, and the classes of the groups, of the dead run and of the repaired one."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "grpo", "font.size": 8})
    runs = [read_run(next(f for f in folders if f.name == f"{kind}-seed0")) for kind in ("dead_reward", "quickstart")]
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    panels = figure.subplots(2, 2)
    for axes, name in zip(panels[0], ("reward", "val/execution_accuracy"), strict=True):
        paint_curve(axes, name, runs)
        axes.set(title=name, ylim=(0, 1.05), xlabel="step")
    panels[0][0].legend(["format + exact", "execution"], loc="lower right")
    for axes, run, name in zip(panels[1], runs, ("format + exact", "execution"), strict=True):
        paint_classes(axes, run)
        axes.set(title=f"groups, {name}", ylim=(0, 1.12), xlabel="step")
    panels[1][0].legend(CLASSES, loc="lower right")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Print the tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    results = sorted(map(read, options.runs), key=lambda r: ((*KINDS,).index(r["kind"]), r["seed"]))
    for kinds in (STORY_ONE, STORY_TWO):
        print("\n".join([f"\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", *rows(results, kinds)]))
    print("\n".join(["", *comparisons(results)]))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        draw(options.runs, options.figure)


if __name__ == "__main__":
    main()
