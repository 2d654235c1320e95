"""A run that teaches nothing says so, and ends where it is asked to: reasons, evidence, advice, exit codes.

Run: pytest tests/test_watch.py
"""

import json

import pytest
from tiny_run import run_tiny

import train
from grpo.card import model_card
from grpo.checkpoint import last_checkpoint
from grpo.config import Config, WatchConfig
from grpo.watch import diagnose

WATCH = WatchConfig(steps=3, flat_groups=0.9, clipped_completions=0.5)
HEALTHY = {"frac_reward_zero_std": 0.3, "grad_norm": 0.5, "completions/clipped_ratio": 0.1, "groups/mixed_ratio": 0.7}
FLAT = HEALTHY | {"frac_reward_zero_std": 0.95}


def flat(kind: str, **parts: float) -> dict:
    return FLAT | {f"groups/{kind}_ratio": 0.95} | {f"rewards/{name}/mean": value for name, value in parts.items()}


@pytest.mark.parametrize(
    ("rows", "reason", "words"),
    [
        ([HEALTHY] * 3, None, ""),
        ([flat("all_correct")] * 2, None, ""),  # not long enough
        ([flat("all_correct"), HEALTHY, flat("all_correct")], None, ""),  # not in a row
        ([HEALTHY, *[flat("all_correct")] * 3], "flat_groups", "too easy by now"),
        ([flat("all_failed")] * 3, "flat_groups", "nothing executes"),
        (
            [flat("all_wrong", format=1.0, exact=0.0, executes=0.4)] * 3,
            "flat_groups",
            "cannot tell the completions apart",
        ),
        ([HEALTHY | {"grad_norm": 0.0}] * 3, "zero_gradient", "exactly zero, though 70% of the groups differ"),
        ([HEALTHY | {"grad_norm": 0.0}, HEALTHY, HEALTHY | {"grad_norm": 0.0}], None, ""),
        ([HEALTHY | {"grad_norm": 1e-12}] * 3, None, ""),  # exactly zero, or it is a gradient
        ([HEALTHY | {"grad_norm": None}] * 3, "zero_gradient", ""),  # nothing was scored at all
        ([HEALTHY | {"completions/clipped_ratio": 0.6}] * 3, "truncation", "60% of the completions"),
    ],
)
def test_a_finding_has_a_reason_evidence_and_advice(rows, reason, words):
    finding = diagnose(rows, WATCH)
    assert (finding.reason if finding else None) == reason
    assert words in str(finding)


def test_a_saturated_reward_is_named_part_by_part():
    finding = diagnose([flat("all_wrong", format=1.0, exact=0.0, executes=0.4)] * 3, WATCH)
    assert finding.evidence.endswith("most of them all_wrong; parts that never vary: format 1.000, exact 0.000")
    rows = [flat("all_wrong", correct=0.4, format=1.0)] * 3
    finding = diagnose(rows, WATCH, {"correct": 0.0, "format": 1.0})
    assert finding.evidence.endswith("; parts that never vary: format 1.000; parts that weigh nothing: correct")


DEAD = ("reward.weights={correct=0.0, executes=0.0, format=0.0}", "watch.steps=2")  # every reward is 0


def test_a_dead_run_warns_and_goes_on_by_default(tmp_path, capsys):
    run = run_tiny(tmp_path, *DEAD)
    printed = capsys.readouterr().out
    assert printed.count("warning: flat_groups: 100% of the groups of the last 2 steps were flat") == 2  # steps 2 and 4
    assert last_checkpoint(run).name == "4"


def test_a_dead_run_ends_where_asked_with_its_own_exit_code_a_checkpoint_and_a_summary(tmp_path, capsys):
    run = run_tiny(tmp_path, *DEAD, "watch.halt=true", "run.save_steps=0", expect=3)
    assert "halted: flat_groups: 100% of the groups" in capsys.readouterr().err
    assert last_checkpoint(run).name == "2"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["verdict"].startswith("halted at step 2: flat_groups")
    assert "after" not in summary
    assert train.main(["--resume", str(run), "--allow-changes", "--set", "watch.halt=false"]) == 0
    assert last_checkpoint(run).name == "4"


def test_truncation_and_a_zero_gradient_have_exit_codes_of_their_own(tmp_path, monkeypatch):
    watch = ["watch.halt=true", "watch.steps=1", "grpo.max_steps=2"]
    for changes, code in (({"grad_norm": 0.0}, 4), ({"completions/clipped_ratio": 1.0}, 5)):
        with monkeypatch.context() as patch:
            patch.setattr(train, "rollout_metrics", lambda *_, new=changes: HEALTHY | {"reward": 0.5} | new)
            patch.setattr(train, "means", lambda pairs, new=changes: {"grad_norm": new.get("grad_norm", 0.5)})
            run_tiny(tmp_path, *watch, expect=code)


def test_the_model_card_says_what_was_measured_and_how_to_repeat_it(tmp_path):
    run = run_tiny(tmp_path, "grpo.max_steps=1", "eval.num_generations=2")
    card = (last_checkpoint(run) / "README.md").read_text(encoding="utf-8")
    assert card.startswith('---\nlibrary_name: transformers\nbase_model: "random initialisation"\n')
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    before = summary["before"]
    row = f"| before | {before['execution_accuracy']:.3f} [{before['low']:.3f}, {before['high']:.3f}] |"
    assert row in card
    assert "| | EX | mean@2 | pass@2 | vote@2 |\n|---|---|---|---|---|\n" in card
    assert summary["verdict"] in card
    assert "1 supervised stage(s), then 1 steps of GRPO:\n4 questions x 4 completions" in card
    assert "{" not in card.replace(json.dumps(json.loads(card.split("reward weights ")[1].split(".\nMade")[0])), "")


def test_the_card_of_an_adapter_names_its_base():
    from dataclasses import replace

    config = Config()
    config = replace(config, model=replace(config.model, path="Qwen/Qwen2.5-Coder-0.5B", lora_r=32))
    result = {"execution_accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 100}
    card = model_card(config, {"before": result, "verdict": "taught", "versions": {"torch": "2.13"}}, 7)
    assert "library_name: peft" in card
    assert "A LoRA adapter of Qwen/Qwen2.5-Coder-0.5B, trained" in card
