"""A whole run in seconds: a random model of a few thousand parameters on a handful of synthetic databases."""

from pathlib import Path

import train

CONFIG = """
[model]
init = "random"
vocab_size = 300
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2

[data]
train_databases = 4
val_databases = 2
test_databases = 2
questions_per_database = 4

[[sft]]
databases = 4
questions_per_database = 4
max_steps = 2
groups_per_step = 2

[grpo]
questions_per_step = 4
num_generations = 4
max_completion_length = 8
max_steps = 4
micro_batch_size = 2
learning_rate = 3e-3

[eval]
eval_steps = 2
num_generations = 0

[run]
save_steps = 2
"""


def run_tiny(folder: Path, *overrides: str, expect: int = 0) -> Path:
    """Train the tiny config in `folder` by the command line; returns the run directory (the last one, if several)."""
    config = folder / "tiny.toml"
    config.write_text(CONFIG, encoding="utf-8")
    places = [f"run.output_dir={folder / 'runs'}", f"data.cache_dir={folder / 'cache'}"]
    arguments = ["--config", str(config)]
    for override in (*places, *overrides):
        arguments += ["--set", override]
    assert train.main(arguments) == expect
    runs = sorted((folder / "runs").glob("*"), key=lambda path: (len(path.name), path.name))
    return runs[-1] if runs else folder
