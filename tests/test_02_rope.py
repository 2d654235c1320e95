"""Step 2: rotary positions.

Built here: model/qwen2.py `rotary_angles`, `rotate`.
Equation: pair i of a head turns by angle = position / theta^(2i/E): (x, y) -> (x cos - y sin, y cos + x sin)
(arXiv:2104.09864, eq. 34). Pair i is (x[i], x[i + E/2]): Hugging Face's checkpoints want halves, not neighbours.
Run: pytest tests/test_02_rope.py
Later steps need it: queries and keys are turned before they meet (step 3); completions count on from their prompt (4).
"""

import cmath
import math

import pytest
import torch
from helpers import check_close, tiny_config

from model.qwen2 import rotary_angles, rotate


def angles_at(positions: list[list[int]], head_dim: int = 8, theta: float = 1e4):
    return rotary_angles(torch.tensor(positions), tiny_config(head_dim=head_dim, rope_theta=theta))


def by_angles(*angles: float):
    """The (cos, sin) pair of given angles for one position."""
    angles = torch.tensor(angles).view(1, 1, 1, -1)
    return angles.cos(), angles.sin()


def at(x: torch.Tensor, position: int) -> torch.Tensor:
    """A vector (E,), turned as at a position."""
    return rotate(x.view(1, 1, 1, -1), angles_at([[position]]))[0, 0, 0]


# --- worked numbers ---


def test_worked_angles():
    """E = 4, theta = 10,000: pair 0 turns by position / 10000^0, pair 1 by position / 10000^(2/4) = position / 100."""
    cos, sin = angles_at([[0, 1, 50]], head_dim=4)
    expected = torch.tensor([[0.0, 0.0], [1.0, 0.01], [50.0, 0.5]])
    assert cos.shape == sin.shape == (1, 1, 3, 2)
    check_close(cos[0, 0], expected.cos(), "angle = position / theta^(2i/E)")
    check_close(sin[0, 0], expected.sin(), "angle = position / theta^(2i/E)")


def test_worked_turn_by_a_right_angle():
    """Counter-clockwise: (1, 0) at 90 degrees is (0, 1), and (0, 1) is (-1, 0)."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).view(1, 2, 1, 2)  # two heads
    turned = rotate(x, by_angles(math.pi / 2)).view(2, 2)
    check_close(turned, [[0.0, 1.0], [-1.0, 0.0]], "the sign of the sine: x cos - y sin, y cos + x sin")


def test_a_pair_is_one_number_of_each_half():
    """(1, 2, 3, 4): pairs (1, 3) and (2, 4). The first turns by 90 degrees to (-3, 1), the second not at all."""
    turned = rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4), by_angles(math.pi / 2, 0.0))
    check_close(turned.flatten(), [-3.0, 2.0, 1.0, 4.0], "split halves (x[i], x[i + E/2]), not neighbours")


# --- a slow, obvious version ---


def test_equals_a_product_of_complex_numbers():
    """Turning (x, y) by an angle is multiplying x + iy by e^(i angle)."""
    x, positions = torch.randn(2, 3, 4, 8), [[0, 1, 2, 3], [7, 8, 9, 100]]
    expected = torch.zeros_like(x)
    for b in range(2):
        for head in range(3):
            for t in range(4):
                for i in range(4):
                    z = complex(x[b, head, t, i], x[b, head, t, i + 4])
                    z *= cmath.exp(1j * positions[b][t] / 1e4 ** (2 * i / 8))
                    expected[b, head, t, i], expected[b, head, t, i + 4] = z.real, z.imag
    check_close(rotate(x, angles_at(positions)), expected, "each row has its own positions", atol=1e-5)


# --- properties ---


def test_position_zero_turns_nothing():
    x = torch.randn(8)
    assert torch.equal(at(x, 0), x)


def test_lengths_do_not_change():
    x = torch.randn(8)
    check_close(at(x, 123).norm(), x.norm(), "cos^2 + sin^2 = 1: one and the same angle for both numbers of a pair")


def test_turns_add_up():
    x = torch.randn(8)
    check_close(at(at(x, 3), 4), at(x, 7), "angles are proportional to positions", atol=1e-5)


def test_scores_depend_on_the_distance_only():
    """Why it works: q at m times k at n depends on m - n, so a prompt may start anywhere."""
    q, k = torch.randn(8), torch.randn(8)
    check_close(at(q, 9) @ at(k, 4), at(q, 105) @ at(k, 100), "turn q and k the same way", atol=1e-4)
    assert not torch.isclose(at(q, 9) @ at(k, 4), at(q, 9) @ at(k, 5))


@pytest.mark.parametrize(("theta", "angle"), [(1e4, 1e-2), (1e6, 1e-3)])
def test_theta_comes_from_the_config(theta, angle):
    """E = 4: theta^(2/4) is 100 for the usual theta and 1000 for Qwen2.5's, which is 1,000,000."""
    check_close(angles_at([[1]], head_dim=4, theta=theta)[1][0, 0, 0, 1], math.sin(angle), "config.rope_theta")


# --- edges ---


def test_far_positions_keep_their_angle():
    """At position 32,767 a float32 angle is off by up to 32767 * 2^-24 = .002; a half-precision one is meaningless."""
    cos, _ = angles_at([[32_767]])
    exact = torch.tensor([math.cos(32_767 / 1e4 ** (2 * i / 8)) for i in range(4)])
    check_close(cos[0, 0, 0], exact, "angles in float32", rtol=0, atol=5e-3)


def test_angles_are_float32_and_the_turned_vector_keeps_its_dtype():
    rotary = angles_at([[5]])
    x = torch.randn(1, 1, 1, 8, dtype=torch.bfloat16)
    assert rotary[0].dtype == rotary[1].dtype == torch.float32
    assert rotate(x, rotary).dtype == torch.bfloat16
