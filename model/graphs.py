"""The sampling step as a CUDA graph: a few hundred small kernels, recorded once and launched as one.

Adding a token to every row is so little work that a card waits for Python between kernels. A graph replays the same
kernels on the same addresses, so nothing in it may change size: the rows' cache is a fixed one (model/cache.py), where
keys that are not written yet are masked, and a new graph is recorded when the rows become fewer, which sampling then
does by halves only. Off by default (model.cuda_graphs): it has not been run on a card yet. Elsewhere than on CUDA the
step is called as it is, fixed cache and all.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model.cache import PromptCache, RowCache
from model.qwen2 import Qwen2


def record_step(model: Qwen2, prompt: PromptCache, past: RowCache, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of token ids (B, 1) and positions (B, 1) that does what model.step does -> logits (B, 1, V).

    Every call adds a token to `past`; the logits of a call are overwritten by the next one. B = rows.
    """
    device = prompt.lengths.device
    token, position = torch.zeros(2, rows, 1, dtype=torch.long, device=device).unbind()

    def step() -> Tensor:
        return model.logits(model.step(token, position, prompt, past))

    if device.type == "cuda":
        step = replayed(step, past)

    def call(new_token: Tensor, new_position: Tensor) -> Tensor:
        token.copy_(new_token)
        position.copy_(new_position)
        return step()

    return call


def replayed(step: Callable[[], Tensor], past: RowCache) -> Callable[[], Tensor]:
    """`step`, recorded: launches its graph, and returns the tensor in which that leaves its result."""
    at = past.at.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate in their first call, which a recording cannot hold
        step()
    torch.cuda.current_stream().wait_stream(side)
    past.at.copy_(at)  # what the trial wrote, the first real step writes over
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
