"""LoRA (arXiv:2106.09685 eq. 3): y = W x + b + scaling * B A x, with W frozen and scaling = alpha / r.

    x --+--> W (frozen, any dtype) -----------+--> y
        +--> A (R, in) --> B (out, R) --> * s-+        B starts at zero: the adapter starts as no change at all

A linear layer is replaced by a subclass that adds `lora_A` and `lora_B`, so every other tensor keeps its Hugging Face
name. A and B are float32 whatever the base dtype: at a learning rate of 1e-6 a bfloat16 parameter near 0.01 does not
move at all. There is no dropout: the policy that is scored must be the policy that was sampled.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LINEAR_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # "all-linear" in PEFT


class LoRALinear(nn.Linear):
    """A frozen linear layer with a trainable low-rank difference."""

    def __init__(self, base: nn.Linear, r: int, scaling: float, generator: torch.Generator | None = None):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.requires_grad_(False)
        # Uniform in +-1/sqrt(in), which is what kaiming_uniform_(a=sqrt(5)), PEFT's choice, comes to.
        lora_A = (torch.rand(r, self.in_features, generator=generator) * 2 - 1) * (1 / math.sqrt(self.in_features))
        self.lora_A = nn.Parameter(lora_A.to(base.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, r, device=base.weight.device))
        self.scaling, self.enabled = scaling, True

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) in x's dtype."""
        y = super().forward(x)
        if not self.enabled:
            return y
        # Sampling (inference mode) computes in the base's dtype, which is faster. It does not merge: a weight in
        # bfloat16 has three digits, and would round what a small learning rate has changed back to what it was.
        dtype = y.dtype if torch.is_inference_mode_enabled() else self.lora_A.dtype
        narrow = F.linear(x.to(dtype), self.lora_A.to(dtype)) * self.scaling  # (..., R), where scaling costs least
        return y + F.linear(narrow, self.lora_B.to(dtype)).to(y.dtype)

    def merged_weight(self) -> Tensor:
        """W + scaling * B A in W's dtype, (out, in)."""
        return (self.weight.float() + self.scaling * self.lora_B @ self.lora_A).to(self.weight.dtype)


def add_lora(
    model: nn.Module,
    r: int,
    alpha: float,
    target_modules: tuple[str, ...] | list[str] = LINEAR_NAMES,
    rslora: bool = False,
    generator: torch.Generator | None = None,
) -> None:
    """Freeze the model and give every linear layer that is named in `target_modules` an adapter, in place.

    The scaling is alpha / r, with `rslora` alpha / sqrt(r) (arXiv:2312.03732). The generator is for A; B is zero.
    Example: r = 8, alpha = 16 gives the scaling 2; a (64, 32) layer gains 8 * 32 + 64 * 8 = 768 parameters.
    """
    if any(lora_modules(model)):
        raise ValueError("the model already has a LoRA adapter; merge it (merge_lora) before adding another")
    unknown = sorted(set(target_modules) - set(LINEAR_NAMES))
    if unknown or not target_modules:
        expected = f"no linear layer named {unknown}; expected some of {', '.join(LINEAR_NAMES)}"
        raise ValueError(f"lora_target_modules = {list(target_modules)}: {expected}")
    model.requires_grad_(False)
    scaling = alpha / math.sqrt(r) if rslora else alpha / r
    for name, module in list(model.named_modules()):
        if name.rsplit(".", 1)[-1] in target_modules:
            model.set_submodule(name, LoRALinear(module, r, scaling, generator))


def lora_modules(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """The adapted layers by module name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear))


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by full name."""
    return {name: p for name, p in model.named_parameters() if name.endswith(("lora_A", "lora_B"))}


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """The base model inside the `with`: the reference policy of a run whose adapter started at zero."""
    for _, layer in lora_modules(model):
        layer.enabled = False
    try:
        yield
    finally:
        for _, layer in lora_modules(model):
            layer.enabled = True


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Fold every adapter into its base weight, in place: plain layers again, and every parameter trainable."""
    for name, layer in list(lora_modules(model)):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = nn.Parameter(layer.merged_weight()), layer.bias
        model.set_submodule(name, plain)
    model.requires_grad_(True)
