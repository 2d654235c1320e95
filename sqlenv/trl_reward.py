"""The same reward for TRL's GRPOTrainer: for whoever needs several GPUs, accelerate or vLLM, and keeps the environment.

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from sqlenv.datasets import load_examples
    from sqlenv.trl_reward import dataset_rows, sql_execution_reward

    rows = dataset_rows(load_examples("spider", "train"), system="Answer in one ```sql block.")
    trainer = GRPOTrainer("Qwen/Qwen2.5-Coder-0.5B-Instruct", sql_execution_reward, args=GRPOConfig("runs/trl"),
                          train_dataset=Dataset.from_list(rows))
    trainer.train()

Nothing is imported from TRL: its reward signature is plain Python (completions, the dataset's columns by name, ...).
"""

from pathlib import Path

from sqlenv.example import Example
from sqlenv.prompt import build_messages
from sqlenv.reward import score_completion, sql_reward, total_reward

WEIGHTS = {"correct": 1.0, "executes": 0.1, "format": 0.2, "exact": 0.0}  # the defaults of [reward] in this project


def dataset_rows(examples: list[Example], **prompt) -> list[dict]:
    """One row a question: "prompt" (messages) and the columns that the reward needs; prompt: as in build_messages."""
    return [
        {"prompt": build_messages(e, **prompt), "gold": e.gold, "db_id": e.db_id, "database": str(e.database)}
        for e in examples
    ]


def sql_execution_reward(
    completions: list, gold: list[str], db_id: list[str], database: list[str], **others
) -> list[float]:
    """The default reward of every completion: a text, or a list of messages whose last one is the answer.

    Example: gold "SELECT 1 FROM t" answered by one ```sql block with the same rows -> 1.0 correct + 0.2 format = 1.2
    """
    rewards = []
    for completion, *columns in zip(completions, gold, db_id, database, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        example = Example("", columns[0], columns[1], Path(columns[2]))
        rewards.append(total_reward(sql_reward(example, text, score_completion(example, text)), WEIGHTS))
    return rewards
