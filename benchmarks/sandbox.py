"""What each hostile input of tests/test_10_sandbox.py costs under the default budget: its status, seconds, memory.

python benchmarks/sandbox.py

Every input gets a process of its own, which first runs an innocent query. Memory is the growth of that process's peak
(ru_maxrss), so Linux or macOS is needed. Sorted by seconds; the loops at the top are ended by a backstop only.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from test_10_sandbox import HOSTILE, LOOPS, make_world

from sqlenv.database import run_sql

INPUTS = [(name, sql) for name, sql, _ in HOSTILE] + [(f"loop: {name}", sql) for name, sql in LOOPS]


def peak_memory() -> float:
    """MB that this process has taken at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def measure(path: Path, sql: str) -> dict:
    """Run one input here."""
    run_sql(path, "SELECT count(*) FROM country")
    before, start = peak_memory(), time.perf_counter()
    result = run_sql(path, sql)
    return {"status": result.status, "seconds": time.perf_counter() - start, "mb": peak_memory() - before}


def main() -> None:
    """Measure every input in a process of its own and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("DATABASE", "NUMBER"), help="measure one input, in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(Path(args.one[0]), INPUTS[int(args.one[1])][1])))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = make_world(Path(folder) / "world.sqlite")
        for number, (name, _) in enumerate(INPUTS):
            command = [sys.executable, __file__, "--one", str(path), str(number)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout) | {"name": name})
    for row in sorted(rows, key=lambda row: -row["seconds"]):
        print(f"{row['seconds']:7.3f} s  {row['mb']:6.1f} MB  {row['status']:9}  {row['name']}")
    slowest, largest = (max(rows, key=lambda row: row[key]) for key in ("seconds", "mb"))
    print(f"{len(rows)} inputs; at most {slowest['seconds']:.3f} s ({slowest['name']})", end=" ")
    print(f"and {largest['mb']:.1f} MB ({largest['name']})")


if __name__ == "__main__":
    main()
