"""Measure execution accuracy: of a checkpoint on a question set, or of a file of predictions.

    python evaluate.py --config configs/quickstart.toml --checkpoint runs/quickstart/checkpoints/last --split test
python evaluate.py --predictions predictions.jsonl --databases DIR --out verdicts.jsonl

What "correct" means is `sqlenv.reward.score_completion`, the same function object that training is rewarded by. Every
accuracy comes with a 95 % interval. A vote over k samples is never printed without the single attempts beside it: it
costs k times the decoding and k executions a question.
"""

import os

# Two spinning OpenMP threads on two busy cores are several times slower than one (read before torch starts).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import argparse
import json
import re
import sqlite3
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

from grpo.checkpoint import derived_generator, last_checkpoint
from grpo.config import Config, DataConfig, SftConfig, load_config
from grpo.policy import load_policy
from grpo.rollout import rollout
from model.config import write_text
from model.qwen2 import Qwen2
from model.tokenizer import Tokenizer, load_tokenizer
from sqlenv import score
from sqlenv.datasets import Example, load_examples
from sqlenv.metrics import bootstrap_interval, mcnemar_exact, pass_at_k, wilson_interval
from sqlenv.prompt import build_messages
from sqlenv.reward import Verdict, score_completion
from sqlenv.voting import majority_vote


def load_split(config: Config, split: str, stage: SftConfig | None = None) -> list[Example]:
    """The examples of "train", "val", "test", or of an SFT stage; synthetic databases are made once and kept.

    Raises ValueError if there are none.
    """
    data, seed = config.data, config.run.seed
    if data.source == "synthetic":
        sizes = {"train": data.train_databases, "val": data.val_databases, "test": data.test_databases}
        made = {"num_databases": stage.databases if stage else sizes[split], "seed": seed}
        made["questions_per_database"] = (stage or data).questions_per_database
        made["sloppy"] = stage.sloppy if stage else 0.0
        name = "-".join(str(value) for value in made.values())
        examples = load_examples("synthetic", split, folder=Path(data.cache_dir) / f"synthetic-{name}", **made)
    else:
        examples = load_examples(data.source, "train" if split == "sft" else split)
    limit = {"train": data.train_limit, "val": data.val_limit, "test": data.test_limit}.get(split, 0)
    if limit and limit < len(examples):
        order = torch.randperm(len(examples), generator=derived_generator(seed, f"limit {split}"))[:limit]
        examples = [examples[i] for i in sorted(order.tolist())]
    if not examples:
        raise ValueError(f"data.source = {data.source!r} has no {split} questions")
    return examples


def prompt_messages(example: Example, data: DataConfig) -> list[dict[str, str]]:
    """The chat that asks for the example's SQL, in the style that the config names."""
    return build_messages(example, style=data.prompt_style, system=data.system, sample_values=data.sample_values)


def encode_prompt(tokenizer: Tokenizer, example: Example, data: DataConfig) -> list[int]:
    """The token ids that the policy is asked with: schema, evidence and question through the chat template."""
    return tokenizer.encode(tokenizer.render_chat(prompt_messages(example, data), add_generation_prompt=True))


def evaluate_policy(
    model: Qwen2, tokenizer: Tokenizer, examples: list[Example], config: Config, *, num_generations: int, name: str = ""
) -> dict:
    """Greedy accuracy of the policy on the examples and, with k = num_generations > 0, pass@k and vote@k.

    Returns:
        n, databases, seconds, num_tokens, sql_executions and, each with `_low` and `_high` (Wilson, 95 %):
        execution_accuracy, bird_accuracy, mean@k, pass@k, vote@k (k is the number); `bootstrap_low` and
        `bootstrap_high` resample databases; `correct` has one 0/1 a question, in order, for paired tests.
    """
    started = time.perf_counter()
    prompts = [encode_prompt(tokenizer, example, config.data) for example in examples]
    limits = {"max_completion_length": config.grpo.max_completion_length, "batch_size": config.eval.batch_size}
    greedy, num_tokens = sample_verdicts(model, tokenizer, examples, prompts, 1, name, temperature=0.0, **limits)
    groups = [example.db_id for example in examples]
    result = {"n": len(examples), "databases": len(set(groups))}
    result |= with_interval("execution_accuracy", [v.match for (v,) in greedy])
    low, high = bootstrap_interval([float(v.match) for (v,) in greedy], groups, seed=0)
    result |= {"bootstrap_low": low, "bootstrap_high": high}
    result |= with_interval("bird_accuracy", [v.match_bird for (v,) in greedy])
    result["statuses"] = dict(Counter(v.status for (v,) in greedy))
    executions = len(examples)
    if num_generations:
        k = num_generations
        sampling = {key: getattr(config.eval, key) for key in ("temperature", "top_p", "top_k")}
        generator = derived_generator(config.run.seed, "evaluation")
        sampling |= limits | {"generator": generator}
        sampled, tokens = sample_verdicts(model, tokenizer, examples, prompts, k, f"{name} x {k}", **sampling)
        num_tokens += tokens
        executions += k * len(examples)
        hits = [sum(v.match for v in group) for group in sampled]
        result[f"mean@{k}"] = sum(hits) / (k * len(examples))
        result |= with_interval(f"pass@{k}", [pass_at_k(k, c, k) for c in hits])
        result |= with_interval(f"vote@{k}", [vote_is_right(group) for group in sampled])
    cost = {"num_tokens": num_tokens, "sql_executions": executions, "seconds": round(time.perf_counter() - started, 2)}
    return result | cost | {"versions": versions(), "correct": [int(v.match) for (v,) in greedy]}


def sample_verdicts(
    model, tokenizer, examples, prompts, k, name, *, batch_size, **sampling
) -> tuple[list[list[Verdict]], int]:
    """k completions a question, each scored: n x k verdicts and the number of tokens decoded."""
    verdicts, num_tokens = [], 0
    size = max(1, batch_size // k)
    for start in tqdm(range(0, len(prompts), size), desc=name, disable=None, leave=False):
        batch = slice(start, start + size)
        rollouts, texts = rollout(model, tokenizer, prompts[batch], k, **sampling)
        num_tokens += int(rollouts.lengths.sum())
        for example, group in zip(examples[batch], texts, strict=True):
            verdicts.append([score_completion(example, text) for text in group])
    return verdicts, num_tokens


def vote_is_right(verdicts: list[Verdict]) -> bool:
    """Whether the rows that most samples returned are the gold's."""
    winner = majority_vote([v.result for v in verdicts], [v.sql for v in verdicts])
    return winner is not None and verdicts[winner].match


def with_interval(name: str, values: list) -> dict[str, float]:
    """A share with its 95 % Wilson interval. Example: [1, 0] -> {x: 0.5, x_low: 0.0945, x_high: 0.9055}"""
    low, high = wilson_interval(sum(values), len(values))
    return {name: sum(values) / len(values), f"{name}_low": low, f"{name}_high": high}


def versions() -> dict[str, str]:
    """What the numbers depend on besides code and seed."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"torch": torch.__version__, "sqlite": sqlite3.sqlite_version, "python": python}


def headline(result: dict) -> dict:
    """The few figures of an evaluation that summary.json repeats."""
    low, high = result["execution_accuracy_low"], result["execution_accuracy_high"]
    figures = {"execution_accuracy": result["execution_accuracy"], "low": low, "high": high, "n": result["n"]}
    return figures | {key: result[key] for key in result if re.fullmatch(r"(mean|pass|vote)@\d+", key)}


def verdict_in_words(before: dict, after: dict, flat: float | None = None) -> str:
    """What training did to greedy accuracy, by an exact paired test on the same questions; never a claim inside noise.

    flat: share of the groups that carried no gradient, where there were groups. Near 1, a change is drift: the few
    groups that differ by accident are all that moved the weights.
    """
    pairs = list(zip(before["correct"], after["correct"], strict=True))
    gained, lost = sum(b < a for b, a in pairs), sum(b > a for b, a in pairs)
    p, points = mcnemar_exact(gained, lost), 100 * (gained - lost) / len(pairs)
    verdict = "taught nothing that this test set can show"
    if p < 0.05 and flat is not None and flat > 0.95:
        verdict = "drifted, with hardly a group to learn from"
    elif p < 0.05:
        verdict = "taught" if points > 0 else "did harm"
    paired = f"gained {gained}, lost {lost} of {len(pairs)} questions, exact McNemar p = {p:.2g}"
    why = f"; {flat:.1%} of the groups were flat (equal rewards) and carried no gradient" if flat is not None else ""
    return f"{verdict}: {points:+.1f} points of execution accuracy ({paired}){why}"


def describe(result: dict) -> str:
    """The result in a few lines: every accuracy with its interval, the vote beside the single attempts."""
    lines = [f"{result['n']} questions on {result['databases']} databases"]
    for key in result:
        if f"{key}_low" in result:
            interval = f"[{result[f'{key}_low']:.3f}, {result[f'{key}_high']:.3f}]"
            lines.append(f"  {key:<20} {result[key]:.3f}  {interval}")
        elif key.startswith("mean@"):
            lines.append(f"  {key:<20} {result[key]:.3f}  (one sampled attempt)")
    low, high = result["bootstrap_low"], result["bootstrap_high"]
    lines.insert(2, f"  {'  over databases':<20}        [{low:.3f}, {high:.3f}] (bootstrap)")
    cost = f"{result['num_tokens']:,} tokens decoded, {result['sql_executions']:,} SQL executions"
    return "\n".join([*lines, f"  cost: {cost}, {result['seconds']} s"])


def main(arguments: list[str] | None = None) -> int:
    """The command line; a mistake in what the user gave is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description="execution accuracy of a checkpoint, or of a file of predictions")
    parser.add_argument("--checkpoint", type=Path, help="a run's checkpoints/last or checkpoints/<step>")
    parser.add_argument("--config", help="what to evaluate on; default: the config of the checkpoint's run")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one value")
    parser.add_argument("--split", choices=("train", "val", "test"), default="test")
    parser.add_argument("--predictions", help='JSON lines {"db_id", "gold", "pred"}; pred may be a list: votes')
    parser.add_argument("--databases", help="with --predictions: folder of <db_id>/<db_id>.sqlite")
    parser.add_argument("--out", type=Path, help="where to write the result: JSON, or JSON lines of predictions")
    options = parser.parse_args(arguments)
    try:
        if options.predictions and options.databases and options.out:
            score.main([options.predictions, "--databases", options.databases, "--out", str(options.out)])
            return 0
        if not options.checkpoint:
            raise ValueError("expected --checkpoint PATH, or --predictions FILE --databases DIR --out FILE")
        folder = options.checkpoint
        if folder.name == "last" or (folder / "checkpoints").is_dir():  # the newest one of a run
            folder = last_checkpoint(folder.parent.parent if folder.name == "last" else folder)
        if not folder.is_dir():
            raise ValueError(
                f"--checkpoint {folder}: no such folder; expected a run's checkpoints/last or a model folder"
            )
        config = load_config(options.config or folder.parent.parent / "config.toml", options.set)
        model, tokenizer = load_policy(config.model, folder), load_tokenizer(folder)
        examples = load_split(config, options.split)
        k = config.eval.num_generations
        result = evaluate_policy(model, tokenizer, examples, config, num_generations=k, name=options.split)
        print(f"{folder} on {options.split}: {describe(result)}")
        if options.out:
            write_text(options.out, json.dumps(result) + "\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
