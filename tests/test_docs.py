"""The README says what is there: links resolve, every module is on its map, the committed configs are valid.

Run: pytest tests/test_docs.py
"""

import ast
import contextlib
import itertools
import json
import re
import shlex
import sqlite3
from pathlib import Path

import exercises
import pytest
import torch
from config_table import rows
from tiny_run import run_tiny

from benchmarks import evaluations, stories
from benchmarks.table import row, spreads
from grpo.advantage import AdvantageInfo, check_advantage, compute_advantages, contract, load_function
from grpo.config import Config, SftConfig, WatchConfig, load_config
from grpo.watch import EXIT_CODES
from sqlenv import score
from sqlenv.reward import check_reward

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = [
    *(path.name for path in ROOT.glob("*.py")),
    *(f"{d}/{path.name}" for d in ("grpo", "model", "sqlenv") for path in (ROOT / d).glob("[!_]*.py")),
]


def test_every_link_inside_the_repository_resolves():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) > 20
    anchors = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"\n#+ (.+)", README)}
    assert [name for name in re.findall(r"\]\(#([^)]+)\)", README) if name not in anchors] == []
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_module_is_on_the_map(module):
    assert f"({module})" in README


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_is_valid_in_its_long_and_its_short_form(config):
    assert load_config(config).run.name == config.stem
    if "short = [" in config.read_text(encoding="utf-8"):
        assert load_config(config, short=True).run.name == f"{config.stem}-short"
    else:
        with pytest.raises(ValueError, match="the file has no `short"):
            load_config(config, short=True)


def test_the_readmes_table_is_the_one_that_the_results_make():
    results = json.loads((ROOT / "results" / "quickstart.json").read_text(encoding="utf-8"))
    lines = [*map(row, results), *spreads(results)]
    assert [line for line in lines if line not in README] == []
    assert len(lines) == 16


def test_the_readmes_stories_are_those_that_the_results_make():
    results = json.loads((ROOT / "results" / "stories.json").read_text(encoding="utf-8"))
    lines = [*stories.rows(results, stories.STORY_ONE), *stories.rows(results, stories.STORY_TWO)]
    lines += stories.comparisons(results)
    assert [line for line in lines if line not in README] == []
    assert len(lines) == len(stories.KINDS) + len(stories.PAIRS) + len(stories.STORY_TWO)


def test_the_readmes_supervised_schemas_are_those_that_the_results_hold():
    results = json.loads((ROOT / "results" / "supervised_schemas.json").read_text(encoding="utf-8"))
    lines = evaluations.comparisons(results)
    assert [line for line in lines if line not in README] == []
    assert len(lines) == 3


def test_the_readmes_real_model_is_the_one_that_the_results_hold():
    results = json.loads((ROOT / "results" / "spider_smollm2.json").read_text(encoding="utf-8"))
    lines = [*evaluations.rows(results), *evaluations.comparisons(results)]
    assert [line for line in lines if line not in README] == []
    assert len(lines) > len(results) > 2


def test_a_run_is_dead_from_the_step_after_which_nothing_teaches():
    watch = WatchConfig(steps=20, flat_groups=0.95)
    assert stories.dead_from([0.5] + [1.0] * 20, watch) == 2
    assert stories.dead_from([1.0] * 19, watch) is None  # too short to say
    assert stories.dead_from([1.0] * 30 + [0.0] * 5, watch) is None  # it came back
    assert stories.dead_from([0.0] + [1.0] * 10 + [0.9] + [1.0] * 20, watch) == 2  # one mixed group is an accident


def test_paired_runs_of_the_stories_by_hand():
    first, second = ({"questions": "q", "correct": c} for c in ("0011", "0111"))
    assert stories.paired([(first, second)] * 2, "x") == "| x | +25.0, +25.0 | +25.0 | 2 / 0 | noise (p = 0.50) |"
    with pytest.raises(AssertionError, match="x: other questions"):
        stories.paired([(first, second | {"questions": "r"})], "x")


def code_lines(path: Path) -> int:
    """Lines of code: no blank lines, no comments, no docstrings."""
    source = path.read_text(encoding="utf-8")
    documented = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            documented.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for n, line in lines if n not in documented)


def test_the_product_stays_small():
    files = [ROOT / "train.py", ROOT / "evaluate.py"]
    files += [path for folder in ("grpo", "model", "sqlenv") for path in (ROOT / folder).rglob("*.py")]
    assert sum(map(code_lines, files)) < 4000


def test_the_shipped_start_is_a_small_hugging_face_folder():
    files = list((ROOT / "configs" / "warm_start").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {f.name for f in files}
    assert sum(file.stat().st_size for file in files) < 4_000_000


def test_the_readmes_advantages_do_what_it_says_of_them(tmp_path):
    file = tmp_path / "my_advantage.py"
    file.write_text(re.search(r"```python\n(# my_advantage.py.*?)```", README, re.DOTALL)[1], encoding="utf-8")
    info = AdvantageInfo(
        torch.tensor([[10, 20, 30, 40]]),
        torch.zeros(1, 4, dtype=torch.bool),
        {"correct": torch.tensor([[1.0, 1.0, 0.0, 0.0]]), "format": torch.ones(1, 4)},
    )
    rewards = torch.tensor([[1.2, 1.2, 0.3, 0.2]])

    def values(name: str, given: torch.Tensor) -> list[float]:
        return compute_advantages(given, f"{file}:{name}", info)[0].tolist()

    # 1.1, 1.0, 0.0, -0.2 less their mean .475
    assert values("shorter_is_better", rewards) == pytest.approx([0.625, 0.525, -0.475, -0.675])
    assert values("pass_at_k", rewards) == [0.0] * 4  # two are best: no lead
    assert values("pass_at_k", torch.tensor([[1.2, 0.2, 0.3, 0.2]])) == pytest.approx([0.9, 0.0, 0.0, 0.0])
    # correct: +-.5 / (.57735 + 1e-4); format is the same for all and adds nothing
    assert values("each_part_by_itself", rewards) == pytest.approx([0.86588, 0.86588, -0.86588, -0.86588], abs=1e-5)
    holds = {name: "\n".join(contract(f"{file}:{name}")) for name in ("pass_at_k", "shorter_is_better")}
    assert re.search(r"sums to 0 in every group +no", holds["pass_at_k"])
    assert re.search(r"equal rewards give exactly 0 +no", holds["shorter_is_better"])


def test_every_setting_is_in_the_readmes_table_with_its_default_and_meaning():
    fields = sum(len(vars(part)) for part in vars(Config(sft=SftConfig())).values())
    assert len(rows()) == fields
    assert [row for row in rows() if row not in README] == []


def test_every_metric_of_a_run_is_in_the_glossary(tmp_path):
    run = run_tiny(tmp_path, "grpo.max_steps=1", "grpo.beta=0.1", "eval.num_generations=2")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    names = {name for line in lines for name in json.loads(line)}
    assert len(names) > 40
    glossary = README[README.index("## Metrics") : README.index("## Before a figure")]
    general = {r"rewards/\w+/mean": "rewards/<part>/mean", r"@\d": "@k", r"_accuracy_(low|high)": "_accuracy"}
    for pattern, word in general.items():
        names = {re.sub(pattern, word, name) for name in names}
    assert [name for name in sorted(names) if f"`{name}`" not in glossary] == []


def test_the_readmes_sections_come_in_order():
    wanted = ["Two commands", "GRPO in seven steps", "Map", "Reading order", "The rebuild course", "Your own advantage"]
    wanted += ["Your own data", "Real runs", "Settings", "Metrics", "Before a figure", "Departures", "References"]
    places = [README.index(f"\n## {name}") for name in wanted]
    assert places == sorted(places)


def test_the_readmes_functions_pass_the_check_that_a_run_makes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my_advantage.py", "my_reward.py"):
        code = re.search(rf"```python\n(# {name}.*?)```", README, re.DOTALL)[1]
        (tmp_path / name).write_text(code, encoding="utf-8")
    for name in re.findall(r"(?m)^def (\w+)\(rewards, info\)", README):
        check_advantage(f"my_advantage.py:{name}")
    reward = load_function("my_reward.py:rows_and_brevity", "example, completion, result")
    assert check_reward(reward, "mine") == ["rows", "short"]


BLOCKS = [block for block in README.split("```")[1::2] if not block.startswith("python")]
COMMANDS = re.findall(r"(?m)^ *(?:pip .*?&& )?python (.+)$", "\n".join(BLOCKS))


def source_of(words: list[str]) -> Path:
    """The file that a documented command runs."""
    return ROOT / (words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_has_its_file_its_options_and_its_settings(command):
    words = shlex.split(re.split(r" {3,}(?!-)", command)[0])  # without the words of explanation behind it
    source = source_of(words).read_text(encoding="utf-8")
    for word in words:
        assert not word.startswith("--") or f'"{word}"' in source, word
        assert not word.endswith(".toml") or load_config(ROOT / word)
    for setting in (after for word, after in itertools.pairwise(words) if word == "--set"):
        section, key = setting.partition("=")[0].split(".")[:2]
        assert key in vars(getattr(Config(), section)), setting


def test_documented_commands_that_need_nothing_run(tmp_path, monkeypatch, capsys):
    assert len(COMMANDS) > 15
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(sqlite3.connect("shop.sqlite")) as connection:
        connection.executescript("CREATE TABLE t (id INTEGER); INSERT INTO t VALUES (1), (2);")
    (example,) = re.findall(r"(?m)^echo '(.+)' > mine.jsonl$", README)
    Path("mine.jsonl").write_text(example, encoding="utf-8")
    (arguments,) = re.findall(r"(?m)^python -m sqlenv.score (mine.+)$", README)
    assert score.main(shlex.split(arguments)) == 0
    assert "execution_accuracy   1.000" in capsys.readouterr().out
    assert exercises.main(["list"]) == 0
    assert "16  batch" in capsys.readouterr().out


def test_the_readme_names_every_exit_code():
    assert all(f"| {code} | halted" in README for code in EXIT_CODES.values())
