"""What the model's tests share: a tiny decoder in which every number matters, and a comparison that gives a hint."""

from collections.abc import Callable

import torch
from torch import Tensor

from model.config import Qwen2Config
from model.qwen2 import Qwen2

SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 1e4}


def tiny_config(**changes) -> Qwen2Config:
    """2 layers, D 32, 4 query heads on 2 key/value heads, V 48; keywords change a size."""
    return Qwen2Config(**SIZES | changes)


def tiny_model(seed: int = 0, **changes) -> Qwen2:
    """A decoder with random biases and norm weights too: with ones and zeros a test cannot see them ignored."""
    model = Qwen2(tiny_config(**changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1))
    return model


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    """Token ids of the tiny vocabulary."""
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def check_close(actual: Tensor, expected, hint: str, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Equal shape, dtype and values (`expected` may be lists); the failure names the worst place and gives the hint."""
    expected = torch.as_tensor(expected, dtype=actual.dtype) if not isinstance(expected, Tensor) else expected
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{text}\nHint: {hint}")


def gradients(model: torch.nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The gradient of `loss()` for every parameter that trains, by name; zeros where none arrives."""
    model.zero_grad(set_to_none=True)
    loss().backward()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}
