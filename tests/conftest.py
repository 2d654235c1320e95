"""Shared fixtures: one thread, fixed seeds, optional local data."""

import os
import sqlite3
import sys
from contextlib import closing

# Two spinning OpenMP threads on two busy cores are several times slower than one (read before torch starts).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"  # optional local data: Spider, oracles, checkpoints


@pytest.fixture(autouse=True)
def _deterministic():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of optional local data; a test that needs it is skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"optional local data not found at {SHARED}")
    return SHARED


@pytest.fixture(autouse=True)
def _no_curves(request, monkeypatch):
    """Whole runs write report.html; drawing takes longer than such a run, so only the page's own tests draw."""
    if "test_report_page" not in request.node.nodeid:
        monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture(scope="module")
def databases(tmp_path_factory) -> Path:
    """A folder of <db_id>/<db_id>.sqlite with one database, heads, that steps 14 and the scorer ask."""
    folder = tmp_path_factory.mktemp("databases")
    (folder / "heads").mkdir()
    with closing(sqlite3.connect(folder / "heads" / "heads.sqlite")) as connection:
        connection.executescript(
            "CREATE TABLE head(name TEXT, age INTEGER);"
            "INSERT INTO head VALUES ('ann', 67), ('bob', 67), ('cy', 52), ('dee', NULL);"
        )
    return folder
