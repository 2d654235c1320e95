"""A table of evaluations side by side, the paired tests between them, and the small JSON that it stands on.

python benchmarks/evaluations.py SFT=runs/a/eval-test-before.json GRPO=runs/a/eval-test-after.json --out FILE

The files are what train.py leaves and `evaluate.py --out` writes. Each is compared with the first one that
asked the same questions (exact McNemar; over samples, the sign test).
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sqlenv.report import paired_lines

HEAD = ["", "n", "EX (Spider's rule)", "over databases", "BIRD's rule", "mean@8", "pass@8", "vote@8", "tokens decoded"]
KEPT = ("execution_accuracy", "bird_accuracy", "bootstrap", "mean@8", "pass@8", "vote@8")


def read(name: str, file: Path) -> dict:
    """The figures of an evaluation, small enough to commit."""
    full = json.loads(file.read_text("utf-8"))
    result = {"name": name} | {key: round(value, 4) for key, value in full.items() if key.startswith(KEPT)}
    result |= {key: full[key] for key in ("n", "databases", "num_tokens", "sql_executions", "outcomes", "versions")}
    result |= {"seconds": round(full["seconds"]), "questions": full["questions"]}
    result |= {"num_generations": full["num_generations"]} if "num_generations" in full else {}
    return result | {key: "".join(map(str, full[key])) for key in ("correct", "hits", "votes") if key in full}


def figure(result: dict, key: str) -> str:
    """A figure with its interval, or a dash. Example: .5, _low .4, _high .6 -> .500 [.400, .600]"""
    found = [result[name] for name in (key, f"{key}_low", f"{key}_high") if name in result]
    texts = [f"{value:.3f}".removeprefix("0") for value in found]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]" if texts else "-"


def rows(results: list[dict]) -> list[str]:
    """A line of the table for each evaluation."""
    lines = []
    for r in results:
        low, high = (f"{r[key]:.3f}".removeprefix("0") for key in ("bootstrap_low", "bootstrap_high"))
        cells = [r["name"], str(r["n"]), figure(r, "execution_accuracy"), f"[{low}, {high}]"]
        cells += [figure(r, key) for key in ("bird_accuracy", "mean@8", "pass@8", "vote@8")]
        lines.append("| " + " | ".join([*cells, f"{r['num_tokens']:,}"]) + " |")
    return lines


def comparisons(results: list[dict]) -> list[str]:
    """The paired tests, in words: each against the first one that asked the same questions."""
    lines = []
    for result in results:
        first = next(r for r in results if r["questions"] == result["questions"])
        if first is not result:
            lines += paired_lines(first, result, f"{result['name']} against {first['name']}")
    return lines


def main() -> None:
    """Print the table and the tests, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluations", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = [read(name, Path(file)) for name, file in (given.split("=", 1) for given in options.evaluations)]
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    print("\n".join([*rows(results), "", *comparisons(results)]))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
