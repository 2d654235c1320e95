"""One row of the README's table for each run directory or control result, and the small JSON that it stands on.

python benchmarks/table.py runs/quickstart runs/dead_reward ... --out results/quickstart.json
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evaluate import verdict_in_words

FIGURES = ("execution_accuracy", "bird_accuracy", "mean@8", "pass@8", "vote@8", "bootstrap")


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


def row(result: dict) -> str:
    """A line of a Markdown table."""

    def cell(evaluation: dict, name: str) -> str:
        low, high = evaluation.get(f"{name}_low"), evaluation.get(f"{name}_high")
        return f".{round(evaluation[name] * 1000):03d}" + (
            f" [.{round(low * 1000):03d}, .{round(high * 1000):03d}]" if low is not None else ""
        )

    before, after = result["before"], result["after"]
    boot = f"[.{round(after['bootstrap_low'] * 1000):03d}, .{round(after['bootstrap_high'] * 1000):03d}]"
    name = result.get("run") or f"{result['method']} SFT, {result['steps']} steps, seed {result['seed']}"
    cells = [name, cell(before, "execution_accuracy"), cell(after, "execution_accuracy"), boot, cell(after, "mean@8")]
    cells += [cell(after, "pass@8"), cell(after, "vote@8"), f"{result['seconds']:.0f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    read = [read_run(path) if path.is_dir() else read_control(path) for path in options.results]
    print("| run | EX before | EX after | over databases | mean@8 | pass@8 | vote@8 | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(row(result) for result in read))
    if options.out:
        options.out.write_text(json.dumps(read, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
