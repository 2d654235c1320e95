"""Rollouts: what the policy wrote for the questions of one step, exactly as it was sampled.

The ids that were sampled are the ids that are trained on. Text is decoded for whoever scores it and never tokenised
again: decode followed by encode may return other ids for the same text.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model.qwen2 import Qwen2
from model.sampling import generate


@dataclass(frozen=True)
class Rollouts:
    """G completions for each of Q prompts; a group is a row, whatever its text."""

    prompt_ids: list[list[int]]  # Q
    completion_ids: list[list[list[int]]]  # Q x G, the end token included
    logprobs: list[list[list[float]]]  # Q x G, of the sampling distribution, nats
    finished: list[list[bool]]  # Q x G; False: cut at the length limit ("truncated")
    entropy: list[list[float]]  # Q x G, mean entropy of the distributions that the tokens were drawn from, nats

    @property
    def lengths(self) -> torch.Tensor:
        """(Q, G) completion lengths in tokens, the end token included."""
        return torch.tensor([[len(ids) for ids in group] for group in self.completion_ids])

    @property
    def truncated(self) -> torch.Tensor:
        """(Q, G) True where the length limit cut the completion."""
        return ~torch.tensor(self.finished)

    def select(self, groups: list[int]) -> "Rollouts":
        """The rollouts of the given groups, in that order."""
        return Rollouts(**{name: [column[g] for g in groups] for name, column in vars(self).items()})

    def join(self, other: "Rollouts") -> "Rollouts":
        """These groups, followed by the other ones."""
        return Rollouts(**{name: column + getattr(other, name) for name, column in vars(self).items()})


@dataclass(frozen=True)
class Rewards:
    """What completions earned."""

    total: torch.Tensor  # (Q, G) float32
    parts: dict[str, torch.Tensor]  # unweighted, (Q, G) each
    verdicts: list[list]  # Q x G, whatever the scorer says about each


@dataclass(frozen=True)
class Batch:
    """A step's groups: Q questions, G completions of each, what they earned."""

    examples: list
    rollouts: Rollouts
    texts: list[list[str]]
    rewards: Rewards
    asked: int  # questions sampled to get them; more than Q with dynamic sampling


def is_mixed(batch: Batch) -> list[bool]:
    """For every group, whether its rewards differ. Example: rewards [[1, 0], [1, 1]] -> True, False"""
    return (batch.rewards.total != batch.rewards.total[:, :1]).any(dim=1).tolist()


def join(a: Batch, b: Batch, groups: list[int]) -> Batch:
    """The given groups, counted through a and then b; a part of the reward that one of them lacks counts 0."""
    both, names = (a.rewards, b.rewards), a.rewards.parts | b.rewards.parts
    parts = {name: [r.parts.get(name, torch.zeros_like(r.total)) for r in both] for name in names}
    columns = (a.examples + b.examples, a.texts + b.texts, a.rewards.verdicts + b.rewards.verdicts)
    examples, texts, verdicts = ([column[g] for g in groups] for column in columns)
    total = torch.cat([r.total for r in both])[groups]
    rewards = Rewards(total, {name: torch.cat(values)[groups] for name, values in parts.items()}, verdicts)
    return Batch(examples, a.rollouts.join(b.rollouts).select(groups), texts, rewards, a.asked + b.asked)


def rollout(
    model: Qwen2, tokenizer, prompts: list[list[int]], num_generations: int, **sampling
) -> tuple[Rollouts, list[list[str]]]:
    """Sample G completions of each of Q prompts: the rollouts, and Q x G texts without the end token.

    tokenizer: gives eos_ids, vocab_size and decode(ids). sampling: the other arguments of `model.sampling.generate`.
    """
    known = {"eos_ids": tokenizer.eos_ids, "vocab_size": tokenizer.vocab_size}
    samples = generate(model, prompts, num_generations, **known, **sampling)
    texts = [[completion_text(tokenizer, ids) for ids in group] for group in samples.ids]
    return Rollouts(prompts, samples.ids, samples.logprobs, samples.finished, samples.entropy), texts


def completion_text(tokenizer, ids: list[int]) -> str:
    """The text of a completion without its end token, if it has one."""
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in tokenizer.eos_ids else ids)


def question_order(n: int, count: int, asked: int, order_of_pass: Callable[[int], torch.Generator]) -> list[int]:
    """Which `count` of n questions come after the first `asked`: every pass over them is a new permutation.

    Nothing but that number is remembered, so a resumed run sees the questions that it would have seen.
    order_of_pass: the generator of a pass's permutation, by the number of the pass.
    Example: n = 3, count = 2: asked 0, 2, 4 gives places 0 1 | 2 and 0 of the next pass | 1 2 of the next pass
    """
    places = [divmod(place, n) for place in range(asked, asked + count)]
    passes = {number: torch.randperm(n, generator=order_of_pass(number)).tolist() for number, _ in places}
    return [passes[number][place] for number, place in places]
