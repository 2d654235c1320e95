"""Step 1: RMSNorm, the layer before every layer.

Built here: model/qwen2.py `RMSNorm`.
Equation: y = x / sqrt(mean(x^2) + eps) * weight, the mean over the last axis and in float32 (arXiv:1910.07467, eq. 4).
Run: pytest tests/test_01_rms_norm.py
Later steps need it: every block of the decoder (step 5) normalises twice.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import check_close, tiny_model

from model.qwen2 import RMSNorm


def make(weight: list[float], eps: float = 0.0) -> RMSNorm:
    norm = RMSNorm(len(weight), eps)
    norm.weight.data = torch.tensor(weight)
    return norm


# --- worked numbers ---


def test_worked_numbers():
    """x = (3, 4): mean of squares (9 + 16) / 2 = 12.5, root 3.5355; 3 / 3.5355 = .8485, 4 / 3.5355 = 1.1314."""
    x = torch.tensor([3.0, 4.0])
    check_close(make([1.0, 1.0])(x), [0.8485, 1.1314], "the mean of the squares, not their sum", atol=1e-4)
    check_close(make([2.0, -10.0])(x), [1.6971, -11.3137], "multiply by the weight, element by element", atol=1e-4)


def test_eps_stands_inside_the_root():
    """x = (1, 1) / 1000 and eps = 1e-6: the root is sqrt(1e-6 + 1e-6) = 1.414e-3, so x becomes 1 / sqrt(2) = .7071.

    Outside the root, eps would hardly show: 1e-3 / (1e-3 + 1e-6) = .9990.
    """
    check_close(make([1.0, 1.0], eps=1e-6)(torch.full((2,), 1e-3)), [0.7071, 0.7071], "mean + eps, then the root", 1e-4)


# --- a slow, obvious version, and torch's own ---


def test_equals_a_loop_over_rows_and_numbers():
    norm, x = make(torch.randn(5).tolist(), eps=0.1), torch.randn(2, 3, 5)
    expected = torch.zeros_like(x)
    for i in range(2):
        for j in range(3):
            row = x[i, j].tolist()
            root = math.sqrt(sum(value * value for value in row) / len(row) + 0.1)
            expected[i, j] = torch.tensor([v / root * w for v, w in zip(row, norm.weight.tolist(), strict=True)])
    check_close(norm(x), expected, "one mean for each row: over the last axis only")


def test_values_and_gradients_equal_torch():
    norm, x = make(torch.randn(16).tolist(), eps=1e-3), torch.randn(4, 16, requires_grad=True)
    upstream = torch.randn(4, 16)
    ours = torch.autograd.grad((norm(x) * upstream).sum(), (x, norm.weight))
    theirs = torch.autograd.grad((F.rms_norm(x, (16,), norm.weight, 1e-3) * upstream).sum(), (x, norm.weight))
    for actual, expected in zip(ours, theirs, strict=True):
        check_close(actual, expected, "the root depends on x: nothing may be detached")


# --- properties ---


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_the_scale_of_the_input_does_not_matter(factor):
    norm, x = make([1.0, 2.0, 3.0]), torch.randn(4, 3)
    check_close(norm(factor * x), norm(x), "divide by the root of the mean square")


def test_the_mean_is_not_subtracted():
    """LayerNorm would turn a constant row into zeros; here (5, 5) becomes (1, 1)."""
    check_close(make([1.0, 1.0])(torch.tensor([5.0, 5.0])), [1.0, 1.0], "no mean is subtracted and no bias is added")


def test_every_norm_of_the_decoder_takes_eps_from_the_config():
    norms = [m for m in tiny_model(rms_norm_eps=0.25).modules() if isinstance(m, RMSNorm)]
    assert [norm.eps for norm in norms] == [0.25] * 5  # two a layer, and the last


# --- edges ---


def test_a_row_of_zeros_gives_zeros_and_finite_gradients():
    norm, x = make([1.0, 1.0], eps=1e-6), torch.zeros(1, 2, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.tolist() == [[0.0, 0.0]]
    assert x.grad.isfinite().all()


def test_half_precision_squares_in_float32():
    """300^2 = 90,000 overflows float16 (largest 65,504): in half precision the result would be 0."""
    y = make([1.0, 1.0])(torch.tensor([300.0, 400.0], dtype=torch.float16))
    check_close(y, torch.tensor([0.8485, 1.1314]), "x.float() before the square", atol=1e-3)


def test_the_dtype_stays_and_the_rounding_is_that_of_hugging_face():
    """Rounded to bfloat16 before the weight is applied: the other order differs in the last bit here and there."""
    norm, x = make(torch.randn(64).tolist(), eps=1e-6).bfloat16(), torch.randn(8, 64).bfloat16()
    normed = F.rms_norm(x.float(), (64,), None, 1e-6).bfloat16()
    check_close(norm(x), norm.weight * normed, "weight * normed.to(x.dtype)", rtol=0, atol=0)
