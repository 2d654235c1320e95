"""Step 5: the whole decoder.

Built here: model/qwen2.py `Qwen2`, `DecoderLayer`, `Attention`, `MLP`.
Equation, in each layer: x + attention(norm(x)), then x + down(silu(gate(h)) * up(h)) with h = norm(x); then norm and
output head (arXiv:2407.10671). q, k and v have biases and nothing else has; a tied head is the embedding itself.
Run: pytest tests/test_05_decoder.py
Later steps need it: all of them. Parity with published implementations is tested with the weights (step 6).
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import check_close, gradients, random_ids, tiny_config, tiny_model
from torch import Tensor

from model.qwen2 import MLP, Qwen2

LAYER = [f"self_attn.{name}_proj.{part}" for name in "qkv" for part in ("weight", "bias")]
LAYER += [f"{name}.weight" for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
LAYER += ["input_layernorm.weight", "post_attention_layernorm.weight"]
IDS = random_ids(2, 9)


def plain_logits(model: Qwen2, ids: Tensor) -> Tensor:
    """The same decoder from torch's parts, for rows without padding: repeated heads, complex rotation, no cache."""
    w, c = model.state_dict(), model.config
    angles = torch.arange(ids.shape[1])[:, None] / c.rope_theta ** (torch.arange(0, c.head_dim, 2) / c.head_dim)
    turns = torch.polar(torch.ones_like(angles), angles)  # (T, E/2)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name + ".weight"], c.rms_norm_eps)

    def heads(x: Tensor, name: str) -> Tensor:  # (B, T, D) -> (B, H, T, E), key/value heads repeated
        split = F.linear(x, w[name + ".weight"], w[name + ".bias"]).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        return split.repeat_interleave(c.num_attention_heads // split.shape[1], dim=1)

    def turned(x: Tensor) -> Tensor:
        z = torch.complex(*x.chunk(2, dim=-1)) * turns
        return torch.cat([z.real, z.imag], dim=-1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(c.num_hidden_layers):
        layer, h = f"model.layers.{i}.", norm(x, f"model.layers.{i}.input_layernorm")
        q, k, v = (heads(h, f"{layer}self_attn.{name}_proj") for name in "qkv")
        out = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + out @ w[layer + "self_attn.o_proj.weight"].T
        h = norm(x, layer + "post_attention_layernorm")
        gate, up, down = (w[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
    return norm(x, "model.norm") @ w["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"].T


def split_logits(model: Qwen2, split: int) -> Tensor:
    """Logits of the tokens from `split` on, as rows that branch from the tokens before."""
    cache = model.prefill(IDS[:, :split], torch.tensor([split, split]))
    hidden = model.extend(IDS[:, split:], torch.arange(split, 9).expand(2, -1), cache, torch.tensor([0, 1]))
    return model.logits(hidden)


# --- worked numbers ---


def test_worked_mlp():
    """x = 1, gate 1, up 2, down 3: silu(1) = 1 / (1 + e^-1) = .7311, times 2, times 3: 4.3864."""
    mlp = MLP(tiny_config(hidden_size=1, intermediate_size=1))
    for layer, value in ((mlp.gate_proj, 1.0), (mlp.up_proj, 2.0), (mlp.down_proj, 3.0)):
        torch.nn.init.constant_(layer.weight, value)
    check_close(mlp(torch.ones(1, 1, 1)), [[[4.3864]]], "down(silu(gate(x)) * up(x)): silu is for gate only", 1e-4)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_parameters_have_hugging_faces_names(tied):
    names = {f"model.layers.{i}.{name}" for i in range(2) for name in LAYER}
    names |= {"model.embed_tokens.weight", "model.norm.weight"} | (set() if tied else {"lm_head.weight"})
    assert set(tiny_model(tie_word_embeddings=tied).state_dict()) == names


# --- the obvious version ---

KINDS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one key/value head for all": {"num_key_value_heads": 1},
    "a key/value head for each": {"num_key_value_heads": 4},
    "heads wider than the model": {"head_dim": 12, "rope_theta": 1e6},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_equals_the_decoder_built_from_torchs_parts(changes):
    model = tiny_model(**changes)
    logits = model(IDS)
    assert logits.shape == (2, 9, 48)
    check_close(logits, plain_logits(model, IDS), "x + attention(norm(x)), x + mlp(norm(x)), norm, head", 1e-4, 1e-4)


# --- properties ---


def test_a_tied_head_and_the_embedding_share_one_gradient():
    """What arrives at the tied matrix is what arrives at both matrices of an untied copy, added."""
    tied, untied = tiny_model(), tiny_model(tie_word_embeddings=False)
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.model.embed_tokens.weight})
    ours, theirs = (gradients(m, lambda m=m: m(IDS).log_softmax(dim=-1)[..., 3].sum()) for m in (tied, untied))
    assert theirs["lm_head.weight"].any()
    both = theirs["model.embed_tokens.weight"] + theirs["lm_head.weight"]
    check_close(ours["model.embed_tokens.weight"], both, "the embedding is the head: one parameter", 1e-4, 1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_equals_the_row_alone(side):
    model = tiny_model()
    keep = slice(4, 9) if side == "left" else slice(0, 5)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1], mask[1, keep] = 0, 1
    logits = model(IDS, mask)
    alone = model(IDS[1:, keep])[0]
    check_close(logits[1, keep], alone, "positions count real tokens, padding is not seen", 1e-4, 1e-4)
    check_close(logits[0], model(IDS[:1])[0], "the row that has no padding", 1e-4, 1e-4)


@pytest.mark.parametrize("split", [0, 1, 5, 8])
def test_prefill_and_extend_equal_one_forward(split):
    model, hint = tiny_model(), "keys are kept after the rotation; positions count on"
    check_close(split_logits(model, split), model(IDS)[:, split:], hint, 1e-4, 1e-4)


@pytest.mark.parametrize("split", [0, 4], ids=["plain rows", "a tree"])
def test_gradient_checkpointing_recomputes_and_changes_no_number(split):
    model, calls = tiny_model(), []
    model.model.layers[1].register_forward_pre_hook(lambda *_: calls.append(1))  # a prefill leaves the last layer out

    def loss() -> Tensor:
        logits = model(IDS) if split == 0 else split_logits(model, split)
        return logits.log_softmax(dim=-1)[..., 3].sum()

    plain = gradients(model, loss)
    assert len(calls) == 1
    model.gradient_checkpointing = True
    recomputed = gradients(model, loss)
    assert len(calls) == 3  # forward, and again in the backward pass
    assert all(gradient.any() and torch.equal(recomputed[name], gradient) for name, gradient in plain.items())


def test_random_initialisation_is_fixed_by_its_generator():
    first, second = Qwen2(tiny_config()), Qwen2(tiny_config())
    for model in (first, second):
        model.init_weights(torch.Generator().manual_seed(3), std=0.5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    for name, parameter in first.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
        else:
            assert 0.4 < parameter.std() < 0.6, name
