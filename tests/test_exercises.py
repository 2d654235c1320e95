"""The course as exercises: blanking, restoring, planting a bug; what a learner wrote is never lost.

Run: pytest tests/test_exercises.py
"""

import ast
import random
import shutil
from pathlib import Path

import pytest

from tests import exercises, mutants
from tests.exercises import ROOT, STEPS, Desk, main, text_of
from tests.mutants import MUTANTS


@pytest.fixture
def desk(tmp_path) -> Desk:
    for folder in ("grpo", "model", "sqlenv"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("train.py", "evaluate.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    return Desk(tmp_path)


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.py") if ".exercises" not in str(path)
    }


def test_every_step_of_the_course_is_an_exercise_and_names_its_test():
    tests = {int(path.name[5:7]): path.stem[8:] for path in (ROOT / "tests").glob("test_[0-9]*.py")}
    assert {number: name for number, (name, _) in STEPS.items()} == tests


@pytest.mark.parametrize("number", STEPS)
def test_blank_keeps_signatures_and_docstrings_and_restore_brings_every_byte_back(desk, number):
    before = tree(desk.root)
    told = desk.blank(number)
    after = tree(desk.root)
    assert {file for file in before if before[file] != after[file]} == set(STEPS[number][1])
    for file, names in STEPS[number][1].items():
        for name in names:
            assert name in told
            old, new = (ast.parse(text_of(t[file].decode(), name).lstrip().expandtabs()) for t in (before, after))
            assert ast.unparse(old.body[0].args) == ast.unparse(new.body[0].args)
            assert ast.get_docstring(old.body[0]) == ast.get_docstring(new.body[0]) is not None
            assert f"step {number}: write {name} in {file}" in text_of(after[file].decode(), name)
    assert desk.state(number) == "blank"
    desk.restore(number)
    assert tree(desk.root) == before
    assert desk.state(number) == "whole"


def test_what_a_learner_wrote_and_changed_elsewhere_is_never_lost(desk):
    desk.blank(16)
    file = desk.root / "grpo" / "batch.py"
    mine = file.read_text(encoding="utf-8").replace(
        text_of(file.read_text(encoding="utf-8"), "build_tree"), "def build_tree(*mine):\n    return 'my own'\n"
    )
    mine = mine.replace("MAX_LOGITS = 2**25", "MAX_LOGITS = 2**20")
    file.write_text(mine, encoding="utf-8")
    assert desk.state(16) == "being written, 0 of 1 left"
    told = desk.restore(16)
    (saved,) = (desk.folder / "saved").rglob("batch.py")
    assert str(saved.parent.parent) in told
    assert saved.read_text(encoding="utf-8") == mine
    restored = file.read_text(encoding="utf-8")
    assert "MAX_LOGITS = 2**20" in restored  # another line of the file is the learner's
    assert "my own" not in restored
    assert restored.replace("2**20", "2**25") == (ROOT / "grpo" / "batch.py").read_text(encoding="utf-8")


def test_a_bug_is_planted_silently_and_told_when_it_goes(desk):
    before = tree(desk.root)
    told = desk.bug(18, random.Random(0))
    assert "one line of step 18 is wrong now" in told
    changed = [file for file, text in tree(desk.root).items() if text != before[file]]
    assert len(changed) == 1
    assert not any(mutant.name in told for mutant in MUTANTS)
    assert desk.state(18) == "with a bug"
    told = desk.restore(18)
    assert any(f"the bug was: {mutant.name}" in told for mutant in MUTANTS if mutant.step == 18)
    assert tree(desk.root) == before


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_bug_goes_as_it_came(desk, mutant, monkeypatch):
    before = tree(desk.root)
    monkeypatch.setattr(mutants, "MUTANTS", [mutant])
    desk.bug(mutant.step, random.Random())
    assert tree(desk.root) != before
    desk.restore(mutant.step)
    assert tree(desk.root) == before


def test_mistakes_are_one_line(desk, capsys):
    assert main(["blank", "99"], desk) == 2
    assert "step = 99; expected a number from 1 to 24" in capsys.readouterr().err
    assert main(["restore", "3"], desk) == 2
    assert "step 3 is whole" in capsys.readouterr().err
    assert main(["blank", "3"], desk) == main(["list"], desk) == 0
    assert " 3  attention    blank" in capsys.readouterr().out
    assert main(["blank", "3"], desk) == main(["bug", "3"], desk) == 2
    assert "step 3 is in work already; first: python -m tests.exercises restore 3" in capsys.readouterr().err
    assert exercises.main(["bug", "23"], desk) in (0, 2)
