"""Questions that can teach: the pass-rate filter, dynamic sampling, and the gate before RL.

Run: pytest tests/test_difficulty.py
"""

import json

import pytest
import torch
from tiny_run import run_tiny

import train
from grpo.difficulty import class_counts, gate, pass_rate_class, read_pass_rates, write_pass_rates
from grpo.rollout import Batch, Rewards, Rollouts, is_mixed, join


def test_the_five_classes_by_hand_and_at_their_borders():
    assert [pass_rate_class(s, 8, 0.2, 0.8) for s in range(9)] == ["none", "low", *["kept"] * 5, "high", "all"]
    assert [pass_rate_class(s, 8, 0.8, 1.1) for s in (0, 6, 7, 8)] == ["none", "low", "kept", "kept"]
    # A rate that equals a border is outside: 0 < p <= lo is low, hi <= p < 1 is high.
    assert [pass_rate_class(s, 5, 0.2, 0.8) for s in range(6)] == ["none", "low", "kept", "kept", "high", "all"]
    assert [pass_rate_class(s, 4, 0.0, 1.0) for s in range(5)] == ["none", "kept", "kept", "kept", "all"]


def test_the_five_counts_sum_to_the_number_of_questions():
    successes = [0, 0, 1, 4, 4, 4, 7, 8, 8]
    counts = class_counts(successes, 8, 0.2, 0.8)
    assert counts == {"none": 2, "low": 1, "kept": 3, "high": 1, "all": 2}
    assert sum(counts.values()) == len(successes)


def test_pass_rates_are_read_back_in_the_order_of_the_questions(tmp_path):
    file = tmp_path / "pass_rates.json"
    write_pass_rates(file, ["a", "b", "c"], [0, 3, 4], 4, 0.2, 0.8)
    assert read_pass_rates(file, ["c", "a"], 4) == [4, 0]
    assert json.loads(file.read_text(encoding="utf-8"))["counts"] == {
        "none": 1,
        "low": 0,
        "kept": 1,
        "high": 0,
        "all": 1,
    }
    for keys, k in ((["a", "z"], 4), (["a"], 8)):
        with pytest.raises(ValueError, match=r"pass_rates.json: num_generations 4, [01] of [12] questions missing"):
            read_pass_rates(file, keys, k)


@pytest.mark.parametrize(
    ("greedy", "pass_at_k", "word"),
    [
        (0.10, 0.72, "room: +62.0 points between greedy 0.100 and pass@8 0.720"),
        (0.00, 0.03, "no signal"),
        (0.97, 0.98, "no room"),
        (0.50, 0.53, "no room"),  # 3 points, inside +-4
        (0.50, 0.55, "room"),
    ],
)
def test_the_gate_says_whether_there_is_something_to_make_likely(greedy, pass_at_k, word):
    assert gate(greedy, 0.04, pass_at_k, 8).startswith(word)


def settings(run):
    return json.loads((run / "pass_rates.json").read_text(encoding="utf-8"))


def fake_successes(monkeypatch, rates):
    """Every scored group of the filter has so many right completions, in turn."""
    measure = train.sample_verdicts

    def scripted(*arguments, **others):
        verdicts, tokens, seconds = measure(*arguments, **others)
        for group, right in zip(verdicts, rates * 99, strict=False):
            group[:] = [train.replace(v, match=i < right) for i, v in enumerate(group)]
        return verdicts, tokens, seconds

    monkeypatch.setattr(train, "sample_verdicts", scripted)


def test_only_the_band_is_trained_on_and_the_file_serves_a_later_run(tmp_path, monkeypatch, capsys):
    fake_successes(monkeypatch, [0, 1, 2, 4])  # of 4: none, 0.25 kept, 0.5 kept, all
    asked = []
    asks = train.next_questions
    monkeypatch.setattr(train, "next_questions", lambda run, n: asked.append(run.questions) or asks(run, n))
    run = run_tiny(tmp_path, "filter.num_generations=4", "grpo.max_steps=1")
    assert "filter: none 4, low 0, kept 8, high 0, all 4, of 16 questions" in capsys.readouterr().out
    assert settings(run)["counts"] == {"none": 4, "low": 0, "kept": 8, "high": 0, "all": 4}
    assert len(asked[0]) == 8
    monkeypatch.setattr(train, "sample_verdicts", None)  # nothing is sampled again
    again = run_tiny(tmp_path, "filter.num_generations=4", "grpo.max_steps=1", f"filter.file={run / 'pass_rates.json'}")
    assert settings(again) == settings(run)
    assert [e.question for e, _ in asked[1]] == [e.question for e, _ in asked[0]]
    assert train.main(["--resume", str(again), "--set", "grpo.max_steps=2", "--allow-changes"]) == 0
    run_tiny(tmp_path, "filter.num_generations=2", f"filter.file={run / 'pass_rates.json'}", expect=2)
    assert "expected 2 and all of them" in capsys.readouterr().err


def test_a_filter_that_leaves_too_little_says_so(tmp_path, monkeypatch, capsys):
    fake_successes(monkeypatch, [0, 4])
    run_tiny(tmp_path, "filter.num_generations=4", expect=2)
    assert "0 usable training questions; expected at least grpo.questions_per_step = 4" in capsys.readouterr().err


def batch(rewards: list[list[float]], first: int, **parts) -> Batch:
    """Groups of two completions whose ids, texts and verdicts tell which question they are of."""
    numbers = range(first, first + len(rewards))
    ids = [[[n, 0], [n, 1]] for n in numbers]
    rollouts = Rollouts(
        [[n] for n in numbers], ids, [[[0.0, 0.0]] * 2] * len(rewards), [[True, True]] * len(rewards), ids
    )
    total = torch.tensor(rewards)
    return Batch([*numbers], rollouts, [[f"{n}"] * 2 for n in numbers], Rewards(total, parts, ids), len(rewards))


def test_joined_batches_keep_every_column_together():
    a = batch([[1.0, 0.0], [1.0, 1.0]], 0, correct=torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    b = batch([[0.0, 0.0], [0.0, 2.0]], 2, style=torch.tensor([[0.0, 0.0], [0.0, 2.0]]))
    assert (is_mixed(a), is_mixed(b)) == ([True, False], [False, True])
    both = join(a, b, [0, 3])
    assert both.examples == [0, 3]
    assert both.rollouts.prompt_ids == [[0], [3]]
    assert both.rollouts.completion_ids == both.rewards.verdicts == [[[0, 0], [0, 1]], [[3, 0], [3, 1]]]
    assert both.texts == [["0", "0"], ["3", "3"]]
    assert both.rewards.total.tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert both.rewards.parts["correct"].tolist() == [[1.0, 0.0], [0.0, 0.0]]  # b has no such part: it counts 0
    assert both.rewards.parts["style"].tolist() == [[0.0, 0.0], [0.0, 2.0]]
    assert both.asked == 4


def metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "reward" in row]


def test_dynamic_sampling_replaces_flat_groups_in_bounded_rounds_and_counts_what_it_cost(tmp_path, monkeypatch):
    calls, score = [], train.score_rollouts

    def scripted(examples, texts, *rest):
        rewards = score(examples, texts, *rest)
        flat = torch.zeros_like(rewards.total)
        mixed = flat.clone()
        mixed[:, 0] = 1.0
        calls.append(len(examples))
        # The step's own four groups: one mixed. The first round finds one more among three, the second none of two.
        which = {4: [True, False, False, False], 3: [False, True, False], 2: [False, False]}[len(examples)]
        return train.Rewards(torch.where(torch.tensor(which)[:, None], mixed, flat), rewards.parts, rewards.verdicts)

    monkeypatch.setattr(train, "score_rollouts", scripted)
    (row,) = metrics(run_tiny(tmp_path, "grpo.max_steps=1", "grpo.max_resampling=2"))
    assert calls == [4, 3, 2]
    assert row["sampled_groups"] == 9
    assert row["frac_reward_zero_std"] == 0.5  # two of four
    assert row["epoch"] == 9 / 16
    (plain,) = metrics(run_tiny(tmp_path, "grpo.max_steps=1"))
    assert (plain["sampled_groups"], plain["frac_reward_zero_std"]) == (4, 0.75)
    assert row["num_tokens"] > plain["num_tokens"]


def test_the_gate_is_measured_before_the_first_step_only(tmp_path, capsys):
    run = run_tiny(tmp_path, "eval.num_generations=2")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows if "val/pass@2" in row] == [0]
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["gate"].startswith("no signal")
    assert "gate: no signal" in capsys.readouterr().out
