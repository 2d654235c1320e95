"""Keys and values that outlive a pass: the prompts' (once per group) and the rows' own while they are sampled."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class PromptCache:
    """Keys and values of Q prompts, made by `Qwen2.prefill`; in training the completions' loss reaches them."""

    layers: list[tuple[Tensor, Tensor]]  # (keys, values) of each layer, (Q, K, P, E) each, right-padded
    lengths: Tensor  # (Q,) without the padding

    @property
    def width(self) -> int:
        """P, the width that the prompts are padded to."""
        return self.layers[0][0].shape[2]

    @cached_property
    def padding(self) -> Tensor | None:
        """(Q, 1, 1, P) True at padding; None where no prompt is padded."""
        padding = torch.arange(self.width, device=self.lengths.device) >= self.lengths[:, None, None, None]
        return padding if bool(padding.any()) else None

    def keep(self, prompts: Tensor) -> "PromptCache":
        """The cache of the prompts in an index (n,)."""
        return PromptCache([(k[prompts], v[prompts]) for k, v in self.layers], self.lengths[prompts])

    def after(self, trunk: "PromptCache") -> "PromptCache":
        """The cache with the keys and values of the one prompt that all of these go on from in front."""
        count = len(self.lengths)
        layers = [
            tuple(torch.cat([shared.expand(count, -1, -1, -1), own], dim=2) for shared, own in zip(*both, strict=True))
            for both in zip(trunk.layers, self.layers, strict=True)
        ]
        return PromptCache(layers, self.lengths)


class RowCache:
    """The sampled tokens' keys and values, preallocated as `shape` (B, K, capacity, E); never differentiable.

    A fixed one always shows its whole capacity, and counts on the device: what a CUDA graph needs (graphs.py).
    """

    def __init__(
        self,
        num_layers: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        fixed: bool = False,
    ):
        new = torch.zeros if fixed else torch.empty  # a masked slot has weight zero, and zero times NaN is NaN
        self.layers = [new((2, *shape), dtype=dtype, device=device).unbind() for _ in range(num_layers)]
        self.length = 0  # tokens written so far, the same for every row
        self.at = torch.zeros(1, dtype=torch.long, device=device) if fixed else None  # the same, on the device
        self.slots = torch.arange(shape[2], device=device)

    @property
    def unwritten(self) -> Tensor | None:
        """(S,) True at the slots after the newest token; None where `append` does not show them."""
        return None if self.at is None else self.slots > self.at

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token's (B, K, 1, E) keys and values; return all of the row so far, (B, K, S, E) each.

        The caller calls `advance` after all layers.
        """
        if self.at is not None:
            keys, values = self.layers[layer]
            return keys.index_copy_(2, self.at, k), values.index_copy_(2, self.at, v)
        keys, values = (store[:, :, : self.length + 1] for store in self.layers[layer])
        keys[:, :, -1:], values[:, :, -1:] = k, v
        return keys, values

    def advance(self) -> None:
        """The next token goes one slot further."""
        self.length += 1
        if self.at is not None:
            self.at += 1

    def keep(self, rows: Tensor) -> None:
        """Drop every row that is not in the index `rows`."""
        for layer, (k, v) in enumerate(self.layers):  # layer by layer: only one is there twice
            self.layers[layer] = (k[rows], v[rows])
