"""Attention over the tree of a group: who sees whom, stated once.

    A token sees the prompt that its row branches from, and its own row up to itself. Nothing else.

                     +-- row 1
    [ prompt ] ------+-- row 2        rows of one prompt never see each other
                     +-- row G

Every pass of the model is one case of this rule: prefill, and a plain forward, are rows without a prompt; scoring and
training are rows that come whole; decoding is rows that come one token at a time, their past in a cache. The prompt's
keys and values exist once per group. Whole rows expand them; decoding folds the rows that share them into the query
axis of one matrix product, so that they are read once and not G times.

Softmax(q k^T / sqrt(E)) v is arXiv:1706.03762 eq. 1; H query heads share K key/value heads as in arXiv:2305.13245.
Shapes: Q prompts, G rows per prompt, B = Q * G rows, T query tokens, S own keys (S >= T: the last T are the queries'
own), P prompt tokens, H query heads, K key/value heads, E head dim.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from model.cache import PromptCache, RowCache


@dataclass(frozen=True)
class View:
    """What the rows of one pass may see."""

    mask: Tensor | None = None  # from `visible_keys`, over [prompt keys, own keys]
    prompt: PromptCache | None = None  # the prompts that the rows branch from
    row_prompt: Tensor | None = None  # (B,) which of them each row branches from (whole rows only)
    past: RowCache | None = None  # the rows' earlier tokens; the pass then brings one token a row, question-major


def visible_keys(
    num_queries: int, *, padding_mask: Tensor | None = None, prompt: PromptCache | None = None, row_prompt=None
) -> Tensor | None:
    """The rule for whole rows as a mask over [prompt keys, own keys]: booleans (B, 1, T, P + T), True where visible.

    Rows without a prompt may have a padding_mask (B, T), 1 at real tokens, padding on either side (a padding query sees
    itself, or softmax would give NaN); rows with one say in row_prompt (B,) which. None is plain causality; where no
    prompt is padded, a causal bias that flash kernels know.
    Example: T = 2, prompts of length 1 and 2, the row sees the first -> [[1, 0, 1, 0], [1, 0, 1, 1]]
    """
    if padding_mask is None and prompt is None:
        return None
    if prompt is not None and prompt.padding is None:
        return causal_lower_right(num_queries, prompt.width + num_queries)
    device = (prompt.lengths if padding_mask is None else padding_mask).device
    own = torch.ones(num_queries, num_queries, dtype=torch.bool, device=device).tril()  # (T, T)
    if padding_mask is not None:
        # A padding query would have nothing to look at and give NaN: it may look at itself; nobody reads it.
        return own & padding_mask.bool()[:, None, None, :] | torch.eye(num_queries, dtype=torch.bool, device=device)
    of_prompt = ~prompt.padding[row_prompt]  # (B, 1, 1, P)
    return torch.cat([of_prompt.expand(-1, -1, num_queries, -1), own.expand(len(row_prompt), 1, -1, -1)], dim=-1)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, view: View, layer: int) -> Tensor:
    """Attention of whole rows over [their prompt, themselves]: q (B, H, T, E), k and v (B, K, T, E) -> (B, H, T, E)."""
    if view.prompt is not None:
        prompt_k, prompt_v = (shared[view.row_prompt] for shared in view.prompt.layers[layer])  # (B, K, P, E)
        k, v = torch.cat([prompt_k, k], dim=2), torch.cat([prompt_v, v], dim=2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=view.mask, is_causal=view.mask is None, enable_gqa=True)


def attend_step(q: Tensor, k: Tensor, v: Tensor, view: View, layer: int) -> Tensor:
    """Attention of one new token a row over [its prompt, its own past]: q (B, H, 1, E) -> (B, H, 1, E).

    k and v: (B, K, S, E), the row's own tokens so far, the newest last. Siblings share a prompt, and H/K query heads
    share a key head: both fold into the query axis. The two blocks of scores meet in one softmax.
    """
    prompt_k, prompt_v = view.prompt.layers[layer]  # (Q, K, P, E)
    rows, heads, _, dim = q.shape
    prompts, kv_heads, width, _ = prompt_k.shape
    group, share = rows // prompts, heads // kv_heads

    def fold(x: Tensor) -> Tensor:  # (B, K, H/K, n) -> (Q, K, G * H/K, n)
        return x.view(prompts, group, kv_heads, share, -1).transpose(1, 2).flatten(2, 3)

    def unfold(x: Tensor) -> Tensor:  # and back
        return x.view(prompts, kv_heads, group, share, -1).transpose(1, 2).flatten(0, 1)

    q = q.view(rows, kv_heads, share, dim) * dim**-0.5
    on_prompt = fold(q) @ prompt_k.transpose(-1, -2)
    if view.prompt.padding is not None:
        on_prompt = on_prompt.masked_fill(view.prompt.padding, float("-inf"))
    on_row = q @ k.transpose(-1, -2)
    if (unwritten := view.past.unwritten) is not None:
        on_row = on_row.masked_fill(unwritten, float("-inf"))
    scores = torch.cat([unfold(on_prompt), on_row], dim=-1)  # (B, K, H/K, P + S)
    weights = scores.float().softmax(dim=-1).to(v.dtype)
    out = unfold(fold(weights[..., :width]) @ prompt_v) + weights[..., width:] @ v
    return out.reshape(rows, heads, 1, dim)
