"""The model card that a run leaves beside its weights: base, data, recipe, results with intervals, the command."""

import json

from grpo.config import Config

CARD = """---
library_name: {library}
base_model: {base}
tags: [grpo, text-to-sql]
---

# {run.name}

{what}, trained to write SQL by reinforcement: its queries are run, and rewarded if their rows are the gold query's.

Greedy execution accuracy with a 95 % Wilson interval on {n} held-out questions; one seed ({run.seed}):

{table}

{verdict}

Data `{data.source}`, prompts {data.prompt_style}. {stages} supervised stage(s), then {step} steps of GRPO:
{g.questions_per_step} questions x {g.num_generations} completions, advantage {g.advantage}, loss {g.loss_type},
beta {g.beta}, learning rate {g.learning_rate} ({g.lr_scheduler_type}), reward weights {weights}.
Made with {versions}. Equal rows on one database do not prove equal queries.

To repeat it, from the root of the repository, with the `config.toml` beside this:
`python train.py --config config.toml`
"""


def model_card(config: Config, summary: dict, step: int) -> str:
    """The card of what `step` steps left, from what summary.json holds: Markdown with Hugging Face's front matter."""
    results = {when: summary[when] for when in ("before", "after") if when in summary}
    others = [key for key in results["before"] if "@" in key]
    table = [f"| | EX | {' | '.join(others)} |", "|---" * (2 + len(others)) + "|"]
    for when, result in results.items():
        accuracy = f"{result['execution_accuracy']:.3f} [{result['low']:.3f}, {result['high']:.3f}]"
        table.append(f"| {' | '.join([when, accuracy, *(f'{result[key]:.3f}' for key in others)])} |")
    adapter, base = config.model.lora_r or config.model.adapter, config.model.path or "random initialisation"
    return CARD.format(
        library="peft" if adapter else "transformers",
        base=json.dumps(base),
        what=f"{'A LoRA adapter of' if adapter else 'A model that started from'} {base}",
        n=results["before"]["n"],
        table="\n".join(table),
        verdict=summary["verdict"],
        stages=len(config.sft),
        step=step,
        weights=json.dumps(config.reward.weights),
        versions=", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        run=config.run,
        data=config.data,
        g=config.grpo,
    )
