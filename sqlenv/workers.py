"""Scoring in several processes: the same results in the same order as in one.

SQLite releases the interpreter while it runs a query, but rows are turned into Python values under its lock, so threads
would gain little. A worker keeps its own cache of gold rows; questions that stand together share it.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache


def in_order(function: Callable, *jobs: Iterable, workers: int = 0) -> Iterator:
    """map(function, *jobs), in `workers` processes if there are at least 2; function and jobs must be picklable.

    Example: in_order(pow, [2, 3], [5, 2]) -> 32, 9
    """
    return _pool(workers).map(function, *jobs, chunksize=16) if workers > 1 else map(function, *jobs)


@lru_cache(maxsize=1)  # started once: a training step is shorter than the start of a process
def _pool(workers: int) -> ProcessPoolExecutor:
    # Spawned, not forked: a fork copies torch's threads in whatever state they are. Ctrl-C is the main process's.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
