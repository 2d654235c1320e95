"""The controls that a sceptic asks for: the compute that GRPO spent, spent on supervision instead.

    python benchmarks/controls.py clean     --config configs/quickstart.toml --seconds 120 --seed 0
    python benchmarks/controls.py rejection --config configs/quickstart.toml --seconds 120 --seed 0

clean      SFT on GRPO's own training questions with labels that are all right, in the policy's own SQL style: more
           information than GRPO gets, which sees rows only.
rejection  sample 8 queries a question from the start, keep the distinct ones whose rows match, SFT on those: the same
           information that GRPO gets.

Both start where GRPO starts and are measured on the same test questions. `--seconds` is CPU time of this process for
sampling and training (evaluations not counted), to be set to what the GRPO run of the same machine took.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import train
from evaluate import describe, evaluate_policy, verdict_in_words, versions
from grpo.checkpoint import derived_generator
from grpo.config import SftConfig, load_config
from grpo.rollout import rollout
from grpo.sft import make_groups, train_sft
from sqlenv.reward import score_completion


def sampled_pairs(run: train.Run) -> list:
    """For each database, (prompt, completion) of the policy's own distinct completions whose rows match."""
    by_database: dict = {}
    size = run.config.grpo.questions_per_step
    for start in range(0, len(run.questions), size):
        part = run.questions[start : start + size]
        settings = {"temperature": run.config.grpo.temperature}
        settings["max_completion_length"] = run.config.grpo.max_completion_length
        settings["generator"] = derived_generator(run.config.run.seed, "rejection", start)
        rollouts, texts = rollout(
            run.model, run.tokenizer, [p for _, p in part], run.config.grpo.num_generations, **settings
        )
        for (example, prompt), group, ids in zip(part, texts, rollouts.completion_ids, strict=True):
            right = {tuple(i) for text, i in zip(group, ids, strict=True) if score_completion(example, text).match}
            by_database.setdefault(example.db_id, []).extend((prompt, list(i)) for i in sorted(right))
    return [pairs for pairs in by_database.values() if pairs]


def main() -> None:
    """Train one control and print, and write, its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("clean", "rejection"))
    parser.add_argument("--config", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--split", choices=("val", "test"), default="test")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = load_config(options.config, [f"run.seed={options.seed}"])
    run = train.prepare(config, Path(tempfile.mkdtemp()), resume=False)
    k = config.eval.num_generations

    def measure() -> dict:
        return evaluate_policy(run.model, run.tokenizer, run.sets[options.split], config, num_generations=k)

    before = measure()
    started = time.process_time()
    examples = [example for example, _ in run.questions]
    pairs = train.sft_pairs(run.tokenizer, examples, config) if options.method == "clean" else sampled_pairs(run)
    groups = make_groups(pairs, max_branches=8)
    stage = SftConfig(learning_rate=options.learning_rate, groups_per_step=4, warmup_steps=10, max_steps=10)
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    probe = time.process_time()  # ten steps to learn how many fit into the budget; their effect is undone
    list(train_sft(run.model, groups, stage, options.seed))
    seconds_per_step = (time.process_time() - probe) / stage.max_steps
    run.model.load_state_dict(weights)
    left = options.seconds - (probe - started)
    stage = replace(stage, max_steps=max(1, int(left / seconds_per_step)))
    probe_cost = time.process_time() - probe
    list(train_sft(run.model, groups, stage, options.seed))
    seconds = time.process_time() - started - probe_cost
    after = measure()
    result = {"method": options.method, "config": options.config, "seed": options.seed, "seconds": round(seconds, 1)}
    result |= {"pairs": sum(map(len, pairs)), "steps": stage.max_steps, "learning_rate": options.learning_rate}
    result |= {"split": options.split, "before": before, "after": after, "versions": versions()}
    result["verdict"] = verdict_in_words(before, after, None)
    print(f"{options.method}, seed {options.seed}, {stage.max_steps} steps, {seconds:.0f} CPU seconds")
    print(f"after: {describe(after)}\n{result['verdict']}")
    if options.out:
        options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
