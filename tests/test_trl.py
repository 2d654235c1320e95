"""Leaving for more machines: the reward in TRL's signature, and a few steps of TRL's own trainer with it.

Run: pytest tests/test_trl.py; with trl, transformers and datasets installed also: pytest -m slow tests/test_trl.py
"""

from pathlib import Path

import pytest

from grpo.config import DEFAULT_WEIGHTS
from sqlenv.datasets import load_examples
from sqlenv.prompt import build_messages
from sqlenv.trl_reward import WEIGHTS, dataset_rows, sql_execution_reward

START = Path(__file__).resolve().parents[1] / "configs" / "warm_start"


@pytest.fixture
def examples(tmp_path):
    return load_examples(
        "synthetic", "train", folder=tmp_path, num_databases=4, questions_per_database=2, seed=0, sloppy=0.0
    )


def test_the_rewards_are_those_of_this_project(examples):
    assert WEIGHTS == DEFAULT_WEIGHTS
    rows = dataset_rows(examples[:4], system="Answer in SQL.")
    assert rows[0]["prompt"] == build_messages(examples[0], system="Answer in SQL.")
    columns = {key: [row[key] for row in rows] for key in ("gold", "db_id", "database", "prompt")}
    block = "```sql\n{}\n```"
    right, wrong = block.format(rows[0]["gold"]), block.format("SELECT 1 FROM no_such_table")
    completions = [
        right,  # 1.0 correct + 0.2 format
        [{"role": "assistant", "content": wrong}],  # 0.2 format, as TRL gives it for chat prompts
        rows[2]["gold"],  # 1.0 correct, no block
        "SELECT 1",  # runs, but reads no table
    ]
    assert sql_execution_reward(completions, **columns, completion_ids=[], trainer_state=None) == [1.2, 0.2, 1.0, 0.0]
    with pytest.raises(ValueError, match="zip"):
        sql_execution_reward(completions[:3], **columns)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_trains_with_it_for_a_few_steps(examples, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    settings = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 24}
    settings |= {"use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "bf16": False}
    trainer = trl.GRPOTrainer(
        str(START),
        sql_execution_reward,
        args=trl.GRPOConfig(str(tmp_path / "run"), **settings),
        train_dataset=datasets.Dataset.from_list(dataset_rows(examples)),
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert len(rewards) == 2
    assert max(rewards) > 0  # the start answers in SQL: its queries run, at the least
