"""What a step logs: `grpo/telemetry.py`. Rule: sums over counts, JSON lines that survive a kill, nothing silent.

Command: pytest tests/test_telemetry.py
"""

import json
import math

import pytest
import torch

from grpo.telemetry import append_line, format_line, group_class, means, rollout_metrics, truncate_log


def test_a_mean_is_one_sum_over_one_count():
    assert means({"kl": (3, 4), "entropy": (torch.tensor(1.0), torch.tensor(2))}) == {"kl": 0.75, "entropy": 0.5}
    assert means({"kl": (0, 0)}) == {"kl": None}


def test_the_classes_of_groups_say_what_each_can_teach():
    """Groups of two: rewards, which are correct, which executed."""
    table = [
        ("mixed", [1.2, 0.1], [1, 0], [1, 1]),
        ("mixed", [0.2, 0.0], [0, 0], [0, 0]),  # nothing executes, but the format differs: it has a gradient
        ("mixed", [1.2, 1.0], [1, 1], [1, 1]),
        ("all_correct", [1.2, 1.2], [1, 1], [1, 1]),
        ("all_failed", [0.2, 0.2], [0, 0], [0, 0]),
        ("all_wrong", [0.1, 0.1], [0, 0], [1, 1]),
        ("all_wrong", [0.0, 0.0], [0, 0], [1, 0]),
        ("all_wrong", [1.0, 1.0], [1, 0], [1, 1]),  # a reward that does not see the rows
        ("mixed", [0.7, 0.7000001], [0, 0], [1, 1]),  # exact: this group has an advantage
    ]
    for expected, *columns in table:
        assert group_class(*map(torch.tensor, columns)) == expected


def test_the_metrics_of_a_step_by_hand():
    metrics = rollout_metrics(
        torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
        {"correct": torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "format": torch.ones(2, 2)},
        torch.tensor([[True, False], [False, False]]),
        [["ok", "ok"], ["sql_error", "rejected"]],
        torch.tensor([[5, 7], [9, 20]]),
        torch.tensor([[False, False], [False, True]]),
    )
    expected = {
        "reward": 0.25,
        "reward_std": math.sqrt(0.5) / 2,  # the unbiased std of (1, 0) is .7071, of (0, 0) it is 0
        "rewards/correct/mean": 0.25,
        "rewards/format/mean": 1.0,
        "frac_reward_zero_std": 0.5,
        "groups/mixed_ratio": 0.5,
        "groups/all_correct_ratio": 0,
        "groups/all_failed_ratio": 0.5,
        "groups/all_wrong_ratio": 0,
        "sql/ok_ratio": 0.5,
        "sql/rejected_ratio": 0.25,
        "sql/sql_error_ratio": 0.25,
        "sql/budget_ratio": 0,
        "sql/too_big_ratio": 0,
        "completions/mean_length": 10.25,
        "completions/min_length": 5,
        "completions/max_length": 20,
        "completions/mean_terminated_length": 7,
        "completions/min_terminated_length": 5,
        "completions/max_terminated_length": 9,
        "completions/clipped_ratio": 0.25,
    }
    assert metrics == pytest.approx(expected)
    assert all(type(value) is float for value in metrics.values())


def test_flat_groups_have_exactly_no_std_and_a_group_of_one_is_flat():
    for rewards in (torch.full((3, 8), 1.2), torch.rand(3, 1)):
        zeros = torch.zeros_like(rewards)
        statuses = [["ok"] * rewards.shape[1]] * 3
        metrics = rollout_metrics(rewards, {}, zeros > 0, statuses, zeros.long(), zeros == 0)
        assert metrics["reward_std"] == 0.0
        assert metrics["frac_reward_zero_std"] == 1.0
        assert "completions/mean_terminated_length" not in metrics  # none terminated


def test_a_line_is_appended_at_once_and_infinity_becomes_null_with_a_warning(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1, "reward": 0.5, "text": "é\n\u2028"})
    record = {"step": 2, "grad_norm": math.nan, "rows": [{"logprobs": [0.5, -math.inf]}], "kl": None}
    with pytest.warns(UserWarning, match=r"metrics\.jsonl, step 2: not finite: grad_norm, rows$"):
        append_line(path, record)
    first, second = path.read_bytes().decode("utf-8").strip("\n").split("\n")
    assert json.loads(first)["text"] == "é\n\u2028"
    assert json.loads(second) == {"step": 2, "grad_norm": None, "rows": [{"logprobs": [0.5, None]}], "kl": None}


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]


def test_a_log_is_cut_back_to_the_step_of_a_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    truncate_log(path, 3)  # no log yet: nothing to do
    assert not path.exists()
    for step in range(1, 6):
        append_line(path, {"step": step, "text": "a\u2028b"})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "tex')  # the run was killed here
    truncate_log(path, 5)
    assert steps(path) == [1, 2, 3, 4, 5]
    truncate_log(path, 3)
    append_line(path, {"step": 4})
    assert steps(path) == [1, 2, 3, 4]
    assert list(tmp_path.iterdir()) == [path]


def test_the_console_line_shows_what_was_measured():
    record = {"step": 3, "reward": 0.5123, "frac_reward_zero_std": 0.3125, "completions/mean_length": 24.1}
    record |= {"kl": None, "grad_norm": 0.8149, "step_time": 1.44}
    expected = "reward 0.512  flat 0.31  length 24.1  grad 0.81  seconds 1.4"
    assert format_line(record) == expected
