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
import hashlib
import json
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from evaluate import (
    encode_prompt,
    encode_questions,
    evaluate_policy,
    headline,
    load_split,
    prompt_messages,
    sample_verdicts,
    verdict_in_words,
)
from grpo.advantage import AdvantageInfo, check_advantage, compute_advantages, load_function
from grpo.card import model_card
from grpo.checkpoint import derived_generator, last_checkpoint, load_training_state, save_checkpoint
from grpo.config import Config, RewardConfig, differences, load_config, to_toml
from grpo.difficulty import class_counts, gate, pass_rate_class, read_pass_rates, write_pass_rates
from grpo.interrupts import interrupts_wait
from grpo.memory import check_memory
from grpo.policy import adapter_starts_at_zero, load_policy, make_policy, train_stages
from grpo.report import write_report
from grpo.rollout import Batch, Rewards, Rollouts, is_mixed, join, question_order, rollout
from grpo.sft import Pair
from grpo.telemetry import append_line, format_line, means, rollout_metrics, truncate_log
from grpo.update import learning_rate, make_optimizer, update_policy
from grpo.watch import EXIT_CODES, Halted, diagnose
from model.config import read_json, write_text
from model.qwen2 import Qwen2
from model.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from sqlenv.database import SqlResult, run_gold
from sqlenv.example import Example
from sqlenv.prompt import target_completion
from sqlenv.report import describe
from sqlenv.reward import check_reward, reward_parts, score_completions, sql_reward, total_reward

MATCH = {"spider": "match", "bird": "match_bird"}  # reward.metric -> the field of a verdict


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
    progress: dict  # saved with every checkpoint: step, questions asked, best step, recent metrics, sums
    started: float  # on the clock of time.perf_counter, less what earlier processes of this run took
    bar: tqdm  # of the steps, in a terminal
    times: Counter = field(default_factory=Counter)  # seconds of the parts of the current step


def train(config: Config, folder: Path, resume: bool = False) -> dict:
    """Run a config from its first SFT stage to its last evaluation; returns what summary.json holds."""
    run = prepare(config, folder, resume)
    write_text(folder / "config.toml", to_toml(config))  # only now, when it is known to work
    if run.progress["started"]:
        warn_or_halt(run)
    else:
        test(run, "before")
        validate(run)
        run.progress["started"] = True

    with interrupts_wait() as interrupted:
        while run.progress["step"] < run.max_steps:
            examples, prompts = next_questions(run, config.grpo.questions_per_step)
            rollouts, texts = sample(run, prompts)
            batch = earn(run, examples, rollouts, texts)
            batch = refill(run, batch)
            advantages = advantages_of(run, batch)
            update = update_step(run, batch.rollouts, advantages)
            run.progress["step"] += 1
            log_step(run, batch, update)
            log_samples(run, batch, advantages)
            if due(run, config.eval.eval_steps):
                validate(run)
            if due(run, config.run.save_steps) or run.progress["best_step"] == run.progress["step"]:
                save(run)
            warn_or_halt(run)
            if interrupted.is_set():
                save(run)
                raise KeyboardInterrupt

    if run.max_steps == 0:  # supervision only: what was measured before is what there is
        save(run)
    else:
        test(run, "after")
    return summarise(run)


# --- before the loop ---


def prepare(config: Config, folder: Path, resume: bool) -> Run:
    """Check the custom functions, load data, tokenizer and policy, and make the optimizer or restore it."""
    started = time.perf_counter()
    if config.run.num_threads:
        torch.set_num_threads(config.run.num_threads)
    reward = partial(sql_reward, metric=config.reward.metric)
    if config.reward.function != "sql":
        reward = load_function(config.reward.function, "example, completion, result")
    advantage = check_advantage(config.grpo.advantage, check_reward(reward, config.reward.function))
    if config.model.path and not Path(config.model.path).is_dir():
        how = f"hf download ORGANISATION/MODEL --local-dir {config.model.path}"
        raise ValueError(f'model.path = "{config.model.path}": no such folder; get the weights first, such as: {how}')
    sets = {split: load_split(config, split) for split in ("train", "val", "test")}
    tokenizer, load_start = start_policy(config, folder)
    # A run that was killed before its first checkpoint begins again; supervised stages go on from their own.
    saved = any(path.name == "last" or path.name.isdigit() for path in (folder / "checkpoints").glob("*"))
    checkpoint = last_checkpoint(folder) if resume and saved else None
    start = load_start()
    if tokenizer.vocab_size > start.config.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens for {start.config.vocab_size} embedding rows"
        raise ValueError(f"{tokenizer.folder}: {sizes}; expected the model's own tokenizer")
    questions = training_questions(config, folder, tokenizer, start, sets["train"])
    model = load_policy(config.model, checkpoint) if checkpoint else start
    reference = None
    if config.grpo.beta:
        reference = model if adapter_starts_at_zero(config) else load_start().requires_grad_(False)
    if config.grpo.max_steps:
        print(f"memory: {check_memory(model, config, max(len(prompt) for _, prompt in questions))}", flush=True)
    optimizer = make_optimizer(model.parameters(), config.grpo)
    max_steps = config.grpo.max_steps
    if max_steps < 0:
        max_steps = math.ceil(config.grpo.num_train_epochs * len(questions) / config.grpo.questions_per_step)
    progress = {"step": 0, "asked": 0, "num_tokens": 0, "groups": 0, "flat_groups": 0.0, "seconds": 0.0}
    progress |= {"best_step": 0, "best": -1.0, "recent": [], "gate": "", "started": False, "saved_step": -1}
    if checkpoint:
        progress = load_training_state(checkpoint, optimizer, config.grpo)
    for name in ("metrics.jsonl", "samples.jsonl"):
        truncate_log(folder / name, progress["step"] if checkpoint else -1)
    bar = tqdm(total=max_steps, initial=progress["step"], desc="grpo", disable=None, dynamic_ncols=True)
    parts = (sets, tokenizer, model, reference, optimizer, advantage, reward, questions, max_steps, progress)
    return Run(config, folder, *parts, started - progress["seconds"], bar)


def training_questions(
    config: Config, folder: Path, tokenizer: Tokenizer, model: Qwen2, examples: list[Example]
) -> list[tuple[Example, list[int]]]:
    """Training examples with their prompts: those that fit and, with [filter], have a middling pass rate."""
    questions = [(example, encode_prompt(tokenizer, example, config.data)) for example in examples]
    fitting = [question for question in questions if len(question[1]) <= config.data.max_prompt_length]
    if len(fitting) < len(questions):
        print(f"left out {len(questions) - len(fitting)} of {len(questions)} questions: prompt too long")
    if config.filter.num_generations and config.grpo.max_steps and fitting:
        limits = (config.filter.num_generations, config.filter.low, config.filter.high)
        successes = pass_rates(config, folder, tokenizer, model, fitting)
        counts = ", ".join(f"{name} {count}" for name, count in class_counts(successes, *limits).items())
        print(f"filter: {counts}, of {len(fitting)} questions", flush=True)
        classes = [pass_rate_class(s, *limits) for s in successes]
        fitting = [question for question, name in zip(fitting, classes, strict=True) if name == "kept"]
    if len(fitting) < config.grpo.questions_per_step and config.grpo.max_steps:
        wanted = f"grpo.questions_per_step = {config.grpo.questions_per_step}"
        raise ValueError(f"{len(fitting)} usable training questions; expected at least {wanted}")
    return fitting


def pass_rates(config: Config, folder: Path, tokenizer: Tokenizer, model: Qwen2, questions: list) -> list[int]:
    """How many of K completions of the start are right, for each question: measured, or read if measured before."""
    k, own = config.filter.num_generations, folder / "pass_rates.json"
    keys = [hashlib.sha256(f"{e.db_id}\0{e.question}\0{e.gold}".encode()).hexdigest()[:16] for e, _ in questions]
    file = Path(config.filter.file) if config.filter.file and not own.is_file() else own
    if config.filter.file or own.is_file():
        successes = read_pass_rates(file, keys, k)
    else:
        settings = {"temperature": config.grpo.temperature, "batch_size": config.eval.batch_size}
        settings |= {"max_completion_length": config.grpo.max_completion_length, "workers": config.reward.num_workers}
        settings["generator"] = derived_generator(config.run.seed, "filter")
        examples, prompts = zip(*questions, strict=True)
        verdicts, _, _ = sample_verdicts(model, tokenizer, examples, list(prompts), k, "filter", **settings)
        match = attrgetter(MATCH[config.reward.metric])
        successes = [sum(map(match, group)) for group in verdicts]
    write_pass_rates(own, keys, successes, k, config.filter.low, config.filter.high)
    return successes


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
    """(prompt ids, completion ids) of the examples that fit, grouped by database; the end token closes a completion."""
    by_database: dict[str, list[Pair]] = {}
    for example in examples:
        prompt = encode_prompt(tokenizer, example, config.data)
        if len(prompt) <= config.data.max_prompt_length:
            completion = [*tokenizer.encode(target_completion(example)), tokenizer.eos_ids[0]]
            by_database.setdefault(example.db_id, []).append((prompt, completion))
    if (left_out := len(examples) - sum(map(len, by_database.values()))) > 0:
        print(f"left out {left_out} of {len(examples)} questions of a supervised stage: prompt too long")
    return list(by_database.values())


# --- inside the loop ---


def timed(part: str) -> Callable:
    """A decorator: what a function of (run, ...) takes counts under time/<part> of the step."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def measured(run: Run, *arguments):
            start = time.perf_counter()
            try:
                return function(run, *arguments)
            finally:
                run.times[f"time/{part}"] += time.perf_counter() - start

        return measured

    return decorate


def next_questions(run: Run, count: int) -> tuple[list[Example], list[list[int]]]:
    """The next questions and their prompts."""
    order = partial(derived_generator, run.config.run.seed, "order")
    chosen = question_order(len(run.questions), count, run.progress["asked"], order)
    run.progress["asked"] += count
    return [run.questions[i][0] for i in chosen], [run.questions[i][1] for i in chosen]


@timed("rollout")
def sample(run: Run, prompts: list[list[int]], attempt: int = 0) -> tuple[Rollouts, list[list[str]]]:
    """One group of completions for each prompt; no top-k or top-p, so that what is scored is what was sampled."""
    config = run.config.grpo
    settings = {"max_completion_length": config.max_completion_length, "temperature": config.temperature}
    purpose = f"rollout {attempt}" if attempt else "rollout"
    generator = derived_generator(run.config.run.seed, purpose, run.progress["step"])
    rollouts, texts = rollout(
        run.model, run.tokenizer, prompts, config.num_generations, generator=generator, **settings
    )
    run.progress["num_tokens"] += int(rollouts.lengths.sum()) + sum(map(len, prompts))
    return rollouts, texts


@timed("reward")
def earn(run: Run, examples: list[Example], rollouts: Rollouts, texts: list[list[str]]) -> Batch:
    """The groups with what they earned."""
    rewards = score_rollouts(examples, texts, run.reward, run.config.reward)
    return Batch(examples, rollouts, texts, rewards, len(examples))


def score_rollouts(examples: list[Example], texts: list[list[str]], reward: Callable, config: RewardConfig) -> Rewards:
    """Execute every completion's SQL, compare its rows with the gold's, and weigh the parts of the reward."""
    verdicts = score_completions(examples, texts, config.num_workers)
    parts = [
        [reward_parts(reward, config.function, e, text, verdict) for text, verdict in zip(group, row, strict=True)]
        for e, group, row in zip(examples, texts, verdicts, strict=True)
    ]
    total = torch.tensor([[total_reward(p, config.weights) for p in row] for row in parts])
    names = sorted({part for row in parts for p in row for part in p})  # a part that a completion lacks counts 0
    by_name = {part: torch.tensor([[float(p.get(part, 0)) for p in row] for row in parts]) for part in names}
    return Rewards(total, by_name, verdicts)


def refill(run: Run, batch: Batch) -> Batch:
    """Dynamic sampling (DAPO, 2503.14476): flat groups give way to mixed ones of further questions, in bounded rounds.

    As many questions are asked as groups are flat; what still is flat after the last round stays.
    """
    for attempt in range(1, 1 + run.config.grpo.max_resampling):
        flat = [q for q, mixed in enumerate(is_mixed(batch)) if not mixed]
        if not flat:
            break
        examples, prompts = next_questions(run, len(flat))
        new = earn(run, examples, *sample(run, prompts, attempt))
        found = [len(batch.examples) + q for q, mixed in enumerate(is_mixed(new)) if mixed]
        kept = [q for q in range(len(batch.examples)) if q not in flat[: len(found)]]
        batch = join(batch, new, kept + found)
    return batch


def advantages_of(run: Run, batch: Batch) -> Tensor:
    """(Q, G): how much better each completion did than the others of its group."""
    info = AdvantageInfo(batch.rollouts.lengths, batch.rollouts.truncated, batch.rewards.parts)
    return compute_advantages(batch.rewards.total, run.advantage, info)


@timed("update")
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
    if run.progress["saved_step"] == run.progress["step"]:
        return
    base = run.config.model.path
    run.progress["saved_step"] = run.progress["step"]
    run.progress["seconds"] = time.perf_counter() - run.started
    text = to_toml(run.config)
    save_checkpoint(run.folder, run.model, run.tokenizer.folder, run.optimizer, run.progress, base, text)


# --- measuring and logging ---


def validate(run: Run) -> None:
    """Greedy accuracy on val: logged, and the step remembered if it is the best so far.

    Before the first step also the gate: from pass@k of val, whether GRPO has something to work with.
    """
    step, k = run.progress["step"], run.config.eval.num_generations
    count = 0 if step else k
    result = evaluate_policy(run.model, run.tokenizer, run.sets["val"], run.config, num_generations=count, name="val")
    keys = ["execution_accuracy", "execution_accuracy_low", "execution_accuracy_high", "bird_accuracy"]
    accuracy, low, high, _ = (result[key] for key in keys)
    print(f"val at step {step}: execution accuracy {accuracy:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    if count:
        keys += [f"pass@{k}", f"vote@{k}"]
        run.progress["gate"] = gate(accuracy, (high - low) / 2, result[f"pass@{k}"], k)
        print(f"gate: {run.progress['gate']}", flush=True)
    append_line(run.folder / "metrics.jsonl", {"step": step} | {f"val/{key}": result[key] for key in keys})
    if accuracy > run.progress["best"]:
        run.progress |= {"best": accuracy, "best_step": step}
    write_report([run.folder], run.folder / "report.html")


def test(run: Run, when: str) -> None:
    """The held-out test set, once before and once after."""
    k = run.config.eval.num_generations
    result = evaluate_policy(run.model, run.tokenizer, run.sets["test"], run.config, num_generations=k, name="test")
    write_text(run.folder / f"eval-test-{when}.json", json.dumps(result) + "\n")
    print(f"test {when}: {describe(result)}", flush=True)


def log_step(run: Run, batch: Batch, update: dict) -> None:
    """One line of metrics.jsonl and one on the console."""
    match = attrgetter(MATCH[run.config.reward.metric])
    rollouts, rewards, progress = batch.rollouts, batch.rewards, run.progress
    correct = torch.tensor([[match(verdict) for verdict in row] for row in rewards.verdicts])
    statuses = [[v.status for v in row] for row in rewards.verdicts]
    metrics = rollout_metrics(rewards.total, rewards.parts, correct, statuses, rollouts.lengths, rollouts.truncated)
    progress["groups"] += len(batch.examples)
    progress["flat_groups"] += metrics["frac_reward_zero_std"] * len(batch.examples)
    entropy = (torch.tensor(rollouts.entropy) * rollouts.lengths).sum() / rollouts.lengths.sum()
    record = {"step": progress["step"], "epoch": progress["asked"] / len(run.questions)} | metrics
    record |= means(update) | {"entropy": float(entropy), "num_tokens": progress["num_tokens"]}
    record |= {"num_generations": run.config.grpo.num_generations, "sampled_groups": batch.asked}
    record |= {**run.times, "step_time": run.times.total()}
    record["tokens_per_second"] = float(rollouts.lengths.sum()) / max(run.times["time/rollout"], 1e-9)
    run.times.clear()
    append_line(run.folder / "metrics.jsonl", record)
    run.bar.set_postfix_str(format_line(record), refresh=False)
    run.bar.update()
    if run.bar.disable:  # no terminal: plain lines
        print(f"step {progress['step']}/{run.max_steps}  {format_line(record)}", flush=True)
    progress["recent"] = [*progress["recent"], record][-run.config.watch.steps :]


def warn_or_halt(run: Run) -> None:
    """Say so if the run teaches nothing; end it, with a checkpoint, where the config asks for that."""
    finding = diagnose(run.progress["recent"], run.config.watch, run.config.reward.weights)
    if finding and run.config.watch.halt:
        save(run)
        summarise(run, str(finding))
        raise Halted(finding)
    if finding and run.progress["step"] % run.config.watch.steps == 0:
        print(f"warning: {finding}", flush=True)


def log_samples(run: Run, batch: Batch, advantages: Tensor) -> None:
    """samples.jsonl: what a reader needs to follow a group; every group of the first steps, a few of each later one."""
    config, step, rewards, rollouts = run.config.run, run.progress["step"], batch.rewards, batch.rollouts
    count = len(batch.examples) if step <= config.log_samples_steps else config.log_samples_groups
    for q, example in enumerate(batch.examples[:count]):
        completions = [
            {
                "text": batch.texts[q][g],
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


def summarise(run: Run, halted: str = "") -> dict:
    """summary.json and its verdict in words: what the run taught, or that it taught nothing and why."""
    files = {when: run.folder / f"eval-test-{when}.json" for when in ("before", "after")}
    results = {when: read_json(file) for when, file in files.items() if file.is_file()}
    flat = run.progress["flat_groups"] / max(run.progress["groups"], 1)
    verdict = f"halted at step {run.progress['step']}: {halted}" if halted else "no RL: SFT only"
    if "after" in results and not halted:
        built_in = ":" not in run.config.grpo.advantage
        verdict = verdict_in_words(results["before"], results["after"], flat, built_in)
    summary = {when: headline(result) for when, result in results.items()}
    summary |= {
        "dead_group_share": flat,
        "seconds": round(time.perf_counter() - run.started, 1),
        "seed": run.config.run.seed,
    }
    summary |= {"versions": results["before"]["versions"], "verdict": verdict, "best_step": run.progress["best_step"]}
    summary["gate"] = run.progress["gate"]
    write_text(run.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_text(last_checkpoint(run.folder) / "README.md", model_card(run.config, summary, run.progress["step"]))
    write_report([run.folder], run.folder / "report.html")
    print(f"{verdict}\n{run.folder / 'summary.json'}")
    return summary


def dry_run(config: Config, folder: Path) -> None:
    """What can fail after hours, tried at once: paths, functions, golds, lengths, memory; and one step, timed.

    Supervised stages take one step each and the filter is left out, so the step is that of an untrained policy.
    """
    stages = tuple(replace(stage, max_steps=min(stage.max_steps, 1)) for stage in config.sft)
    run = prepare(replace(config, sft=stages, filter=replace(config.filter, num_generations=0)), folder, False)
    asked = {split: encode_questions(run.tokenizer, run.sets[split], config, split) for split in ("val", "test")}
    asked["train"] = [ids for _, ids in run.questions]
    for split, prompts in asked.items():
        print(f"{split}: {len(prompts)} questions, prompts of up to {max(map(len, prompts))} tokens")
    examples, prompts = next_questions(run, config.grpo.questions_per_step)
    batch = earn(run, examples, *sample(run, prompts))
    update_step(run, batch.rollouts, advantages_of(run, batch))
    parts = ", ".join(f"{name.removeprefix('time/')} {seconds:.1f}" for name, seconds in run.times.items())
    hours = run.times.total() * run.max_steps / 3600
    print(f"one step took {run.times.total():.1f} s ({parts}); {run.max_steps} steps would take {hours:.2f} h")
    k, every = config.eval.num_generations, config.eval.eval_steps or run.max_steps
    answers = len(run.sets["val"]) * (1 + k + math.ceil(run.max_steps / max(every, 1)))
    answers += 2 * len(run.sets["test"]) * (1 + k)
    hours = run.times["time/rollout"] * answers / batch.rollouts.lengths.numel() / 3600
    print(f"evaluation would take {hours:.2f} h ({answers:,} completions); supervised stages: {len(stages)}, not timed")


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
    parser.add_argument("--dry-run", action="store_true", help="check everything, time one step, and leave nothing")
    parser.add_argument("--allow-changes", action="store_true", help="with --resume: go on under a changed config")
    options = parser.parse_args(arguments)
    folder = Path(options.resume or "")
    try:
        if not options.config and not options.resume:
            raise ValueError("expected --config FILE [--set ...] [--short], or --resume RUN_DIR")
        if options.resume and not (folder / "config.toml").is_file():
            raise ValueError(f"--resume {folder}: no run; expected a run directory, which has a config.toml")
        config = load_config(options.config or folder / "config.toml", options.set, short=options.short)
        if options.dry_run:
            with tempfile.TemporaryDirectory() as temporary:
                dry_run(config, Path(temporary))
            return 0
        if options.resume:
            kept = sorted((folder / "checkpoints").glob("*/config.toml"), key=lambda file: file.stat().st_mtime)
            saved = load_config(kept[-1] if kept else folder / "config.toml")  # the one that the weights come from
            config = replace(config, run=replace(config.run, name=saved.run.name))
            if (changes := differences(saved, config)) and not options.allow_changes:
                raise ValueError(
                    f"{folder}: changed config: {'; '.join(changes)}; --allow-changes to go on all the same"
                )
        else:
            folder = new_folder(config.run.output_dir, config.run.name)
            print(f"run directory: {folder}", flush=True)
            write_text(folder / "config.toml", to_toml(config))
        train(config, folder, resume=bool(options.resume))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        costly = any((folder / name).exists() for name in ("eval-test-before.json", "pass_rates.json"))
        if not options.resume and folder.name and not costly:
            shutil.rmtree(folder)  # it failed before it began: nothing half-written stays
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        lower = (
            "grpo.micro_batch_size, num_generations or max_completion_length; or model.gradient_checkpointing = true"
        )
        print(f"error: out of memory ({str(error).splitlines()[0]}); lower {lower}", file=sys.stderr)
        return 2
    except Halted as error:
        finding = error.args[0]
        print(f"halted: {finding}", file=sys.stderr)
        return EXIT_CODES[finding.reason]
    except KeyboardInterrupt:
        print(f"stopped; to go on: python train.py --resume {folder}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
