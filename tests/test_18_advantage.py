"""Step 18: advantages. `grpo/advantage.py`: rewards (Q, G) in, advantages (Q, G) out.

Rule: A = (r - m) / (s + 1e-4) in each group (GRPO) and four relatives; a group of equal rewards gets exactly 0.
The update (step 20) multiplies the gradient of every token of a completion by its A.
Command: pytest tests/test_18_advantage.py
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo.advantage import ADVANTAGES, AdvantageInfo, check_advantage, compute_advantages, contract, load_function

ALL = sorted(ADVANTAGES)


# --- worked numbers ---

# One success in eight: m = 1/8, unbiased s = sqrt((7/8) / 7) = .35355 (the population std would be .33072: +2.6458).
# One success in four with values (1, 0, 0, 0): m = 1/4, s = 1/2.
WORKED = {
    "grpo": [0.75 / 0.5001, -0.25 / 0.5001],
    "dr_grpo": [0.75, -0.25],
    "batch": [0.75 / 0.353653, -0.25 / 0.353653],  # the other group is flat: s over all 8 rewards = .353553
    "rloo": [1.0, -1 / 3],  # the others' mean: 0 for the winner, 1/3 for a loser
    "maxrl": [0.75 / 0.2501, -0.25 / 0.2501],
}


@pytest.mark.parametrize("name", ALL)
def test_worked_numbers(name):
    advantages = compute_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), name)
    win, lose = WORKED[name]
    torch.testing.assert_close(advantages, torch.tensor([[win, lose, lose, lose], [0.0] * 4]), rtol=1e-5, atol=1e-6)


def test_the_std_is_unbiased_and_eps_stands_outside_the_root():
    one_in_eight = torch.eye(8)[:1]
    assert compute_advantages(one_in_eight, "grpo")[0, 0].item() == pytest.approx(0.875 / (math.sqrt(1 / 8) + 1e-4))
    # rewards 1e-3 apart: s = 7.07e-4 is of the size of eps, so its place shows: .5e-3 / 8.07e-4 = .6195
    assert compute_advantages(torch.tensor([[1e-3, 0.0]]), "grpo")[0, 0].item() == pytest.approx(0.6195, abs=1e-4)


def test_the_docstring_examples_hold():
    for name, expected in {"grpo": 0.5 / (math.sqrt(0.5) + 1e-4), "dr_grpo": 0.5, "rloo": 1.0}.items():
        assert compute_advantages(torch.tensor([[1.0, 0.0]]), name).tolist()[0] == pytest.approx([expected, -expected])


def test_every_formula_equals_a_loop_over_groups():
    rewards = torch.rand(5, 6)
    everything = rewards.flatten().tolist()
    grand = sum(everything) / 30
    batch_std = math.sqrt(sum((r - grand) ** 2 for r in everything) / 29)
    for q, group in enumerate(rewards.tolist()):
        m = sum(group) / 6
        s = math.sqrt(sum((r - m) ** 2 for r in group) / 5)
        for g, r in enumerate(group):
            others = [x for j, x in enumerate(group) if j != g]
            spec = {
                "grpo": (r - m) / (s + 1e-4),
                "dr_grpo": r - m,
                "batch": (r - m) / (batch_std + 1e-4),
                "rloo": r - sum(others) / 5,
                "maxrl": (r - m) / (m + 1e-4),
            }
            for name in ALL:
                assert compute_advantages(rewards, name)[q, g].item() == pytest.approx(spec[name], abs=1e-5), name


# --- properties ---


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 0.7, 1.2, 1e-9, 3e6 + 0.25])
def test_equal_rewards_give_exactly_zero_whatever_the_value(name, value):
    rewards = torch.full((3, 8), value)
    rewards[1, 3] += 1.0  # another group is alive
    rewards[2] += 0.3  # and one is flat at another value
    advantages = compute_advantages(rewards, name)
    hint = "where(rewards == rewards[:, :1]): exactly 0, not the rounding of the mean"
    assert not advantages[0].any(), hint
    assert not advantages[2].any(), hint
    assert advantages[1].any()


def test_the_float32_mean_of_equal_rewards_is_not_that_reward():
    """Why the rule is written with ==: a peer's eps of 1e-8 turns this rounding noise into advantages of order 1."""
    rewards = torch.full((1, 8), 0.7)
    noise = rewards - rewards.mean(dim=1, keepdim=True)
    assert noise.any()
    assert (noise / (noise.std() + 1e-8)).abs().max() > 0.5


@pytest.mark.parametrize("name", ALL)
def test_a_tiny_difference_is_still_a_difference(name):
    assert compute_advantages(torch.tensor([[0.7, 0.7, 0.7, 0.7000001]]), name).any()


@pytest.mark.parametrize("rewards", [[0.0] + [0.95] * 7, [0.7] * 7 + [0.7000001], [0.0] * 7 + [1e6]])
def test_no_advantage_is_larger_than_a_group_of_eight_allows(rewards):
    """(r - m) / s is at most (G - 1) / sqrt(G) = 2.4749. A std that leaves the outlier out would give thousands."""
    assert compute_advantages(torch.tensor([rewards]), "grpo").abs().max() <= 7 / math.sqrt(8) + 1e-5


@pytest.mark.parametrize("name", ALL)
def test_one_completion_or_one_question_is_finite(name):
    assert compute_advantages(torch.tensor([[0.4]]), name).tolist() == [[0.0]]
    assert not compute_advantages(torch.tensor([[0.4], [0.9]]), name).any()


@pytest.mark.parametrize("name", ALL)
def test_groups_are_rows_and_follow_permutations(name):
    rewards = torch.rand(4, 6)
    rows, columns = torch.randperm(4), torch.randperm(6)
    base = compute_advantages(rewards, name)
    torch.testing.assert_close(compute_advantages(rewards[rows], name), base[rows])
    torch.testing.assert_close(compute_advantages(rewards[:, columns], name), base[:, columns])
    torch.testing.assert_close(base.sum(dim=1), torch.zeros(4), atol=1e-4, rtol=0)
    if name != "batch":
        torch.testing.assert_close(compute_advantages(rewards[:1], name), base[:1])


# --- your own formula ---


def custom(tmp_path: Path, body: str) -> str:
    file = tmp_path / "my_advantage.py"
    file.write_text(f"import torch\n\ndef my_fn(rewards, info):\n    {body}\n\nsize = 3\n", encoding="utf-8")
    return f"{file}:my_fn"


def test_a_file_with_a_function_is_an_advantage_and_sees_lengths_and_parts(tmp_path):
    spec = custom(tmp_path, "return info.parts['correct'] * rewards - info.lengths * info.truncated")
    info = AdvantageInfo(torch.tensor([[2, 3]]), torch.tensor([[False, True]]), {"correct": torch.tensor([[1.0, 0.0]])})
    assert compute_advantages(torch.tensor([[5.0, 7.0]]), spec, info).tolist() == [[5.0, -3.0]]
    assert check_advantage(spec).__name__ == "my_fn"
    assert compute_advantages(torch.ones(1, 2), lambda rewards, info: rewards - 1).tolist() == [[0.0, 0.0]]


def test_the_path_is_relative_to_the_current_directory(tmp_path, monkeypatch):
    custom(tmp_path, "return rewards * 2")
    monkeypatch.chdir(tmp_path)
    assert compute_advantages(torch.ones(1, 2), "my_advantage.py:my_fn").tolist() == [[2.0, 2.0]]


def test_a_formula_cannot_change_the_rewards_it_is_given(tmp_path):
    rewards = torch.tensor([[1.0, 0.0]])
    compute_advantages(rewards, custom(tmp_path, "return rewards.sub_(0.5)"))
    assert rewards.tolist() == [[1.0, 0.0]]


WRONG = {
    "return rewards.mean(dim=1)": r"my_fn\" returned shape \(2,\); expected \(2, 4\)",
    "return rewards.tolist()": r"my_fn\" returned a list; expected \(2, 4\)",
    "return rewards > 0": 'my_fn" returned torch.bool, .* expected finite floats',
    "return rewards / 0": "finite: False",
    "return torch.zeros(2, 4, requires_grad=True)": "gradient: True",
    "return rewards.foo": 'my_fn" failed with AttributeError',
}


@pytest.mark.parametrize("body", WRONG)
def test_a_wrong_result_fails_at_start_up_and_names_the_function(tmp_path, body):
    with pytest.raises(ValueError, match=WRONG[body]):
        check_advantage(custom(tmp_path, body))


def test_what_cannot_be_loaded_says_why(tmp_path):
    spec = custom(tmp_path, "return rewards")
    with pytest.raises(ValueError, match=r'no function "my_fun" in .*; found: my_fn'):
        load_function(spec[:-2] + "fun")
    with pytest.raises(ValueError, match='no function "size"'):
        load_function(spec.replace(":my_fn", ":size"))
    with pytest.raises(ValueError, match=r"takes \(rewards, info\); expected \(example, completion, result\)"):
        load_function(spec, "example, completion, result")
    with pytest.raises(ValueError, match=r'no file "nowhere\.py"'):
        load_function("nowhere.py:fn")
    with pytest.raises(ValueError, match="the file failed with SyntaxError"):
        load_function(custom(tmp_path, "return ("))
    with pytest.raises(ValueError, match=r"unknown advantage \"dr_gpo\"; did you mean dr_grpo\?"):
        check_advantage("dr_gpo")


def test_rewards_must_be_a_finite_table():
    for rewards in (torch.ones(3), torch.tensor([[1.0, math.nan]])):
        with pytest.raises(ValueError, match="expected finite numbers"):
            compute_advantages(rewards, "grpo")
    with pytest.raises(ValueError, match="expected rewards >= 0"):
        compute_advantages(torch.tensor([[1.0, -2.0]]), "maxrl")


# --- the contract report ---


def test_the_contract_says_what_a_formula_keeps_and_breaks(tmp_path):
    def properties(spec):
        return {line[:45].strip(): line[45:] for line in contract(spec)}

    keeps = properties("grpo")
    assert keeps.pop("doubling every reward") == "changes nothing"
    assert set(keeps.values()) == {"yes"}
    assert properties("dr_grpo")["doubling every reward"] == "doubles it"
    assert properties("maxrl")["adding 1 to every reward changes nothing"] == "no"
    raw = properties(custom(tmp_path, "return rewards * torch.arange(rewards.shape[1]).clamp(max=3)"))
    assert raw["equal rewards give exactly 0"] == "no, up to 2.1"
    naive = properties(custom(tmp_path, "return rewards - rewards.mean(dim=1, keepdim=True)"))
    assert naive["equal rewards give exactly 0"] == "no, up to 6e-08"
    assert raw["follows a permutation of the group"] == raw["sums to 0 in every group"] == "no"
    lengths = properties(custom(tmp_path, "return (rewards - rewards.mean(1, keepdim=True)) / info.lengths"))
    assert lengths["follows a permutation of the group"] == "yes"


def test_the_contract_runs_from_the_command_line(tmp_path):
    def run(spec):
        command = [sys.executable, "-m", "grpo.advantage", spec]
        return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)

    good, bad = run("rloo"), run(custom(tmp_path, "return rewards[0]"))
    assert (good.returncode, bad.returncode) == (0, 1)
    assert "doubles it" in good.stdout
    assert "expected (2, 4)" in bad.stderr
    assert "Traceback" not in bad.stderr
