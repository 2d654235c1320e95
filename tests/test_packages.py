"""Three packages that do not know each other, and five libraries in all. Command: pytest tests/test_packages.py

sqlenv is the standard library alone; model knows torch; grpo knows torch and model, never sqlenv. So each can be read
alone, and the task can be swapped. Only train.py and evaluate.py import all three. Read from the files by `ast`, so
that an import inside a function counts too.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"torch", "safetensors", "tokenizers", "numpy", "tqdm"}
OPTIONAL = {"matplotlib"}  # the report's curves: only inside a function, so that nothing needs it
OURS = {"grpo", "model", "sqlenv"}
ALLOWED = {
    "sqlenv": {"sqlenv"},
    "model": {"model", *LIBRARIES},
    "grpo": {"grpo", "model", *LIBRARIES},
    "train.py": {"evaluate", *OURS, *LIBRARIES},
    "evaluate.py": {*OURS, *LIBRARIES},
}


def imports(source: str) -> set[tuple[str, bool]]:
    """(top-level module, whether a function imports it) of every import in a file, relative ones as "."."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lazy = {id(node) for function in functions for node in ast.walk(function)}
    found = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["." if node.level else node.module]
        found |= {(name.partition(".")[0] or ".", id(node) in lazy) for name in names}
    return found


def violations(source: str, allowed: set[str]) -> set[str]:
    """The modules that a file may not import."""
    standard = set(sys.stdlib_module_names)
    return {name for name, lazy in imports(source) if name not in allowed | standard | (OPTIONAL if lazy else set())}


def files_of(part: str) -> list[Path]:
    return [ROOT / part] if part.endswith(".py") else sorted((ROOT / part).rglob("*.py"))


def test_the_reader_of_imports_finds_every_form():
    """torch and json at the top, `from model.x`, a relative import, and two inside a function."""
    source = "import torch.nn as nn, json\nfrom model.x import y\nfrom . import z\n"
    source += "def f():\n    import matplotlib.pyplot\n    from sqlenv import run_sql\n"
    top = {("torch", False), ("json", False), ("model", False), (".", False)}
    assert imports(source) == top | {("matplotlib", True), ("sqlenv", True)}
    assert violations(source, ALLOWED["model"]) == {".", "sqlenv"}
    assert violations("import matplotlib", ALLOWED["grpo"]) == {"matplotlib"}


@pytest.mark.parametrize("part", ALLOWED)
def test_a_package_imports_only_what_it_may(part):
    files = files_of(part)
    assert files, f"nothing to read in {part}"
    found = {file.name: violations(file.read_text(encoding="utf-8"), ALLOWED[part]) for file in files}
    assert {name: names for name, names in found.items() if names} == {}


def test_every_library_that_is_imported_is_declared():
    """An import that pyproject.toml does not declare breaks a fresh install."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    sources = [file.read_text(encoding="utf-8") for part in ALLOWED for file in files_of(part)]
    used = {name for source in sources for name, _ in imports(source)} & LIBRARIES
    assert [name for name in sorted(used) if f'"{name}>=' not in declared] == []
