"""The README's table of run directories and control results, its paired tests, and the small JSON that it stands on.

python benchmarks/table.py runs/quickstart runs/dead_reward ... --out results/quickstart.json
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evaluate import verdict_in_words
from sqlenv.metrics import mcnemar_exact

FIGURES = ("execution_accuracy", "bird_accuracy", "mean@8", "pass@8", "vote@8", "bootstrap")

NAMES = {"clean": "SFT, clean labels", "rejection": "rejection sampling"}
COLUMNS = ["run", "seed", "EX before", "EX after", "over databases", "mean@8 before / after", "pass@8 before / after"]
COLUMNS += ["vote@8 after", "flat groups"]
SPREAD = [(when, key) for key in ("execution_accuracy", "mean@8", "pass@8", "vote@8") for when in ("before", "after")]


def figures(evaluation: dict) -> dict:
    """The accuracies of an evaluation with their intervals, and what they cost."""
    kept = {k: round(v, 4) for k, v in evaluation.items() if k.startswith(FIGURES)}
    return kept | {key: evaluation[key] for key in ("n", "databases", "num_tokens", "sql_executions", "seconds")}


def read_run(folder: Path) -> dict:
    """What a run directory says about itself."""
    before, after = (json.loads((folder / f"eval-test-{w}.json").read_text("utf-8")) for w in ("before", "after"))
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [row for row in rows if "reward" in row]
    seconds = {part: sum(row[f"time/{part}"] for row in steps) for part in ("rollout", "reward", "update")}
    total = sum(seconds.values()) or 1.0
    result = {"run": folder.name, "seed": summary["seed"], "steps": len(steps), "seconds": summary["seconds"]}
    result |= {"loop_seconds": round(total, 1), "share": {k: round(v / total, 3) for k, v in seconds.items()}}
    result |= {"dead_group_share": round(summary["dead_group_share"], 3), "versions": summary["versions"]}
    for name, part in (("first", steps[:10]), ("last", steps[-10:])):
        if part:
            keys = ("reward", "frac_reward_zero_std", "rewards/correct/mean")
            result[f"{name}_10_steps"] = {
                k: round(sum(r[k] for r in part) / len(part), 3) for k in keys if k in part[0]
            }
    val = [[row["step"], round(row["val/execution_accuracy"], 3)] for row in rows if "val/execution_accuracy" in row]
    verdict = verdict_in_words(before, after, summary["dead_group_share"])
    return result | {"val": val, "before": figures(before), "after": figures(after), "verdict": verdict}


def read_control(path: Path) -> dict:
    """A result that benchmarks/controls.py wrote."""
    control = json.loads(path.read_text("utf-8"))
    kept = {k: control[k] for k in ("method", "seed", "steps", "pairs", "learning_rate", "seconds", "versions")}
    before, after = control["before"], control["after"]
    return kept | {"before": figures(before), "after": figures(after), "verdict": verdict_in_words(before, after)}


def short(share: float) -> str:
    """0.674 -> ".674"; 1.0 -> "1.000"."""
    return f"{share:.3f}".removeprefix("0")


def interval(evaluation: dict, name: str) -> str:
    """The 95 % interval of a figure, as ".632, .714" in brackets."""
    return f"[{short(evaluation[f'{name}_low'])}, {short(evaluation[f'{name}_high'])}]"


def name_of(result: dict) -> str:
    """What was run, without its seed."""
    return NAMES.get(result.get("method")) or result["run"].rsplit("-seed", 1)[0]


def spreads(results: list[dict]) -> list[str]:
    """For every kind of run, mean and standard deviation over its seeds. Example: EX .1 and .3 -> .200 +- .141"""
    lines = []
    for name in dict.fromkeys(map(name_of, results)):
        part = [result for result in results if name_of(result) == name]
        if len(part) > 1:
            cells = [name, f"mean ± sd of {len(part)}"]
            for when, key in SPREAD:
                values = [result[when][key] for result in part]
                cells.append(f"{short(mean(values))} ± {short(stdev(values))}")
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def row(result: dict) -> str:
    """A line of the README's table."""
    before, after, accuracy = result["before"], result["after"], "execution_accuracy"
    cells = [name_of(result), str(result["seed"]), f"{short(before[accuracy])} {interval(before, accuracy)}"]
    cells += [f"**{short(after[accuracy])}** {interval(after, accuracy)}", interval(after, "bootstrap")]
    cells += [f"{short(before[key])} / {short(after[key])}" for key in ("mean@8", "pass@8")]
    cells += [f"{short(after['vote@8'])} {interval(after, 'vote@8')}"]
    cells += [f"{result['dead_group_share']:.1%}" if "run" in result else "-"]
    return "| " + " | ".join(cells) + " |"


def paired_tests(paths: list[Path]) -> list[str]:
    """GRPO against each control of the same seed, on the same questions (exact McNemar)."""
    answers = {}
    for path in paths:
        if path.is_dir() and path.name.startswith("quickstart"):
            seed = json.loads((path / "summary.json").read_text("utf-8"))["seed"]
            answers["grpo", seed] = json.loads((path / "eval-test-after.json").read_text("utf-8"))["correct"]
        elif path.is_file():
            control = json.loads(path.read_text("utf-8"))
            answers[control["method"], control["seed"]] = control["after"]["correct"]
    lines = []
    for (method, seed), control in answers.items():
        if method != "grpo" and ("grpo", seed) in answers:
            pairs = list(zip(answers["grpo", seed], control, strict=True))
            ours, theirs = sum(g > c for g, c in pairs), sum(g < c for g, c in pairs)
            p = mcnemar_exact(ours, theirs)
            lines.append(f"seed {seed}: only GRPO right {ours}, only {NAMES[method]} right {theirs}, p = {p:.2f}")
    return lines


def main() -> None:
    """Print the table and the paired tests, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    read = [read_run(path) if path.is_dir() else read_control(path) for path in options.results]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    print("\n".join(map(row, read)))
    heads = ["run", "seeds", *(f"{key} {when}" for when, key in SPREAD)]
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    print("\n".join([*spreads(read), "", *paired_tests(options.results)]))
    if options.out:
        options.out.write_text(json.dumps(read, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
