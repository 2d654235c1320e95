"""Sample groups of completions: prefill each prompt once, then add one token to every row until all have ended.

A row is prompt + completion. Its first query is the prompt's last token, so the prefill covers the prompt without it,
and the same alignment serves training (grpo/batch.py): the input at step t predicts completion token t.

The end-of-sequence token is part of the completion and has a log-probability like any other. The log-probabilities
are those of the distribution that was sampled from, in float32, over the ids that the tokenizer knows (published
checkpoints have more embedding rows than tokens; a phantom id must never appear).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.cache import PromptCache, RowCache
from model.graphs import record_step
from model.qwen2 import Qwen2

CHECK_EVERY = 8  # steps between looks at which groups are finished: on a GPU each look waits for the device


@dataclass(frozen=True)
class Samples:
    """G completions for each of Q prompts. `finished` is False where the length limit cut the completion."""

    ids: list[list[list[int]]]  # Q x G lists of token ids, the end token included
    logprobs: list[list[list[float]]]  # the same shape, nats
    finished: list[list[bool]]
    entropy: list[list[float]]  # Q x G, mean over a completion's tokens of the sampled distribution's entropy, nats


def pad(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-pad lists of ids to (B, T), with their lengths (B,). Example: [[5, 6], [7]] -> [[5, 6], [7, 0]], [2, 1]"""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.long)
    return ids.to(device), lengths.to(device)


def common_prefix(rows: list[list[int]]) -> int:
    """How many ids all rows begin with. Example: [[1, 2, 3], [1, 2, 4, 5]] -> 2"""
    first, last = min(rows), max(rows)  # in sorted order the outermost two differ earliest
    length = min(len(first), len(last))
    return next((i for i in range(length) if first[i] != last[i]), length)


def prefill(model: Qwen2, prompts: list[list[int]], device: torch.device) -> PromptCache:
    """The cache of Q prompts, each without its last id; where one schema is most of every prompt, it is read once."""
    shared = min(common_prefix(prompts), min(map(len, prompts)) - 2)  # at least one id of each prompt is its own
    if len(prompts) == 1 or 2 * shared < max(map(len, prompts)):
        return model.prefill(*pad([ids[:-1] for ids in prompts], device))
    trunk = model.prefill(*pad([prompts[0][:shared]], device))
    return model.prefill(*pad([ids[shared:-1] for ids in prompts], device), trunk)


@torch.inference_mode()
def generate(
    model: Qwen2,
    prompts: list[list[int]],
    num_generations: int,
    *,
    max_completion_length: int,
    eos_ids: set[int] | list[int],
    vocab_size: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Samples:
    """Sample `num_generations` completions of each of Q prompts (temperature 0: greedy); any of `eos_ids` ends one.

    Ids from `vocab_size` on are never sampled; top_k and top_p cut the tail of the distribution, for evaluation. The
    generator, a CPU one, is the only source of randomness: torch.rand(B, max_completion_length, dtype=float64) is
    drawn at once, and row b takes [b, t] at step t. ValueError for no prompt or an empty one ("prompts have lengths").
    """
    if not prompts or not all(prompts):
        raise ValueError(f"prompts have lengths {[*map(len, prompts)]}; expected at least one prompt, each with an id")
    device = model.model.embed_tokens.weight.device
    shape = (len(prompts) * num_generations, max_completion_length)
    prompt = prefill(model, prompts, device)
    token = torch.tensor([ids[-1] for ids in prompts], device=device).repeat_interleave(num_generations)
    keys = prompt.layers[0][0]
    sizes = (shape[0], keys.shape[1], shape[1], keys.shape[3])
    past = RowCache(len(prompt.layers), sizes, keys.dtype, device, fixed=model.cuda_graphs)
    step = step_function(model, prompt, past, shape[0])
    ends = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)

    sampled = torch.full(shape, -1, device=device)  # -1: not sampled, and never an end
    logprobs, entropies = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    alive = torch.arange(shape[0], device=device)  # the rows that are still computed, question-major
    # Drawn row after row: a row's numbers depend neither on its neighbours' ends nor on how questions are batched.
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).to(device)
    for t in range(max_completion_length):
        position = prompt.lengths.repeat_interleave(num_generations) + t
        logits = step(token[:, None], position[:, None])[:, 0, :vocab_size]
        distribution = sampled_distribution(logits.float(), temperature, top_k, top_p)
        token = logits.argmax(dim=-1) if temperature == 0 else draw(distribution, uniform[alive, t])
        sampled[alive, t] = token
        logprobs[alive, t] = distribution.gather(1, token[:, None])[:, 0]
        entropies[alive, t] = -(distribution.exp() * distribution.clamp(min=-1e4)).sum(dim=-1)  # 0 * -inf is no 0
        if (t + 1) % CHECK_EVERY == 0:
            open_groups = ~torch.isin(sampled[alive], ends).any(dim=1).view(-1, num_generations).all(dim=1)
            if not open_groups.any():
                break
            # A group leaves as a whole; where that costs a new graph, only once half of them can leave.
            if open_groups.sum() <= (len(open_groups) // 2 if model.cuda_graphs else len(open_groups) - 1):
                keep = open_groups.repeat_interleave(num_generations).nonzero()[:, 0]
                alive, token = alive[keep], token[keep]
                prompt = prompt.keep(open_groups.nonzero()[:, 0])
                past.keep(keep)
                step = step_function(model, prompt, past, len(alive))
    return _as_samples(sampled, logprobs, entropies, torch.isin(sampled, ends), num_generations)


def step_function(model: Qwen2, prompt: PromptCache, past: RowCache, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of one new token a row, ids and positions (B, 1) -> logits (B, 1, V); `past` grows by it."""
    if model.cuda_graphs:
        return record_step(model, prompt, past, rows)
    return lambda token, position: model.logits(model.step(token, position, prompt, past))


def _as_samples(sampled: Tensor, logprobs, entropies, ended: Tensor, num_generations: int) -> Samples:
    lengths = torch.where(ended.any(dim=1), ended.int().argmax(dim=1) + 1, sampled.shape[1]).tolist()

    def by_group(values: Tensor) -> list[list[list]]:  # (B, C) -> Q x G lists, each cut to its length
        rows = [row[:length] for row, length in zip(values.tolist(), lengths, strict=True)]
        return [rows[i : i + num_generations] for i in range(0, len(rows), num_generations)]

    entropy = [[sum(row) / len(row) for row in group] for group in by_group(entropies)]
    return Samples(by_group(sampled), by_group(logprobs), ended.any(dim=1).view(-1, num_generations).tolist(), entropy)


def sampled_distribution(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Log-probabilities (B, V) of what is sampled from: log_softmax(logits / temperature), its tail cut if asked.

    Temperature 0 leaves the logits as they are; the k-th largest keeps its ties.
    Example: logits (log 4, log 1), temperature 2 -> probabilities (2/3, 1/3), since sqrt(4) : sqrt(1) is 2 : 1
    """
    if temperature not in (0, 1):  # 0, greedy decoding, leaves them as they are
        logits = logits / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[1])).values[:, -1:], float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        beyond = probabilities.cumsum(dim=-1) - probabilities >= top_p  # the token that crosses top_p stays
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), float("-inf"))
    return logits.log_softmax(dim=-1)


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Ids (B,): cumulative p of logprobs (B, V), inverted at `uniform` (B,). Example: p = (0.5, 0.3, 0.2), 0.6 -> 1"""
    cumulative = logprobs.double().exp().cumsum(dim=-1)  # in float32 the tail of a large vocabulary rounds off
    # right=True: the first id whose cumulative probability exceeds the target, never one of probability zero.
    token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    return token.clamp(max=logprobs.shape[1] - 1)[:, 0]
