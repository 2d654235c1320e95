"""Step 22: a killed run goes on as if nothing had happened.

Built here: grpo/checkpoint.py `derived_generator`, `save_checkpoint`, `last_checkpoint`, `load_training_state`.
Rule: every random number comes from a generator seeded by (seed, purpose, step), and a checkpoint holds the rest:
weights, optimizer, progress. So 2 steps + kill + resume + 2 steps give the bytes of 4 steps (CPU, same threads).
Run: pytest tests/test_22_resume.py
"""

import json
import os
import signal

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_run import run_tiny

import grpo.checkpoint
import grpo.policy
import grpo.sft
import train
from grpo.checkpoint import derived_generator, last_checkpoint, save_checkpoint


def steps(run, name="metrics.jsonl"):
    rows = [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]
    timed = ("step_time", "tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k not in timed} for row in rows]


def test_the_generator_depends_on_seed_purpose_and_step_and_on_nothing_else():
    def draw(*key):
        return torch.rand(3, generator=derived_generator(*key)).tolist()

    assert draw(0, "rollout", 5) == draw(0, "rollout", 5)
    others = [draw(1, "rollout", 5), draw(0, "order", 5), draw(0, "rollout", 6)]
    assert all(other != draw(0, "rollout", 5) for other in others)


@pytest.mark.parametrize("overrides", [(), ("grpo.num_iterations=2", "grpo.beta=0.1")])
def test_killed_between_checkpoints_and_resumed_equals_never_killed(tmp_path, monkeypatch, overrides):
    (tmp_path / "mine.py").write_text("def f(example, text, result):\n    return {'n': len(text)}\n", encoding="utf-8")
    overrides += (f"reward.function={tmp_path / 'mine.py'}:f",)  # without differences there would be nothing to resume
    whole = run_tiny(tmp_path, *overrides)
    assert all(row["grad_norm"] > 0 for row in steps(whole) if "reward" in row)

    def kill(run, *rest):
        log_step(run, *rest)
        if run.progress["step"] == 3:  # one step after the checkpoint of step 2
            raise KeyboardInterrupt

    log_step = train.log_step
    with monkeypatch.context() as patch:
        patch.setattr(train, "log_step", kill)
        run_tiny(tmp_path, *overrides, expect=130)
    killed = tmp_path / "runs" / "tiny-2"
    assert last_checkpoint(killed).name == "2"
    assert [row["step"] for row in steps(killed)] == [0, 1, 2, 2, 3]  # 0 and 2 twice: val comes on lines of its own
    torch.rand(7)  # somebody else uses the global stream in between
    assert train.main(["--resume", str(killed)]) == 0
    assert steps(killed) == steps(whole)
    assert steps(killed, "samples.jsonl") == steps(whole, "samples.jsonl")
    for name in ("model.safetensors",):
        a, b = (load_file(last_checkpoint(run) / name) for run in (killed, whole))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(("at_step", "left"), [(5, 7), (9, 2)])  # the state is kept when a stage ends, and at 5
def test_killed_in_a_supervised_stage_and_resumed_equals_never_killed(tmp_path, monkeypatch, at_step, left):
    monkeypatch.setattr(grpo.policy, "LOG_EVERY", 5)
    stage = "{{databases=2, questions_per_database=2, max_steps={}}}"
    stages = ["grpo.max_steps=1", f"sft=[{stage.format(3)}, {stage.format(7)}]"]
    whole = run_tiny(tmp_path, *stages, f"data.cache_dir={tmp_path / 'other'}")
    taken, loss = [], grpo.sft.sft_loss

    def kill(*arguments):
        taken.append(1)
        if len(taken) == at_step:
            raise KeyboardInterrupt
        return loss(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(grpo.sft, "sft_loss", kill)
        run_tiny(tmp_path, *stages, expect=130)
    taken.clear()
    monkeypatch.setattr(grpo.sft, "sft_loss", lambda *a: (taken.append(1), loss(*a))[1])
    killed = tmp_path / "runs" / "tiny-2"
    assert train.main(["--resume", str(killed)]) == 0
    assert len(taken) == left
    assert steps(killed, "sft.jsonl") == steps(whole, "sft.jsonl")
    assert steps(killed) == steps(whole)
    a, b = (load_file(last_checkpoint(run) / "model.safetensors") for run in (killed, whole))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not list((tmp_path / "cache").glob("*.pt"))


def test_a_changed_config_is_refused_with_the_difference_unless_allowed(tmp_path, capsys):
    run = run_tiny(tmp_path, "grpo.max_steps=2")
    more = ["--resume", str(run), "--set", "grpo.max_steps=3", "--set", "grpo.epsilon=0.1"]
    assert train.main(more) == 2
    assert (
        "changed config: grpo.max_steps: 2 -> 3; grpo.epsilon: 0.2 -> 0.1; --allow-changes" in capsys.readouterr().err
    )
    assert "max_steps = 2" in (run / "config.toml").read_text(encoding="utf-8")
    assert train.main([*more, "--allow-changes"]) == 0
    assert last_checkpoint(run).name == "3"
    assert "max_steps = 3" in (run / "config.toml").read_text(encoding="utf-8")
    edited = (run / "config.toml").read_text(encoding="utf-8").replace("beta = 0.0", "beta = 0.5")
    (run / "config.toml").write_text(edited, encoding="utf-8")
    assert train.main(["--resume", str(run)]) == 2  # an edit of the file is a change like any other
    assert "changed config: grpo.beta: 0.0 -> 0.5" in capsys.readouterr().err
    config = tmp_path / "tiny.toml"  # the file as it was: max_steps 4
    assert train.main(["--resume", str(run), "--config", str(config)]) == 2
    assert "grpo.max_steps: 3 -> 4" in capsys.readouterr().err


def test_the_first_ctrl_c_lets_the_step_end_and_saves_it(tmp_path, monkeypatch, capsys):
    handler = signal.getsignal(signal.SIGINT)  # a shell starts background jobs with Ctrl-C ignored
    whole, log_step = run_tiny(tmp_path), train.log_step

    def press(run, *rest):
        log_step(run, *rest)
        if run.progress["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(train, "log_step", press)
        run_tiny(tmp_path, expect=130)
    stopped = tmp_path / "runs" / "tiny-2"
    assert f"to go on: python train.py --resume {stopped}" in capsys.readouterr().err
    assert last_checkpoint(stopped).name == "3"  # between the checkpoints of steps 2 and 4
    assert signal.getsignal(signal.SIGINT) is handler
    assert train.main(["--resume", str(stopped)]) == 0
    assert steps(stopped) == steps(whole)
    with train.interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_time_of_earlier_processes_counts(tmp_path):
    run = run_tiny(tmp_path, "grpo.max_steps=2")
    state = torch.load(last_checkpoint(run) / "training_state.pt", weights_only=True)
    assert state["progress"]["seconds"] > 0
    state["progress"]["seconds"] = 1000.0
    torch.save(state, last_checkpoint(run) / "training_state.pt")
    assert train.main(["--resume", str(run)]) == 0
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["seconds"] > 1000


def test_old_checkpoints_go_and_the_best_stays(tmp_path):
    run = run_tiny(tmp_path, "grpo.max_steps=6", "eval.eval_steps=1", "run.save_steps=1")
    kept = {path.name for path in (run / "checkpoints").iterdir() if path.is_dir()}
    state = torch.load(last_checkpoint(run) / "training_state.pt", weights_only=True)["progress"]
    assert kept <= {"6", str(state["best_step"])}
    assert "6" in kept


def test_a_crash_while_writing_costs_no_earlier_checkpoint(tmp_path, monkeypatch, capsys):
    def full_disk(*_):
        raise OSError("no space left on device")

    run = run_tiny(tmp_path, "grpo.max_steps=2")
    monkeypatch.setattr(torch, "save", full_disk)
    run_tiny(tmp_path, expect=2)
    assert "no space left on device" in capsys.readouterr().err
    assert last_checkpoint(run).name == "2"
    monkeypatch.undo()
    assert train.main(["--resume", str(run)]) == 0


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("unexpected pos 64 vs 0"), SafetensorError("io")])
def test_a_checkpoint_that_cannot_be_written_names_the_one_that_is_kept(tmp_path, monkeypatch, capsys, error):
    def fail(*_):
        raise error

    run = run_tiny(tmp_path, "grpo.max_steps=2")
    monkeypatch.setattr(grpo.checkpoint, "save_policy", fail)
    more = ["--resume", str(run), "--allow-changes", "--set", "grpo.max_steps=3"]
    assert train.main(more) == 2
    assert f"could not be written ({error}); the one before it is whole" in capsys.readouterr().err
    assert [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()] == ["2"]
    monkeypatch.undo()
    assert train.main(more) == 0


@pytest.mark.parametrize("crash_at", [1, 2])
def test_a_kill_while_the_last_checkpoint_is_written_again_does_not_lose_it(tmp_path, monkeypatch, crash_at):
    """The old folder moves aside, the new one takes its place, the old one goes: killed before the 1st or 2nd move."""
    run = run_tiny(tmp_path, "grpo.max_steps=0")
    model, progress = torch.nn.Linear(2, 2), {"step": 0, "best_step": 0}
    moves, replace = [], os.replace

    def kill(source, target):
        moves.append(source)
        if len(moves) == crash_at:
            raise KeyboardInterrupt
        replace(source, target)

    def save():
        save_checkpoint(run, model, run / "tokenizer", torch.optim.SGD(model.parameters(), lr=0.1), progress)

    monkeypatch.setattr(grpo.checkpoint, "save_policy", lambda model, folder, base: folder.mkdir())
    monkeypatch.setattr(os, "replace", kill)
    with pytest.raises(KeyboardInterrupt):
        save()
    monkeypatch.setattr(os, "replace", replace)
    assert (last_checkpoint(run) / "model.safetensors").is_file()  # the one from before
    save()
    assert [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()] == ["0"]
    assert not (last_checkpoint(run) / "model.safetensors").is_file()


def test_resuming_without_a_checkpoint_or_with_a_damaged_one_is_one_clear_line(tmp_path, capsys):
    run = run_tiny(tmp_path, "grpo.max_steps=2")
    state = last_checkpoint(run) / "training_state.pt"
    state.write_bytes(state.read_bytes()[:100])
    assert train.main(["--resume", str(run)]) == 2
    assert "is damaged" in capsys.readouterr().err
    state.unlink()
    assert train.main(["--resume", str(run)]) == 2
    assert "no complete checkpoint to resume from" in capsys.readouterr().err


def test_a_kill_before_the_first_checkpoint_is_named_does_not_lose_it(tmp_path):
    run = run_tiny(tmp_path, "grpo.max_steps=2")
    (run / "checkpoints" / "last").unlink()
    assert last_checkpoint(run).name == "2"
    (run / "checkpoints" / "2").rename(run / "checkpoints" / "2.old")
    (run / "checkpoints" / "last").write_text("2\n", encoding="utf-8")  # killed while step 2 was written once more
    more = ["--resume", str(run), "--set", "grpo.max_steps=3", "--allow-changes"]
    assert train.main(more) == 0
    rows = steps(run)
    assert [row["step"] for row in rows if "reward" in row] == [1, 2, 3]  # it went on, and did not begin again


def test_a_change_that_cannot_be_run_changes_nothing_and_one_that_can_reaches_the_optimizer(tmp_path, monkeypatch):
    run = run_tiny(tmp_path, "grpo.max_steps=2")
    config = (run / "config.toml").read_text(encoding="utf-8")
    change = ["--resume", str(run), "--allow-changes", "--set", "grpo.max_steps=3"]
    assert train.main([*change, "--set", "data.source=/nowhere"]) == 2
    assert (run / "config.toml").read_text(encoding="utf-8") == config
    seen, update = [], train.update_step
    monkeypatch.setattr(
        train, "update_step", lambda run, *a: seen.append(run.optimizer.param_groups[0]) or update(run, *a)
    )
    assert train.main([*change, "--set", "grpo.adam_beta1=0.5", "--set", "grpo.weight_decay=0.25"]) == 0
    assert (seen[0]["betas"], seen[0]["weight_decay"]) == ((0.5, 0.999), 0.25)


def test_a_run_of_supervision_only_is_measured_once(tmp_path):
    run = run_tiny(tmp_path, "grpo.max_steps=0")
    assert train.main(["--resume", str(run)]) == 0
    assert [row["step"] for row in steps(run)] == [0]
