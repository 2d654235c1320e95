"""The README says what is there: links resolve, every module is on its map, the committed configs are valid.

Run: pytest tests/test_docs.py
"""

import json
import re
from pathlib import Path

import pytest

from benchmarks.table import row
from grpo.config import load_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = [
    *(path.name for path in ROOT.glob("*.py")),
    *(f"{d}/{path.name}" for d in ("grpo", "model", "sqlenv") for path in (ROOT / d).glob("[!_]*.py")),
]


def test_every_link_inside_the_repository_resolves():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_module_is_on_the_map(module):
    assert f"({module})" in README


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_is_valid_in_its_long_and_its_short_form(config):
    assert load_config(config).run.name == config.stem
    load_config(config, short=True)


def test_the_readmes_table_is_the_one_that_the_results_make():
    results = json.loads((ROOT / "results" / "quickstart.json").read_text(encoding="utf-8"))
    assert [row(result) for result in results if row(result) not in README] == []
    assert README.count("\n| ") > len(results) == 12


def test_the_product_stays_small():
    files = [
        ROOT / "train.py",
        ROOT / "evaluate.py",
        *(p for d in ("grpo", "model", "sqlenv") for p in (ROOT / d).rglob("*.py")),
    ]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < 4000


def test_the_shipped_start_is_a_small_hugging_face_folder():
    files = list((ROOT / "configs" / "warm_start").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {f.name for f in files}
    assert sum(file.stat().st_size for file in files) < 4_000_000
