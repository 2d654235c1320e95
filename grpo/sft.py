"""Supervised fine-tuning over trees: the questions of one database are branches of one schema.

    [ schema ] ---+-- question 1 + SQL 1        loss = sum(w * -log p) / sum(w)
                  +-- question 2 + SQL 2        w = 1 on completion tokens (the end token included),
                  +-- ...                       prompt_loss_weight on question tokens, 0 on the schema

A branch begins where the prompts' ids stop being equal, so no text is tokenised in pieces (a question that is alone in
its tree shares all of its prompt: none of it is trained). One pass of a long schema then serves all its questions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.batch import build_tree, score
from grpo.config import SftConfig
from grpo.update import learning_rate, make_optimizer
from model.qwen2 import Qwen2
from model.sampling import common_prefix

Pair = tuple[list[int], list[int]]  # prompt ids, completion ids (end token included)


@dataclass(frozen=True)
class SftGroup:
    """What the prompts of a database share, and for each question the rest of its prompt and its completion."""

    prefix: list[int]
    branches: list[list[int]]
    question_lengths: list[int]  # how many of a branch's tokens still belong to the prompt


def make_groups(pairs_by_database: list[list[Pair]], max_branches: int) -> list[SftGroup]:
    """Cut every database's pairs into trees of at most `max_branches` questions.

    Example: ([1, 2, 3], [9]), ([1, 2, 4], [8]) -> prefix [1, 2], branches [[3, 9], [4, 8]], question_lengths [1, 1]
    """
    parts = [pairs[i : i + max_branches] for pairs in pairs_by_database for i in range(0, len(pairs), max_branches)]
    groups = []
    for part in parts:
        shared = common_prefix([prompt for prompt, _ in part])
        branches = [prompt[shared:] + completion for prompt, completion in part]
        groups.append(SftGroup(part[0][0][:shared], branches, [len(prompt) - shared for prompt, _ in part]))
    return groups


def sft_loss(model: Qwen2, groups: list[SftGroup], prompt_loss_weight: float) -> tuple[Tensor, int]:
    """The weighted mean of -log p in nats per token, and the number of completion tokens it covers."""
    device = model.model.embed_tokens.weight.device
    batch = build_tree([g.prefix for g in groups], [g.branches for g in groups], device)
    question = torch.tensor([length for g in groups for length in g.question_lengths], device=device)
    is_question = torch.arange(batch.mask.shape[1], device=device) < question[:, None]  # (B, S)
    weights = torch.where(is_question, prompt_loss_weight, 1.0) * batch.mask
    logprobs = score(model, batch)
    return -(weights * logprobs).sum() / weights.sum(), int((batch.mask & ~is_question).sum())


def train_sft(
    model: Qwen2, groups: list[SftGroup], stage: SftConfig, seed: int, start: dict | None = None
) -> Iterator[tuple[int, dict, torch.optim.Optimizer]]:
    """Train on the groups, in place, one step each time the next value is asked for; ValueError without groups.

    seed: of the order in which groups come; every pass over them is a new permutation. start: the "step" after which to
    go on, and the state of the "optimizer" then. Yields (step, {"sft/loss", "sft/grad_norm", "sft/learning_rate",
    "sft/num_tokens": float}, optimizer), up to `stage.max_steps`.
    """
    if not groups:
        raise ValueError("the SFT stage has no examples; lower its filters or give it databases")
    optimizer, generator = make_optimizer(model.parameters(), stage), torch.Generator().manual_seed(seed)
    order: list[int] = []
    done = (start or {}).get("step", 0)
    if done:
        optimizer.load_state_dict(start["optimizer"])
    for step in range(stage.max_steps):
        while len(order) < stage.groups_per_step:
            order += torch.randperm(len(groups), generator=generator).tolist()
        chosen, order = order[: stage.groups_per_step], order[stage.groups_per_step :]
        if step < done:  # the permutations are drawn again, which is all that the order depends on
            continue
        rate = optimizer.param_groups[0]["lr"] = learning_rate(stage, step, stage.max_steps)
        loss, tokens = sft_loss(model, [groups[i] for i in chosen], stage.prompt_loss_weight)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], stage.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        metrics = {"loss": loss.detach(), "grad_norm": norm, "learning_rate": rate, "num_tokens": tokens}
        yield step + 1, {f"sft/{name}": float(value) for name, value in metrics.items()}, optimizer
