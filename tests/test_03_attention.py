"""Step 3: attention of whole rows: grouped heads, causal, padding.

Built here: model/attention.py `attend_rows`, `visible_keys`; write their prompt half too: step 4 checks it.
Equation: softmax(q k^T / sqrt(E)) v over the visible keys (arXiv:1706.03762, eq. 1); query head h reads key/value head
h // (H / K) (arXiv:2305.13245). Visible: real tokens, up to and including the query's own.
Run: pytest tests/test_03_attention.py
Later steps need it: step 4 puts the group's prompt before the row's own keys.
"""

import math

import pytest
import torch
from helpers import check_close
from torch import Tensor

from model.attention import View, attend_rows, visible_keys

B, H, K, T, E = 3, 4, 2, 5, 8
PADDING = {
    "none": [[1, 1, 1, 1, 1]] * 3,
    "right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]],
    "left": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]],
}


def random_qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, T, E), torch.randn(B, K, T, E), torch.randn(B, K, T, E)


def attend(q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    mask = visible_keys(q.shape[2], padding_mask=padding_mask)
    return attend_rows(q, k, v, View(mask=mask), layer=0)


def slow_attention(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """One query of one head at a time, over a list of the keys that it may see; zeros at padding queries."""
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            shared = h // (H // K)
            for t in range(T):
                seen = [s for s in range(t + 1) if real[b, s]]
                if real[b, t]:
                    scores = torch.stack([q[b, h, t] @ k[b, shared, s] / math.sqrt(E) for s in seen])
                    weights = scores.exp() / scores.exp().sum()
                    out[b, h, t] = sum(w * v[b, shared, s] for w, s in zip(weights, seen, strict=True))
    return out


# --- worked numbers ---


def test_worked_numbers():
    """E = 4, so scores are halved. Query 1 = (2 log 3, 0, 0, 0) meets keys (1, 0, 0, 0) and 0: scores log 3 and 0,
    weights 3/4 and 1/4, values 8 and 0: 6. Query 0 sees itself only: 8. Without the halving: 9/10 of 8 = 7.2.
    """
    q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)
    q[0, 0, 1, 0], k[0, 0, 0, 0], v[0, 0, 0, 0] = 2 * math.log(3), 1.0, 8.0
    check_close(attend(q, k, v)[0, 0, :, 0], [8.0, 6.0], "scores are divided by sqrt(E), and a token sees itself")


def test_neighbouring_query_heads_share_a_key_value_head():
    """One token: attention returns its value, so heads 0 1 2 3 give the values of key/value heads 0 0 1 1."""
    v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)
    out = attend(torch.randn(1, 4, 1, 1), torch.randn(1, 2, 1, 1), v)
    check_close(out.flatten(), [10.0, 10.0, 20.0, 20.0], "head h reads key/value head h // (H / K), not h % K")


def test_worked_masks():
    """Without padding there is no mask: plain causality. With it, a padding query sees itself, or it would give NaN."""
    assert visible_keys(3) is None
    right, left = visible_keys(3, padding_mask=torch.tensor([[1, 1, 0], [0, 1, 1]]))[:, 0].int().tolist()
    assert right == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert left == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


# --- a slow, obvious version ---


@pytest.mark.parametrize("padding", PADDING)
def test_equals_a_loop_over_rows_heads_and_queries(padding):
    real = torch.tensor(PADDING[padding])
    q, k, v = random_qkv()
    out = attend(q, k, v, real) * real[:, None, :, None]
    check_close(out, slow_attention(q, k, v, real), f"grouped heads, causal, padding on the side: {padding}")


def test_gradients_equal_those_of_the_loop():
    real, inputs = torch.tensor(PADDING["right"]), [x.requires_grad_() for x in random_qkv()]
    upstream = torch.randn(B, H, T, E) * real[:, None, :, None]
    ours = torch.autograd.grad((attend(*inputs, real) * upstream).sum(), inputs)
    theirs = torch.autograd.grad((slow_attention(*inputs, real) * upstream).sum(), inputs)
    for name, actual, expected in zip("qkv", ours, theirs, strict=True):
        check_close(actual, expected, f"gradient of {name}; heads that share k and v add theirs up", atol=1e-5)


# --- properties ---


def test_a_query_never_sees_a_later_token():
    q, k, v = random_qkv()
    before = attend(q, k, v)
    k[:, :, 3:], v[:, :, 3:] = torch.randn(B, K, 2, E), torch.randn(B, K, 2, E)
    after = attend(q, k, v)
    assert torch.equal(after[:, :, :3], before[:, :, :3])
    assert not torch.isclose(after[:, :, 3:], before[:, :, 3:]).any()


@pytest.mark.parametrize("padding", ["right", "left"])
def test_what_stands_at_padding_does_not_matter(padding):
    real = torch.tensor(PADDING[padding])
    q, k, v = random_qkv()
    before = attend(q, k, v, real)
    for x in (q, k, v):
        x.masked_fill_(real[:, None, :, None] == 0, 1e4)
    kept = real[:, None, :, None].bool().expand_as(before)
    assert torch.equal(attend(q, k, v, real)[kept], before[kept])


def test_no_padding_mask_and_a_mask_of_ones_agree():
    q, k, v = random_qkv()
    check_close(attend(q, k, v, torch.ones(B, T)), attend(q, k, v), "a mask of ones is plain causality")


# --- edges ---


def test_huge_scores_and_rows_of_padding_give_finite_numbers():
    q, k, v = random_qkv()
    out = attend(q * 1e4, k * 1e4, v, torch.tensor([[1] * T, [0] * T, [1] * T]))
    assert out.isfinite().all()
