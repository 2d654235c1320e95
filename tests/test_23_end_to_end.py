"""Step 23: the whole path, from a config to a policy that earns more than before.

Built here: train.py `train`, `prepare`, `score_rollouts`, and evaluate.py `evaluate_policy`.
    questions -> prompts -> rollouts -> rewards -> advantages -> update -> log -> evaluate -> save
Run: pytest tests/test_23_end_to_end.py
"""

import json
import re
import sqlite3
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import CONFIG, run_tiny

import evaluate
import sqlenv.reward
import train
from grpo.checkpoint import last_checkpoint
from grpo.config import RewardConfig, load_config
from model.tokenizer import load_tokenizer
from sqlenv.datasets import Example
from sqlenv.synthetic import make_split

KEPT = ("reward", "grad_norm", "entropy", "completions/mean_length")  # what two equal runs have in common


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_tiny_run_raises_its_reward_with_a_reward_and_an_advantage_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def short(example, completion, result):\n"
        "    return {'short': 1 / (1 + len(completion))}\n"
        "def no_std(rewards, info):\n"
        "    return rewards - rewards.mean(dim=1, keepdim=True)\n",
        encoding="utf-8",
    )
    mine = tmp_path / "mine.py"
    own = [f"reward.function={mine}:short", f"grpo.advantage={mine}:no_std"]
    run = run_tiny(tmp_path, *own, "grpo.max_steps=30", "eval.eval_steps=0", "grpo.learning_rate=2e-2")
    rewards = [row["rewards/short/mean"] for row in metrics(run) if "reward" in row]
    assert len(rewards) == 30
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])


def test_two_updates_move_every_lora_matrix(tmp_path):
    start = run_tiny(tmp_path, "grpo.max_steps=0")
    base = last_checkpoint(start)
    mine = tmp_path / "mine.py"
    mine.write_text("def f(example, completion, result):\n    return {'n': len(completion)}\n", encoding="utf-8")
    lora = ["model.init=load", f"model.path={base}", "model.lora_r=4", "sft=[]", f"reward.function={mine}:f"]
    run = run_tiny(tmp_path, *lora, "grpo.max_steps=2")
    one = run_tiny(tmp_path, *lora, "grpo.max_steps=1")
    two_steps, one_step = (load_file(last_checkpoint(r) / "adapter_model.safetensors") for r in (run, one))
    assert len(two_steps) == 2 * 7 * 2  # A and B of seven linear layers in two decoder layers
    assert all(tensor.abs().max() > 0 for name, tensor in one_step.items() if "lora_B" in name)
    # A's gradient goes through B, which is zero until the first step: A moves from the second on.
    assert all(not torch.equal(two_steps[name], one_step[name]) for name in two_steps)


def test_the_reference_is_the_policy_at_the_start_of_rl(tmp_path):
    """With what SFT taught the adapter: the KL to it is zero in the first step, and no longer in the second."""
    base, mine = last_checkpoint(run_tiny(tmp_path, "grpo.max_steps=0")), tmp_path / "mine.py"
    mine.write_text("def f(example, completion, result):\n    return {'n': len(completion)}\n", encoding="utf-8")
    lora = ["model.init=load", f"model.path={base}", "model.lora_r=4", "sft.0.learning_rate=0.1"]
    run = run_tiny(tmp_path, *lora, "grpo.max_steps=2", "grpo.beta=0.1", f"reward.function={mine}:f")
    first, second = (row["kl"] for row in metrics(run) if "reward" in row)
    assert abs(first) < 1e-9 < second


def test_sampling_defaults_that_a_model_folder_brings_do_not_reach_training(tmp_path):
    """Qwen's generation_config.json asks for top_p 0.8, top_k 20 and a repetition penalty."""
    base = last_checkpoint(run_tiny(tmp_path, "grpo.max_steps=0"))
    load = ["model.init=load", f"model.path={base}", "sft=[]", "grpo.max_steps=1"]
    plain = metrics(run_tiny(tmp_path, *load))[1]
    hostile = {"temperature": 0.01, "top_p": 0.1, "top_k": 1, "repetition_penalty": 9.0, "do_sample": False}
    (base / "generation_config.json").write_text(json.dumps(hostile), encoding="utf-8")
    again = metrics(run_tiny(tmp_path, *load))[1]
    assert {name: again[name] for name in KEPT} == {name: plain[name] for name in KEPT}


def test_sft_teaches_the_target_in_a_block_and_then_the_end(tmp_path):
    root = Path(__file__).resolve().parents[1]
    tokenizer, config = (
        load_tokenizer(root / "configs" / "warm_start"),
        load_config(root / "configs" / "quickstart.toml"),
    )
    examples = make_split(tmp_path, "train", num_databases=2, questions_per_database=3, seed=0)
    groups = train.sft_pairs(tokenizer, examples, config)
    assert [len(group) for group in groups] == [3, 3]
    for example, (prompt, completion) in zip(examples, (pair for group in groups for pair in group), strict=True):
        assert prompt == evaluate.encode_prompt(tokenizer, example, config.data)
        assert completion[-1] == tokenizer.eos_ids[0]
        assert tokenizer.decode(completion[:-1]) == f"```sql\n{example.target}\n```"


def test_reward_and_metric_are_the_same_function_object():
    assert train.score_completions is evaluate.score_completions is sqlenv.reward.score_completions


def test_spacing_does_not_change_the_reward_though_it_changes_the_string(tmp_path):
    path = tmp_path / "t.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE head (age INTEGER)")
        connection.executemany("INSERT INTO head VALUES (?)", [(50,), (60,), (70,)])
    connection.close()
    example = Example("How many?", "SELECT count(*) FROM head WHERE age  >  56", "t", path)
    texts = [[f"```sql\nSELECT count(*) FROM head WHERE {c}\n```" for c in ("age>56", "age > 56", "age>99")]]
    weights = {"correct": 1.0, "executes": 0.1, "format": 0.2, "exact": 0.0}
    rewards = train.score_rollouts(
        [example], texts, partial(sqlenv.reward.sql_reward, metric="spider"), RewardConfig(weights=weights)
    )
    assert rewards.total.tolist() == [pytest.approx([1.2, 1.2, 0.3])]
    assert rewards.parts["exact"].tolist() == [[0.0, 0.0, 0.0]]


def test_a_run_leaves_everything_behind_that_it_promises(tmp_path):
    run = run_tiny(tmp_path)
    names = {path.name for path in run.iterdir()}
    expected = {"config.toml", "metrics.jsonl", "samples.jsonl", "sft.jsonl", "checkpoints", "summary.json"}
    assert expected | {"eval-test-before.json", "eval-test-after.json"} <= names
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    keys = {"execution_accuracy", "low", "high", "n"}
    assert keys <= summary["before"].keys()
    assert keys <= summary["after"].keys()
    assert {"dead_group_share", "seconds", "seed", "versions", "verdict"} <= summary.keys()
    assert "taught nothing" in summary["verdict"]
    sample = json.loads((run / "samples.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert len(sample["completions"]) == 4
    assert len(sample["completions"][0]["tokens"]) == len(sample["completions"][0]["logprobs"])
    assert [row["step"] for row in metrics(run) if "val/execution_accuracy" in row] == [0, 2, 4]


def test_the_verdict_claims_nothing_inside_the_noise_and_nothing_without_a_signal():
    def verdict(gained, lost, flat):
        before = {"correct": [0] * gained + [1] * lost + [1] * 10}
        after = {"correct": [1] * gained + [0] * lost + [1] * 10}
        return evaluate.verdict_in_words(before, after, flat).split(":")[0]

    assert verdict(5, 0, 0.5).startswith("taught nothing")  # exact McNemar: 2 * 0.5^5 = 0.0625
    assert verdict(6, 0, 0.5) == "taught"  # 0.03125
    assert verdict(0, 6, 0.5) == "did harm"
    assert verdict(6, 0, 0.998).startswith("drifted")


def test_running_twice_overwrites_nothing_and_repeats_the_numbers(tmp_path):
    first, second = run_tiny(tmp_path), run_tiny(tmp_path)
    assert (first.name, second.name) == ("tiny", "tiny-2")
    a, b = ([[row.get(key) for key in KEPT] for row in metrics(run)] for run in (first, second))
    assert a == b


def test_the_sft_stage_is_made_once_and_is_the_same_bytes_when_made_again(tmp_path):
    run_tiny(tmp_path, "grpo.max_steps=0")
    (folder,) = (tmp_path / "cache").glob("sft-*")
    first = (folder / "model.safetensors").read_bytes()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    run_tiny(tmp_path, "grpo.max_steps=0")
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp  # found, not made again
    other = tmp_path / "again"
    other.mkdir()
    run_tiny(other, "grpo.max_steps=0")
    assert (other / "cache" / folder.name / "model.safetensors").read_bytes() == first
    run_tiny(tmp_path, "grpo.max_steps=0", "sft.0.learning_rate=1e-3")
    assert len(list((tmp_path / "cache").glob("sft-*"))) == 2  # another stage, another hash


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.init=load", "model.path"),
        ("grpo.num_generation=4", "did you mean grpo.num_generations?"),
        ("grpo.beta=much", "expected a finite number"),
        ("data.source=nowhere", "nowhere"),
        ("grpo.advantage=nofile.py:f", 'no file "nofile.py"'),
        ("grpo.questions_per_step=1000", "questions_per_step"),
    ],
)
def test_bad_input_is_one_line_and_nothing_half_written(tmp_path, capsys, override, message):
    run_tiny(tmp_path, override, expect=2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list((tmp_path / "runs").glob("*"))


def test_a_missing_model_and_a_function_of_the_wrong_shape_are_one_line(tmp_path, capsys):
    run_tiny(tmp_path, "model.init=load", "model.path=missing", "sft=[]", expect=2)
    assert "missing" in capsys.readouterr().err
    bad = tmp_path / "bad.py"
    bad.write_text("def turned(rewards, info):\n    return rewards.T\n", encoding="utf-8")
    run_tiny(tmp_path, f"grpo.advantage={bad}:turned", expect=2)
    assert "returned shape (4, 2); expected (2, 4)" in capsys.readouterr().err


def test_a_reward_that_fails_later_is_one_line_and_a_part_that_comes_and_goes_counts_zero(tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def moody(example, completion, result):\n"
        "    return {'long': 1.0} if len(completion) % 2 else {'long': 0.0, 'odd': 1.0}\n"
        "def late(example, completion, result):\n"
        "    return {'x': 1 / (example.db_id == 'shop')}\n",  # fine on the table of the start-up check
        encoding="utf-8",
    )
    run = run_tiny(tmp_path, f"reward.function={mine}:moody")
    assert all("rewards/long/mean" in row for row in metrics(run) if "reward" in row)
    run_tiny(tmp_path, f"reward.function={mine}:late", expect=2)
    assert "mine.py:late' on" in capsys.readouterr().err


def test_evaluate_reads_a_checkpoint_and_repeats_the_runs_own_figures(tmp_path, capsys):
    run = run_tiny(tmp_path)
    out = tmp_path / "result.json"
    assert evaluate.main(["--checkpoint", str(run / "checkpoints" / "last"), "--out", str(out)]) == 0
    again, after = (json.loads(p.read_text(encoding="utf-8")) for p in (out, run / "eval-test-after.json"))
    times = ("seconds", "latency_p50", "latency_p95")
    assert {k: v for k, v in again.items() if k not in times} == {k: v for k, v in after.items() if k not in times}
    assert "execution_accuracy" in capsys.readouterr().out


def test_a_dry_run_checks_and_times_everything_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    arguments = ["--config", str(tmp_path / "tiny.toml"), "--dry-run", "--set", f"data.cache_dir={tmp_path / 'cache'}"]
    (tmp_path / "tiny.toml").write_text(CONFIG, encoding="utf-8")
    assert train.main([*arguments, "--set", f"run.output_dir={tmp_path / 'runs'}"]) == 0
    printed = capsys.readouterr().out
    assert "memory: about 0.0" in printed
    assert "test: 8 questions, prompts of up to" in printed
    assert re.search(
        r"one step took \d+\.\d s \(rollout .*, reward .*, update .*\); 4 steps would take 0\.\d\d h", printed
    )
    assert "evaluation would take 0.00 h (40 completions)" in printed  # val 8 x 3 (steps 0, 2, 4), test 8 x 2, greedy
    assert not (tmp_path / "runs").exists()
    original = train.encode_questions

    def val_is_long(*rest):
        return original(*rest[:-2], replace(rest[-2], data=replace(rest[-2].data, max_prompt_length=30)), rest[-1])

    monkeypatch.setattr(train, "encode_questions", val_is_long)
    assert train.main(arguments) == 2
    assert "8 of 8 val prompts exceed data.max_prompt_length = 30" in capsys.readouterr().err
    assert train.main([*arguments, "--set", "data.max_prompt_length=30"]) == 2
    assert "the SFT stage has no examples" in capsys.readouterr().err


def test_every_step_samples_from_a_stream_of_its_own(tmp_path, monkeypatch):
    seeds, rollout = [], train.rollout

    def spy(*arguments, generator, **settings):
        seeds.append(generator.initial_seed())
        return rollout(*arguments, generator=generator, **settings)

    monkeypatch.setattr(train, "rollout", spy)
    run_tiny(tmp_path)
    assert len(set(seeds)) == len(seeds) == 4


def test_the_best_step_by_validation_is_remembered_and_its_checkpoint_kept(tmp_path, monkeypatch):
    accuracies, measure = iter([0.1, 0.5, 0.3]), train.evaluate_policy  # at steps 0, 2, 4

    def scripted(*arguments, name, **settings):
        result = measure(*arguments, name=name, **settings)
        return result | ({"execution_accuracy": next(accuracies)} if name == "val" else {})

    monkeypatch.setattr(train, "evaluate_policy", scripted)
    run = run_tiny(tmp_path)
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["best_step"] == 2
    assert {path.name for path in (run / "checkpoints").iterdir() if path.is_dir()} == {"2", "4"}


def test_the_logged_classes_follow_the_metric_that_is_trained_on(tmp_path, monkeypatch):
    """A verdict that only BIRD's rule calls right makes a group all_correct only where BIRD's rule pays."""
    score = sqlenv.reward.score_completion
    only_bird = lambda *a: replace(score(*a), match=False, match_bird=True)  # noqa: E731
    monkeypatch.setattr(sqlenv.reward, "score_completion", only_bird)
    for metric, share in (("spider", 0.0), ("bird", 1.0)):
        flat = [f"reward.metric={metric}", "reward.weights={correct = 0.0, executes = 0.0, format = 0.0}"]
        rows = metrics(run_tiny(tmp_path, *flat, "grpo.max_steps=1"))
        assert [row["groups/all_correct_ratio"] for row in rows if "reward" in row] == [share]
