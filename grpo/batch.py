"""The tensors of a step: groups become trees, and the rows' log-probabilities come back.

A tree is a prefix that exists once and the branches that grow from its end: in GRPO a prompt and its completions, in
SFT what the prompts of one database share, and the rest of each with its answer. The shift is done here, once:

    prefix   p1 p2 ... pn      ->  prefill  p1 ... p(n-1)
    branch   c1 c2 ... cS      ->  input    pn c1 ... c(S-1)      position s holds what comes before
                                   target   c1 c2 ... cS          and is scored on what comes next

so that position s of `logprobs` belongs to branch token s and nothing is off by one later on. Masks come from lengths;
the end-of-sequence token is a branch token like any other. Shapes: Q prefixes, B rows, S scored positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.qwen2 import Qwen2
from model.sampling import pad

MAX_LOGITS = 2**25  # elements of one block of logits (128 MiB in float32); more rows are scored block by block


@dataclass(frozen=True)
class TreeBatch:
    """Q prefixes with their B branches, right-padded."""

    prefix_ids: Tensor  # (Q, P), each prefix without its last token
    prefix_lengths: Tensor  # (Q,)
    row_prefix: Tensor  # (B,) the prefix that each branch grows from
    input_ids: Tensor  # (B, S)
    target_ids: Tensor  # (B, S)
    positions: Tensor  # (B, S)
    mask: Tensor  # (B, S) bool, True at branch tokens


def build_tree(prefixes: list[list[int]], branches: list[list[list[int]]], device: torch.device) -> TreeBatch:
    """Lay out Q prefixes and, for each, its branches; ValueError if one of them is empty.

    Example: prefixes [[1, 2]], branches [[[3], [4, 5]]] -> prefix_ids [[1]], input_ids [[2, 0], [2, 4]],
    target_ids [[3, 0], [4, 5]], positions [[1, 2], [1, 2]], mask [[1, 0], [1, 1]]
    """
    if not all(prefixes) or not all(branch for group in branches for branch in group):
        raise ValueError("an empty prefix or branch; expected prompts that share their first id, and completions")
    prefix_ids, prefix_lengths = pad([ids[:-1] for ids in prefixes], device)
    rows = [(q, branch) for q, group in enumerate(branches) for branch in group]
    target_ids, lengths = pad([branch for _, branch in rows], device)
    input_ids, _ = pad([prefixes[q][-1:] + branch[:-1] for q, branch in rows], device)
    row_prefix = torch.tensor([q for q, _ in rows], device=device)
    steps = torch.arange(target_ids.shape[1], device=device)
    positions = prefix_lengths[row_prefix, None] + steps
    mask = steps < lengths[:, None]
    return TreeBatch(prefix_ids, prefix_lengths, row_prefix, input_ids, target_ids, positions, mask)


def score(model: Qwen2, batch: TreeBatch, *, temperature: float = 1.0, vocab_size: int | None = None) -> Tensor:
    """Log-probability of every branch token: (B, S), float32, nats, differentiable; 0 at padding.

    It is the sampler's: logits divided by the temperature, ids from `vocab_size` on left out. Only positions under the
    mask meet the vocabulary, in blocks that the backward pass recomputes: memory does not grow with rows x vocabulary.
    """
    prompt = model.prefill(batch.prefix_ids, batch.prefix_lengths)
    hidden = model.extend(batch.input_ids, batch.positions, prompt, batch.row_prefix)[batch.mask]  # (N, D)
    target = batch.target_ids[batch.mask]
    block = max(1, MAX_LOGITS // model.config.vocab_size)
    recompute = torch.is_grad_enabled() and len(target) > block

    def score_block(start: int) -> Tensor:
        logits = model.logits(hidden[start : start + block])[:, :vocab_size].float()  # (n, V)
        return token_logprobs(logits if temperature == 1 else logits / temperature, target[start : start + block])

    starts = range(0, len(target), block)
    parts = [checkpoint(score_block, s, use_reentrant=False) if recompute else score_block(s) for s in starts]
    return torch.zeros(batch.mask.shape, device=hidden.device).masked_scatter(batch.mask, torch.cat(parts))


def token_logprobs(logits: Tensor, target: Tensor) -> Tensor:
    """log p(target), (N,) nats, of logits (N, V). Example: logits (0, 0), target 1 -> -log 2 = -0.6931"""
    return logits.log_softmax(dim=-1).gather(1, target[:, None])[:, 0]
