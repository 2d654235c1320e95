"""Keys and values that outlive a pass: the prompts' (once per group) and the rows' own while they are sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PromptCache:
    """Keys and values of Q prompts, made by `Qwen2.prefill`. In training the completions' loss reaches them through it."""

    layers: list[tuple[Tensor, Tensor]]  # (keys, values) of each layer, (Q, K, P, E) each, right-padded
    lengths: Tensor  # (Q,) without the padding

    @property
    def width(self) -> int:
        """P, the width that the prompts are padded to."""
        return self.layers[0][0].shape[2]

    def keep(self, prompts: Tensor) -> "PromptCache":
        """The cache of the prompts in an index (n,)."""
        return PromptCache([(k[prompts], v[prompts]) for k, v in self.layers], self.lengths[prompts])


class RowCache:
    """The sampled tokens' keys and values, preallocated for `capacity` tokens a row; never differentiable."""

    def __init__(self, num_layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
        """shape: (B, K, capacity, E)."""
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.length = 0  # tokens written so far, the same for every row

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token's (B, K, 1, E) keys and values; return all of the row so far, (B, K, S, E) each."""
        end = self.length + 1
        self.keys[layer][:, :, self.length : end] = k
        self.values[layer][:, :, self.length : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Drop every row that is not in the index `rows`."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]
