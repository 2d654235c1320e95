"""GRPO for text-to-SQL. The loop in `train` is the algorithm:

questions -> prompts -> rollouts -> rewards -> advantages -> update -> log -> evaluate -> save

python train.py --config configs/quickstart.toml [--set grpo.beta=0.01 ...]
python train.py --resume runs/quickstart
"""

import os

# Two spinning OpenMP threads on two busy cores are several times slower than one (read before torch starts).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from evaluate import describe, encode_prompt, evaluate_policy, headline, load_split, prompt_messages, verdict_in_words
from grpo.advantage import AdvantageInfo, check_advantage, compute_advantages, load_function
from grpo.checkpoint import derived_generator, last_checkpoint, load_training_state, save_checkpoint
from grpo.config import Config, RewardConfig, load_config, to_toml
from grpo.policy import load_policy, make_policy, train_stages
from grpo.rollout import Rollouts, question_order, rollout
from grpo.sft import Pair
from grpo.telemetry import append_line, format_line, means, rollout_metrics, truncate_log
from grpo.update import learning_rate, make_optimizer, update_policy
from model.config import read_json, write_text
from model.qwen2 import Qwen2
from model.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from sqlenv.database import SqlResult, run_gold
from sqlenv.datasets import Example
from sqlenv.prompt import target_completion
from sqlenv.reward import Verdict, check_reward, reward_parts, score_completion, sql_reward, total_reward


@dataclass(frozen=True)
class Rewards:
    """What a step's completions earned."""

    total: Tensor  # (Q, G) float32
    parts: dict[str, Tensor]  # unweighted, (Q, G) each
    verdicts: list[list[Verdict]]  # Q x G


@dataclass
class Run:
    """What lives for the length of a run."""

    config: Config
    folder: Path
    sets: dict[str, list[Example]]
    tokenizer: Tokenizer
    model: Qwen2
    reference: Qwen2 | None  # the policy at the start of RL; only where beta > 0
    optimizer: torch.optim.Optimizer
    advantage: Callable
    reward: Callable
    questions: list[tuple[Example, list[int]]]  # training examples and prompt ids, the too long ones left out
    max_steps: int
    progress: dict  # step, num_tokens, groups, flat_groups, best: saved with every checkpoint


def train(config: Config, folder: Path, resume: bool = False) -> dict:
    """Run a config from its first SFT stage to its last evaluation; returns what summary.json holds."""
    started = time.perf_counter()
    if config.run.num_threads:
        torch.set_num_threads(config.run.num_threads)
    run = prepare(config, folder, resume)
    if not resume:
        test(run, "before")
        validate(run)

    while run.progress["step"] < run.max_steps:
        times = [time.perf_counter()]
        examples, prompts = questions_of_step(run)
        rollouts, texts = sample(run, prompts)
        times.append(time.perf_counter())
        rewards = score_rollouts(examples, texts, run.reward, config.reward)
        times.append(time.perf_counter())
        info = AdvantageInfo(rollouts.lengths, rollouts.truncated, rewards.parts)
        advantages = compute_advantages(rewards.total, run.advantage, info)
        update = update_step(run, rollouts, advantages)
        times.append(time.perf_counter())
        run.progress["step"] += 1
        log_step(run, rollouts, rewards, update, times)
        log_samples(run, examples, rollouts, texts, rewards, advantages)
        if due(run, config.eval.eval_steps):
            validate(run)
        if due(run, config.run.save_steps) or run.progress["best_step"] == run.progress["step"]:
            save(run)

    if run.max_steps == 0:  # supervision only: what was measured before is what there is
        save(run)
    else:
        test(run, "after")
    return summarise(run, time.perf_counter() - started)


# --- before the loop ---


def prepare(config: Config, folder: Path, resume: bool) -> Run:
    """Check the custom functions, load data, tokenizer and policy, and make the optimizer or restore it."""
    advantage = check_advantage(config.grpo.advantage)
    reward = partial(sql_reward, metric=config.reward.metric)
    if config.reward.function != "sql":
        reward = load_function(config.reward.function, "example, completion, result")
    check_reward(reward, config.reward.function)
    if config.model.path and not Path(config.model.path).is_dir():
        how = f"hf download ORGANISATION/MODEL --local-dir {config.model.path}"
        raise ValueError(f'model.path = "{config.model.path}": no such folder; get the weights first, such as: {how}')
    sets = {split: load_split(config, split) for split in ("train", "val", "test")}
    tokenizer, load_start = start_policy(config, folder)
    checkpoint = last_checkpoint(folder) if resume else None
    model = load_policy(config.model, checkpoint) if checkpoint else load_start()
    reference = None
    if config.grpo.beta:
        fresh_adapter = config.model.lora_r and not config.sft and not config.model.adapter
        reference = model if fresh_adapter else load_start().requires_grad_(False)
    if tokenizer.vocab_size > model.config.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens for {model.config.vocab_size} embedding rows"
        raise ValueError(f"{tokenizer.folder}: {sizes}; expected the model's own tokenizer")
    optimizer = make_optimizer(model.parameters(), config.grpo)
    questions = [(example, encode_prompt(tokenizer, example, config.data)) for example in sets["train"]]
    fitting = [question for question in questions if len(question[1]) <= config.data.max_prompt_length]
    if len(fitting) < len(questions):
        print(f"left out {len(questions) - len(fitting)} of {len(questions)} questions: prompt too long")
    if len(fitting) < config.grpo.questions_per_step and config.grpo.max_steps:
        wanted = f"grpo.questions_per_step = {config.grpo.questions_per_step}"
        raise ValueError(f"{len(fitting)} usable training questions; expected at least {wanted}")
    max_steps = config.grpo.max_steps
    if max_steps < 0:
        max_steps = math.ceil(config.grpo.num_train_epochs * len(fitting) / config.grpo.questions_per_step)
    progress = {"step": 0, "num_tokens": 0, "groups": 0, "flat_groups": 0.0, "best_step": 0, "best": -1.0}
    if checkpoint:
        progress = load_training_state(checkpoint, optimizer)
        for name in ("metrics.jsonl", "samples.jsonl"):
            truncate_log(folder / name, progress["step"])
    return Run(
        config, folder, sets, tokenizer, model, reference, optimizer, advantage, reward, fitting, max_steps, progress
    )


def start_policy(config: Config, folder: Path) -> tuple[Tokenizer, Callable[[], Qwen2]]:
    """The tokenizer and a loader of the policy that RL starts from, after whatever SFT stages come first."""
    examples = [load_split(config, "sft", stage) for stage in config.sft]
    if config.model.path:
        tokenizer = load_tokenizer(config.model.path)
    else:
        texts = [message["content"] for e in examples[0] for message in prompt_messages(e, config.data)]
        texts += [target_completion(example) for example in examples[0]]  # of the first stage
        tokenizer = train_tokenizer(texts, folder / "tokenizer", config.model.vocab_size)
    if not config.sft:
        return tokenizer, lambda: make_policy(config.model, config.run.seed)
    result = train_stages(config, [sft_pairs(tokenizer, part, config) for part in examples], folder / "sft.jsonl")
    return tokenizer, lambda: load_policy(config.model, result)


def sft_pairs(tokenizer: Tokenizer, examples: list[Example], config: Config) -> list[list[Pair]]:
    """(prompt ids, completion ids) of every example, grouped by database; the end token closes a completion."""
    by_database: dict[str, list[Pair]] = {}
    for example in examples:
        completion = [*tokenizer.encode(target_completion(example)), tokenizer.eos_ids[0]]
        pair = (encode_prompt(tokenizer, example, config.data), completion)
        by_database.setdefault(example.db_id, []).append(pair)
    return list(by_database.values())


# --- inside the loop ---


def questions_of_step(run: Run) -> tuple[list[Example], list[list[int]]]:
    """The next questions and their prompts."""
    order = partial(derived_generator, run.config.run.seed, "order")
    chosen = question_order(len(run.questions), run.config.grpo.questions_per_step, run.progress["step"], order)
    return [run.questions[i][0] for i in chosen], [run.questions[i][1] for i in chosen]


def sample(run: Run, prompts: list[list[int]]) -> tuple[Rollouts, list[list[str]]]:
    """One group of completions for each prompt; no top-k or top-p, so that what is scored is what was sampled."""
    config = run.config.grpo
    settings = {"max_completion_length": config.max_completion_length, "temperature": config.temperature}
    generator = derived_generator(run.config.run.seed, "rollout", run.progress["step"])
    return rollout(run.model, run.tokenizer, prompts, config.num_generations, generator=generator, **settings)


def score_rollouts(examples: list[Example], texts: list[list[str]], reward: Callable, config: RewardConfig) -> Rewards:
    """Execute every completion's SQL, compare its rows with the gold's, and weigh the parts of the reward."""
    verdicts = [[score_completion(e, text) for text in group] for e, group in zip(examples, texts, strict=True)]
    parts = [
        [reward_parts(reward, config.function, e, text, verdict) for text, verdict in zip(group, row, strict=True)]
        for e, group, row in zip(examples, texts, verdicts, strict=True)
    ]
    total = torch.tensor([[total_reward(p, config.weights) for p in row] for row in parts])
    names = sorted({part for row in parts for p in row for part in p})  # a part that a completion lacks counts 0
    by_name = {part: torch.tensor([[float(p.get(part, 0)) for p in row] for row in parts]) for part in names}
    return Rewards(total, by_name, verdicts)


def update_step(run: Run, rollouts: Rollouts, advantages: Tensor) -> dict:
    """One update at the step's learning rate; returns its metrics as (sum, count) pairs."""
    rate = learning_rate(run.config.grpo, run.progress["step"], run.max_steps)
    run.optimizer.param_groups[0]["lr"] = rate
    settings = {"vocab_size": run.tokenizer.vocab_size, "reference": run.reference}
    pairs = update_policy(run.model, run.optimizer, rollouts, advantages, run.config.grpo, **settings)
    return pairs | {"learning_rate": (rate, 1)}


def due(run: Run, every: int) -> bool:
    """Whether something that happens every so many steps, and after the last one, happens now."""
    step = run.progress["step"]
    return step == run.max_steps or (bool(every) and step % every == 0)


def save(run: Run) -> None:
    """A complete checkpoint; of the older ones only the best by validation stays."""
    base = run.config.model.path
    save_checkpoint(run.folder, run.model, run.tokenizer.folder, run.optimizer, run.progress, base)


# --- measuring and logging ---


def validate(run: Run) -> None:
    """Greedy accuracy on val: logged, and the step remembered if it is the best so far."""
    result = evaluate_policy(run.model, run.tokenizer, run.sets["val"], run.config, num_generations=0, name="val")
    keys = ("execution_accuracy", "execution_accuracy_low", "execution_accuracy_high", "bird_accuracy")
    step = run.progress["step"]
    append_line(run.folder / "metrics.jsonl", {"step": step} | {f"val/{key}": result[key] for key in keys})
    accuracy, low, high, _ = (result[key] for key in keys)
    if accuracy > run.progress["best"]:
        run.progress |= {"best": accuracy, "best_step": step}
    print(f"val at step {step}: execution accuracy {accuracy:.3f} [{low:.3f}, {high:.3f}]", flush=True)


def test(run: Run, when: str) -> None:
    """The held-out test set, once before and once after."""
    k = run.config.eval.num_generations
    result = evaluate_policy(run.model, run.tokenizer, run.sets["test"], run.config, num_generations=k, name="test")
    write_text(run.folder / f"eval-test-{when}.json", json.dumps(result) + "\n")
    print(f"test {when}: {describe(result)}", flush=True)


def log_step(run: Run, rollouts: Rollouts, rewards: Rewards, update: dict, times: list[float]) -> None:
    """One line of metrics.jsonl and one on the console."""
    match = attrgetter("match" if run.config.reward.metric == "spider" else "match_bird")
    correct = torch.tensor([[match(verdict) for verdict in row] for row in rewards.verdicts])
    statuses = [[v.status for v in row] for row in rewards.verdicts]
    metrics = rollout_metrics(rewards.total, rewards.parts, correct, statuses, rollouts.lengths, rollouts.truncated)
    questions, progress = len(rewards.verdicts), run.progress
    progress["groups"] += questions
    progress["flat_groups"] += metrics["frac_reward_zero_std"] * questions
    progress["num_tokens"] += int(rollouts.lengths.sum()) + sum(map(len, rollouts.prompt_ids))
    entropy = (torch.tensor(rollouts.entropy) * rollouts.lengths).sum() / rollouts.lengths.sum()
    record = {"step": progress["step"], "epoch": progress["step"] * questions / len(run.questions)} | metrics
    record |= means(update) | {"entropy": float(entropy), "num_tokens": progress["num_tokens"]}
    record |= {"num_generations": run.config.grpo.num_generations, "step_time": times[-1] - times[0]}
    names = ("time/rollout", "time/reward", "time/update")
    record |= {name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}
    append_line(run.folder / "metrics.jsonl", record)
    print(format_line(record, run.max_steps), flush=True)


def log_samples(run: Run, examples, rollouts: Rollouts, texts, rewards: Rewards, advantages: Tensor) -> None:
    """samples.jsonl: what a reader needs to follow a group; every group of the first steps, a few of each later one."""
    config, step = run.config.run, run.progress["step"]
    count = len(examples) if step <= config.log_samples_steps else config.log_samples_groups
    for q, example in enumerate(examples[:count]):
        completions = [
            {
                "text": texts[q][g],
                "sql": verdict.sql,
                "status": verdict.status,
                "rows": first_rows(verdict.result),
                "reason": verdict.result.reason,
                "reward": float(rewards.total[q, g]),
                "parts": {name: float(part[q, g]) for name, part in rewards.parts.items()},
                "advantage": float(advantages[q, g]),
                "tokens": [run.tokenizer.decode([i]) for i in rollouts.completion_ids[q][g]],
                "logprobs": [round(value, 4) for value in rollouts.logprobs[q][g]],
            }
            for g, verdict in enumerate(rewards.verdicts[q])
        ]
        record = {"step": step, "question": example.question, "db_id": example.db_id, "gold": example.gold}
        gold = run_gold(example.database, example.gold)
        record |= {"gold_rows": first_rows(gold), "completions": completions}
        append_line(run.folder / "samples.jsonl", record)


def first_rows(result: SqlResult) -> list[list[str]]:
    """What a reader sees of a result: five rows, as text, nothing long; a value can be anything that SQLite returns."""
    return [[str(value)[:80] for value in row[:20]] for row in result.rows[:5]]


def summarise(run: Run, seconds: float) -> dict:
    """summary.json and its verdict in words: what the run taught, or that it taught nothing and why."""
    files = {when: run.folder / f"eval-test-{when}.json" for when in ("before", "after")}
    results = {when: read_json(file) for when, file in files.items() if file.is_file()}
    flat = run.progress["flat_groups"] / max(run.progress["groups"], 1)
    verdict = verdict_in_words(results["before"], results["after"], flat) if "after" in results else "no RL: SFT only"
    summary = {when: headline(result) for when, result in results.items()}
    summary |= {"dead_group_share": flat, "seconds": round(seconds, 1), "seed": run.config.run.seed}
    summary |= {"versions": results["before"]["versions"], "verdict": verdict, "best_step": run.progress["best_step"]}
    write_text(run.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    print(f"{verdict}\n{run.folder / 'summary.json'}")
    return summary


def new_folder(output_dir: str, name: str) -> Path:
    """A run directory that does not exist yet: runs/name, else runs/name-2, runs/name-3, ..."""
    candidates = (Path(output_dir) / (name if i == 1 else f"{name}-{i}") for i in range(1, 10_000))
    folder = next(path for path in candidates if not path.exists())
    folder.mkdir(parents=True)
    return folder


def main(arguments: list[str] | None = None) -> int:
    """The command line; a mistake in what the user gave is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description="GRPO for text-to-SQL")
    parser.add_argument("--config", help="a TOML file from configs/")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one value")
    parser.add_argument("--short", action="store_true", help="apply the config's own list of changes for a short try")
    parser.add_argument("--resume", metavar="RUN_DIR", help="continue a run from its last checkpoint")
    options = parser.parse_args(arguments)
    folder = Path(options.resume or "")
    try:
        if bool(options.config) == bool(options.resume) or (options.resume and (options.set or options.short)):
            raise ValueError("expected either --config FILE [--set ...] [--short] or --resume RUN_DIR alone")
        config = load_config(options.config or folder / "config.toml", options.set, short=options.short)
        if options.config:
            folder = new_folder(config.run.output_dir, config.run.name)
            write_text(folder / "config.toml", to_toml(config))
        train(config, folder, resume=bool(options.resume))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if options.config and folder.name and not (folder / "eval-test-before.json").exists():
            shutil.rmtree(folder)  # it failed before it began: nothing half-written stays
        return 2
    except KeyboardInterrupt:
        saved = (folder / "checkpoints" / "last").is_file()
        print(
            f"stopped; python train.py --resume {folder}" if saved else "stopped before a checkpoint", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
