"""The Qwen2 decoder (arXiv:2407.10671), whole before parts. Parameter names are Hugging Face's.

Pre-norm residual blocks: RMSNorm, rotary positions, grouped-query attention with biases on q, k and v only, SwiGLU.
One stack of layers serves everything: `prefill` runs the prompts and keeps their keys and values, `extend` runs whole
rows that branch from them (scoring, training), `step` adds one token to every row (sampling), and a plain call runs
rows that have no prompt. What differs is only the `View`: who may see whom.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import View, attend_rows, attend_step, visible_keys
from model.cache import PromptCache, RowCache
from model.config import Qwen2Config


class Qwen2(nn.Module):
    """A causal language model over the tree of a group."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.config = config
        self.model = nn.Module()  # only for Hugging Face's prefix
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.gradient_checkpointing = False  # recompute each layer in the backward pass: less memory, a third slower
        self.cuda_graphs = False  # sample with a fixed cache and, on CUDA, a recorded step (graphs.py)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits of plain rows: ids (B, T), mask (B, T) of 0/1 with padding on either side -> (B, T, V)."""
        # Padding in front shifts a row's positions, and only distances count.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        view = View(mask=visible_keys(input_ids.shape[1], padding_mask=attention_mask))
        return self.logits(self._run(input_ids, positions, view))

    def prefill(self, prompt_ids: Tensor, lengths: Tensor, trunk: PromptCache | None = None) -> PromptCache:
        """Keys and values of right-padded prompts (Q, P), lengths (Q,). No real token sees the padding.

        trunk: one prompt that all of these go on from; ids and lengths are then without it, the result is with it.
        """
        x, layers, start, view = self.model.embed_tokens(prompt_ids), [], 0, View()
        if trunk is not None:
            start, row_prompt = trunk.width, torch.zeros_like(lengths)
            view = View(visible_keys(prompt_ids.shape[1], prompt=trunk, row_prompt=row_prompt), trunk, row_prompt)
        positions = torch.arange(start, start + prompt_ids.shape[1], device=prompt_ids.device)
        rotary = rotary_angles(positions[None], self.config)
        for layer in self.model.layers:
            layers.append(layer.self_attn.keys_values(layer.input_layernorm(x), rotary))
            if layer is not self.model.layers[-1]:  # nobody reads what the last one puts out
                x = self._layer(layer, x, rotary, view)
        prompt = PromptCache(layers, start + lengths)
        return prompt if trunk is None else prompt.after(trunk)

    def extend(self, input_ids: Tensor, positions: Tensor, prompt: PromptCache, row_prompt: Tensor) -> Tensor:
        """Hidden states (B, T, D) of whole rows (B, T), each branching from the end of its prompt row_prompt (B,)."""
        mask = visible_keys(input_ids.shape[1], prompt=prompt, row_prompt=row_prompt)
        return self._run(input_ids, positions, View(mask, prompt, row_prompt))

    def step(self, input_ids: Tensor, positions: Tensor, prompt: PromptCache, past: RowCache) -> Tensor:
        """Hidden states (B, 1, D) of one new token a row, B = Q * G question-major; `past` grows by the token."""
        hidden = self._run(input_ids, positions, View(prompt=prompt, past=past))
        past.advance()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V) through the output head (the embedding itself where tied)."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return F.linear(hidden, head.weight)

    def init_weights(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Plain random initialisation, in place: normal weights, zero biases, unit norms."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=std, generator=generator)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)

    def _run(self, input_ids: Tensor, positions: Tensor, view: View) -> Tensor:
        x = self.model.embed_tokens(input_ids)  # (B, T, D)
        rotary = rotary_angles(positions, self.config)
        for layer in self.model.layers:
            x = self._layer(layer, x, rotary, view)
        return self.model.norm(x)

    def _layer(self, layer: "DecoderLayer", x: Tensor, rotary: tuple[Tensor, Tensor], view: View) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, x, rotary, view, use_reentrant=False)
        return layer(x, rotary, view)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); shapes stay (B, T, D)."""

    def __init__(self, config: Qwen2Config, index: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], view: View) -> Tensor:
        """One residual block; `view` says what the rows may see."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, view)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Project, rotate, look (model/attention.py), project back."""

    def __init__(self, config: Qwen2Config, index: int):
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=True)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], view: View) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        q = rotate(self._heads(self.q_proj(x)), rotary)  # (B, H, T, E)
        k, v = self.keys_values(x, rotary)  # (B, K, T, E)
        if view.past is None:
            out = attend_rows(q, k, v, view, self.index)
        else:
            out = attend_step(q, *view.past.append(self.index, k, v), view, self.index)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values: (B, K, T, E) each."""
        return rotate(self._heads(self.k_proj(x)), rotary), self._heads(self.v_proj(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202 eq. 6): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467 eq. 4); the mean in float32, as Hugging Face does.

    Example: x = (3, 4), eps = 0, weight 1 -> x / sqrt(12.5) = (0.8485, 1.1314)
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D), same dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotary_angles(positions: Tensor, config: Qwen2Config) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, 1, T, E/2), float32, at positions (B, T): a head's pair i turns by position / theta^(2i/E).

    arXiv:2104.09864 eq. 34. Example: E = 4, theta = 10,000, position 1 -> angles (1, 0.01)
    """
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device).float() / config.head_dim
    angles = positions[:, None, :, None].float() / config.rope_theta**exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + E/2]) of (B, heads, T, E) by its angle. Example: (1, 0) at 90 degrees -> (0, 1)"""
    cos, sin = (part.to(x.dtype) for part in rotary)
    first, second = x.chunk(2, dim=-1)  # the split-half layout of Hugging Face's checkpoints
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
