"""Measure execution accuracy: of a checkpoint on a question set, or of a file of predictions.

    python evaluate.py --checkpoint runs/quickstart/checkpoints/last --split test [--compare OTHER.json]
    python evaluate.py --checkpoint runs/quickstart --ask "how many guests are there?" --db FILE.sqlite
    python evaluate.py --predictions predictions.jsonl --data SOURCE [--compare OTHER_VERDICTS.jsonl]

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
from dataclasses import replace
from functools import partial
from itertools import pairwise
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
from sqlenv.database import run_sql
from sqlenv.datasets import load_examples
from sqlenv.errors import error_class
from sqlenv.example import Example
from sqlenv.prompt import LEAKS, build_messages
from sqlenv.report import cost, describe, load_result, measure, paired, paired_lines
from sqlenv.reward import Verdict, extract_sql, score_completions
from sqlenv.voting import majority_vote

GOLDS_BAR = partial(tqdm, desc="golds", disable=None, leave=False)  # one object: files are cached by their arguments


def load_split(config: Config, split: str, stage: SftConfig | None = None) -> list[Example]:
    """The examples of "train", "val", "test", or of an SFT stage; synthetic databases are made once and kept.

    Raises ValueError if there are none.
    """
    data, seed = config.data, config.run.seed
    source = (stage.source if stage else data.test_source if split == "test" else "") or data.source
    if source == "synthetic":
        sizes = {"train": data.train_databases, "val": data.val_databases, "test": data.test_databases}
        made = {"num_databases": stage.databases if stage else sizes[split], "seed": seed}
        made["questions_per_database"] = (stage or data).questions_per_database
        made["sloppy"] = stage.sloppy if stage else 0.0
        name = "-".join(str(value) for value in made.values())
        examples = load_examples("synthetic", split, folder=Path(data.cache_dir) / f"synthetic-{name}", **made)
    else:
        examples = load_examples(source, split, cache=Path(data.cache_dir), progress=GOLDS_BAR)
    if stage and stage.share < 1:
        order = torch.randperm(len(examples), generator=derived_generator(seed, "sft share")).tolist()
        examples = [examples[i] for i in sorted(order[: round(stage.share * len(examples))])]
    if split == "train" and data.exclude_sft:
        taught = {replace(e, row=0) for stage in config.sft for e in load_split(config, "sft", stage)}
        examples = [e for e in examples if replace(e, row=0) not in taught]
    limit = {"train": data.train_limit, "val": data.val_limit, "test": data.test_limit}.get(split, 0)
    if limit and limit < len(examples):
        order = torch.randperm(len(examples), generator=derived_generator(seed, f"limit {split}"))[:limit]
        examples = [examples[i] for i in sorted(order.tolist())]
    if not examples:
        raise ValueError(f"{source!r} has no {split} questions left; see data.source, exclude_sft and sft.share")
    return examples


def prompt_messages(example: Example, data: DataConfig) -> list[dict[str, str]]:
    """The chat that asks for the example's SQL, in the style that the config names."""
    settings = {"style": data.prompt_style, "system": data.system, "sample_values": data.sample_values}
    return build_messages(example, schema=data.schema, **settings)


def encode_prompt(tokenizer: Tokenizer, example: Example, data: DataConfig) -> list[int]:
    """The token ids that the policy is asked with: schema, evidence and question through the chat template."""
    return tokenizer.encode(tokenizer.render_chat(prompt_messages(example, data), add_generation_prompt=True))


def encode_questions(tokenizer: Tokenizer, examples: list[Example], config: Config, name: str) -> list[list[int]]:
    """The prompts that an evaluation asks; ValueError if one is longer than data.max_prompt_length: none is cut."""
    data = replace(config.data, schema=config.eval.schema)
    prompts = [encode_prompt(tokenizer, example, data) for example in examples]
    longest, limit = max(map(len, prompts)), data.max_prompt_length
    if longest > limit:
        count = sum(len(prompt) > limit for prompt in prompts)
        raise ValueError(f"{count} of {len(prompts)} {name} prompts exceed data.max_prompt_length = {limit}: {longest}")
    return prompts


def evaluate_policy(
    model: Qwen2, tokenizer: Tokenizer, examples: list[Example], config: Config, *, num_generations: int, name: str = ""
) -> dict:
    """Greedy accuracy of the policy on the examples and, with k = num_generations > 0, mean@k, pass@k and vote@k.

    Returns what sqlenv.report.measure and cost return, with num_tokens, parameter_passes (tokens decoded times
    parameters) and versions; a greedy question's latency is that of the batch which it is answered in.
    Raises ValueError if a prompt is longer than data.max_prompt_length: a question left out would change the figure.
    """
    started, k = time.perf_counter(), num_generations
    prompts = encode_questions(tokenizer, examples, config, name)
    settings = {"max_completion_length": config.grpo.max_completion_length, "batch_size": config.eval.batch_size}
    settings["workers"] = config.reward.num_workers
    greedy, num_tokens, latencies = sample_verdicts(
        model, tokenizer, examples, prompts, 1, name, temperature=0.0, **settings
    )
    answers = []
    for example, (verdict,) in zip(examples, greedy, strict=True):
        answer = {key: getattr(example, key) for key in ("db_id", "difficulty", "question", "gold")}
        answer |= {"match": verdict.match, "match_bird": verdict.match_bird}
        answers.append(answer | {"outcome": error_class(example.database, example.gold, verdict)})
    if k:
        sampling = {key: getattr(config.eval, key) for key in ("temperature", "top_p", "top_k")}
        sampling |= settings | {"generator": derived_generator(config.run.seed, "evaluation")}
        sampled, tokens, _ = sample_verdicts(model, tokenizer, examples, prompts, k, f"{name} x {k}", **sampling)
        num_tokens += tokens
        for answer, group in zip(answers, sampled, strict=True):
            answer |= {"hits": [v.match for v in group], "vote_match": vote_is_right(group)}
    size = sum(parameter.numel() for parameter in model.parameters())
    work = {"num_tokens": num_tokens, "parameter_passes": num_tokens * size}
    seconds, price = time.perf_counter() - started, config.eval.hourly_price
    result = measure(answers) | cost(seconds, latencies, (1 + k) * len(examples), price, **work)
    return result | {"versions": versions()} | ({"note": LEAKS} if config.eval.schema == "gold" else {})


def sample_verdicts(
    model, tokenizer, examples, prompts, k, name, *, batch_size, workers, **sampling
) -> tuple[list[list[Verdict]], int, list[float]]:
    """k completions a question, each scored: n x k verdicts, the number of tokens decoded, seconds a question."""
    verdicts, num_tokens, latencies = [], 0, []
    for batch in tqdm(batches(examples, max(1, batch_size // k)), desc=name, disable=None, leave=False):
        began = time.perf_counter()
        rollouts, texts = rollout(model, tokenizer, prompts[batch], k, **sampling)
        num_tokens += int(rollouts.lengths.sum())
        verdicts += score_completions(examples[batch], texts, workers)
        latencies += [time.perf_counter() - began] * len(texts)
    return verdicts, num_tokens, latencies


def batches(examples: list[Example], size: int) -> list[slice]:
    """What is sampled at once: up to `size` questions, of one database where that has many: its schema is read once.

    Many are eight, and a quarter of a batch. Example: nine questions on a, one on b, one on c, size 4 -> aaaa aaaa a bc
    """
    counts = Counter(example.db_id for example in examples)
    names = [e.db_id if counts[e.db_id] >= max(8, size / 4) else "" for e in examples]
    cuts = [0]
    for i in range(1, len(examples)):
        if names[i] != names[i - 1] or i - cuts[-1] == size:
            cuts.append(i)
    return [slice(*ends) for ends in pairwise([*cuts, len(examples)])]


def vote_is_right(verdicts: list[Verdict]) -> bool:
    """Whether the rows that most samples returned are the gold's, by Spider's rule; False if none could be run."""
    winner = majority_vote([v.result for v in verdicts], [v.sql for v in verdicts])
    return winner is not None and verdicts[winner].match


def ask(model: Qwen2, tokenizer: Tokenizer, question: str, database: Path, config: Config) -> str:
    """One question about any SQLite file: a line for each sampled query, `{error or "7 rows":<24} {query}`; then the
    winner of the vote, "5 of 8 queries returned these rows:", its rows; or "none of 8 queries could be run".
    """
    example = Example(question, "", database.stem, database)
    sampling = {key: getattr(config.eval, key) for key in ("temperature", "top_p", "top_k")}
    sampling |= {"max_completion_length": config.grpo.max_completion_length}
    sampling["generator"] = derived_generator(config.run.seed, "ask")
    prompt, k = encode_prompt(tokenizer, example, config.data), config.eval.num_generations or 1
    _, (texts,) = rollout(model, tokenizer, [prompt], k, **sampling)
    queries = [extract_sql(text) for text in texts]
    results = [run_sql(database, query) for query in queries]
    lines = [
        f"{r.reason or f'{len(r.rows)} rows':<24} {' '.join(q.split())}" for r, q in zip(results, queries, strict=True)
    ]
    winner = majority_vote(results, queries)
    if winner is None:
        return "\n".join([*lines, f"none of {len(queries)} queries could be run"])
    rows = results[winner].rows
    agree = sum(r.status == "ok" and Counter(r.rows) == Counter(rows) for r in results)
    shown = [" | ".join(map(str, row)) for row in rows[:20]] + ["..."] * (len(rows) > 20)
    return "\n".join([*lines, "", queries[winner], f"{agree} of {len(queries)} queries returned these rows:", *shown])


def versions() -> dict[str, str]:
    """What the numbers depend on besides code and seed."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"torch": torch.__version__, "sqlite": sqlite3.sqlite_version, "python": python}


def headline(result: dict) -> dict:
    """The few figures of an evaluation that summary.json repeats."""
    low, high = result["execution_accuracy_low"], result["execution_accuracy_high"]
    figures = {"execution_accuracy": result["execution_accuracy"], "low": low, "high": high, "n": result["n"]}
    return figures | {key: result[key] for key in result if re.fullmatch(r"(mean|pass|vote)@\d+", key)}


def verdict_in_words(before: dict, after: dict, flat: float | None = None, built_in: bool = True) -> str:
    """What training did to greedy accuracy, by an exact paired test on the same questions; never a claim inside noise.

    flat: share of the groups that carried no gradient, where there were groups. Near 1, a change is drift: the few
    groups that differ by accident are all that moved the weights. built_in: the advantage; others may push flat groups.
    """
    points, p, words = paired(before, after)
    verdict = "taught nothing that this test set can show"
    if p < 0.05 and flat is not None and flat > 0.95:
        verdict = "drifted, with hardly a group to learn from"
    elif p < 0.05:
        verdict = "taught" if points > 0 else "did harm"
    why = f"; {flat:.1%} of the groups were flat (equal rewards)" if flat is not None else ""
    why += " and carried no gradient" if why and built_in else ""
    return f"{verdict}: {points:+.1f} points of execution accuracy ({words}){why}"


def main(arguments: list[str] | None = None) -> int:
    """The command line; a mistake in what the user gave is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description="execution accuracy of a checkpoint, or of a file of predictions")
    parser.add_argument("--checkpoint", type=Path, help="a run directory, its checkpoints/<step>, or a model folder")
    parser.add_argument("--config", help="what to evaluate on; default: the config of the checkpoint's run")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one value")
    parser.add_argument("--ask", metavar="QUESTION", help="answer one question on the SQLite file --db")
    parser.add_argument("--db", type=Path, help="with --ask: the SQLite file")
    parser.add_argument("--split", choices=("train", "val", "test"), default="test")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    parser.add_argument("--compare", type=Path, help="the result (--out) of another run on the same questions")
    parser.add_argument("--predictions", metavar="FILE", help="queries, no policy: see python -m sqlenv.score -h")
    given = sys.argv[1:] if arguments is None else arguments
    arguments = [part for a in given for part in (a.split("=", 1) if a.startswith("--predictions=") else [a])]
    if "--predictions" in arguments:  # all else on the line is for the scorer, whose positional argument the file is
        return score.main([argument for argument in arguments if argument != "--predictions"])
    options = parser.parse_args(arguments)
    try:
        if options.out and options.out.is_dir():
            raise ValueError(f"--out {options.out} is a folder; expected a file")
        if bool(options.ask) != bool(options.db):
            raise ValueError("expected --ask QUESTION and --db FILE.sqlite together")
        if not options.checkpoint:
            raise ValueError("expected --checkpoint PATH, or --predictions FILE --data SOURCE")
        folder = options.checkpoint
        if folder.name == "last" or (folder / "checkpoints").is_dir():  # the newest one of a run
            folder = last_checkpoint(folder.parent.parent if folder.name == "last" else folder)
        if not folder.is_dir():
            wanted = "a run's checkpoints/last or a model folder"
            raise ValueError(f"--checkpoint {folder}: no such folder; expected {wanted}")
        other = load_result(options.compare) if options.compare else None
        if options.compare and not other:
            raise ValueError(f"--compare {options.compare}: no result; expected what --out wrote, or verdicts")
        file = Path(options.config) if options.config else folder.parent.parent / "config.toml"
        if not file.is_file():
            raise ValueError(f"{folder} is in no run directory, so there is no config; name one with --config FILE")
        config = load_config(file, options.set)
        model, tokenizer = load_policy(config.model, folder), load_tokenizer(folder)
        if options.ask:
            print(ask(model, tokenizer, options.ask, options.db, config))
            return 0
        examples = load_split(config, options.split)
        k = config.eval.num_generations
        result = evaluate_policy(model, tokenizer, examples, config, num_generations=k, name=options.split)
        print(f"{folder} on {options.split}: {describe(result)}")
        if options.out:
            write_text(options.out, json.dumps(result) + "\n")
        if other:
            print("\n".join(paired_lines(other, result, f"against {options.compare}")))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
