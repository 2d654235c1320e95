"""Would the tests notice? Every silent bug of tests/mutants.py is planted in a copy, and its own test must go red.

    pytest tests/test_mutants.py               the list itself: seconds, part of every run
    pytest tests/test_mutants.py -m mutants    plants them all: minutes

One process imports torch once and forks for every run, so that a mutant costs little more than its test.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from exercises import Desk
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
PARTS = ["pyproject.toml", "train.py", "evaluate.py", "grpo", "model", "sqlenv", "configs", "tests"]
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
# Reads lists of arguments of pytest, one a line, and writes pytest's exit code for each; what it prints goes to a file.
# torch.nn.attention.bias is imported by the model and brings half of torch along.
RUNNER = """
import json, os, sys
import numpy, pytest, safetensors.torch, tokenizers, torch.nn.attention.bias
for line in sys.stdin:
    child = os.fork()
    if not child:
        sys.path[0] = os.getcwd()
        os.dup2(os.open("output.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 1)
        os._exit(pytest.main(["-q", "-p", "no:cacheprovider", *json.loads(line)]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@lru_cache
def defined_tests(file: str) -> set[str]:
    """The names of the test functions in a file of the repository."""
    nodes = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


# --- the list ---


def test_there_are_enough_mutants_and_none_is_there_twice():
    assert len(MUTANTS) >= 40
    assert len(BY_NAME) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.step for mutant in MUTANTS} == set(range(1, 25))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_mutant_fits_the_code_as_it_is_and_names_its_test(name):
    mutant = BY_NAME[name]
    if Desk().originals(mutant.step):
        pytest.skip("this step is being rewritten; python -m tests.exercises restore brings it back")
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(mutant.plant(source))) != ast.dump(ast.parse(source))
    file, test = mutant.killed_by.split("::")
    assert test.split("[")[0] in defined_tests(file)


def test_a_mutant_that_fits_no_place_or_two_is_refused():
    for old in ("nowhere", "x"):
        with pytest.raises(ValueError, match=rf"'a bug': {'xx'.count(old)} places in a\.py; expected one"):
            Mutant("a bug", 1, "a.py", old, "y", "").plant("xx")


def test_every_test_that_the_readme_names_exists():
    named = re.findall(r"`(test_\w+\.py)::(\w+)", (ROOT / "tests" / "README.md").read_text(encoding="utf-8"))
    assert len(named) > 40
    assert [f"{file}::{test}" for file, test in named if test not in defined_tests(f"tests/{file}")] == []


# --- the hunt ---


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the repository in which bugs may be planted."""
    folder = tmp_path_factory.mktemp("copy")
    for part in PARTS:
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy2)(ROOT / part, folder / part)
    return folder


@pytest.fixture(scope="module")
def run(copy) -> Iterator[Callable[..., int]]:
    """Runs pytest in the copy and returns its exit code; without a bug every killing test passes there."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    # No bytecode: two bugs in one file, planted in the same second, could be taken for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    with subprocess.Popen([sys.executable, "-c", RUNNER], cwd=copy, env=environment, **pipes) as runner:

        def run_pytest(*arguments: str) -> int:
            print(json.dumps(arguments), file=runner.stdin, flush=True)
            return int(runner.stdout.readline())

        assert run_pytest(*{mutant.killed_by for mutant in MUTANTS}) == 0, (copy / "output.txt").read_text("utf-8")
        yield run_pytest


@pytest.mark.mutants
@pytest.mark.parametrize("name", BY_NAME)
def test_a_mutant_is_killed_by_its_test(name, copy, run):
    mutant = BY_NAME[name]
    file = copy / mutant.file
    source = file.read_text(encoding="utf-8")
    file.write_text(mutant.plant(source), encoding="utf-8")
    code = run("-x", mutant.killed_by)
    file.write_text(source, encoding="utf-8")
    assert code == 1, f"exit code {code}, where 0 is a survivor:\n{(copy / 'output.txt').read_text('utf-8')}"
