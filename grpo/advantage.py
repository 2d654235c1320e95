"""Advantages: how much better a completion did than the others of its group. Rewards (Q, G) in, (Q, G) out.

A formula is a plain function of (rewards, info): a name of ADVANTAGES, or "my_file.py:my_fn" for your own. Conventions
in which public code differs silently: the std is unbiased (divides by G - 1) and eps = 1e-4 stands outside the root,
both as in TRL; a group of equal rewards, and a group of one, gets exactly 0.0 (the float32 mean of eight 0.7 is not
0.7, and dividing that rounding noise by a tiny std would train on it).

    python -m grpo.advantage my_file.py:my_fn     which properties your formula has; it may lack some on purpose
"""

import difflib
import inspect
import runpy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

EPS = 1e-4
TABLE = torch.tensor([[1.2, 0.0, 0.3, 0.2], [0.0, 1.0, 1.0, 0.1]])  # the rewards that formulas are tried on
PARTS = ("correct", "executes", "format", "exact")  # of the default reward
Advantage = Callable[..., Tensor]


@dataclass(frozen=True)
class AdvantageInfo:
    """What a formula may look at besides the total rewards; every tensor is (Q, G)."""

    lengths: Tensor  # completion lengths, tokens
    truncated: Tensor  # bool, cut at max_completion_length
    parts: dict[str, Tensor] = field(default_factory=dict)  # unweighted reward parts by name


def centered(rewards: Tensor) -> Tensor:
    """r - mean of its group, and exactly 0.0 where all rewards of the group are equal. Example: [1, 0] -> [.5, -.5]"""
    flat = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return (rewards - rewards.mean(dim=1, keepdim=True)).masked_fill(flat, 0.0)


def grpo(rewards: Tensor, info: AdvantageInfo | None = None) -> Tensor:
    """(r - m) / (s + eps), m and s of the group (2402.03300, section 4.1.2). Example: [1, 0] -> +-.5 / (.7071 + eps)"""
    spread = centered(rewards)
    std = (spread.square().sum(dim=1, keepdim=True) / max(rewards.shape[1] - 1, 1)).sqrt()
    return spread / (std + EPS)


def dr_grpo(rewards: Tensor, info: AdvantageInfo | None = None) -> Tensor:
    """r - m: no std, which favours questions of extreme difficulty (2503.20783). Example: [1, 0] -> [.5, -.5]"""
    return centered(rewards)


def batch(rewards: Tensor, info: AdvantageInfo | None = None) -> Tensor:
    """(r - m) / (s + eps), s of the whole step (2508.08221). Example: [[1, 0], [0, 0]] -> s = .5 -> +-.9998, 0"""
    std = ((rewards - rewards.mean()).square().sum() / max(rewards.numel() - 1, 1)).sqrt()
    return centered(rewards) / (std + EPS)  # TRL's scale_rewards="batch"; the step's mean is not subtracted as well


def rloo(rewards: Tensor, info: AdvantageInfo | None = None) -> Tensor:
    """r - mean of the others = G / (G - 1) (r - m) (2402.14740, leave one out). Example: [1, 0] -> [1, -1]"""
    size = rewards.shape[1]
    return centered(rewards) * size / max(size - 1, 1)


def maxrl(rewards: Tensor, info: AdvantageInfo | None = None) -> Tensor:
    """(r - m) / (m + eps): rare success, large step (2602.02710). Example: [1, 0, 0, 0] -> [3, -1, -1, -1] x .9996

    Raises ValueError below 0, "expected rewards >= 0".
    """
    if (rewards < 0).any():
        raise ValueError('advantage "maxrl" divides by the mean reward; expected rewards >= 0')
    return centered(rewards) / (rewards.mean(dim=1, keepdim=True) + EPS)


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "batch": batch, "rloo": rloo, "maxrl": maxrl}


def load_function(spec: str, arguments: str = "rewards, info") -> Callable:
    """Run the file of "my_file.py:my_fn" (from the current directory): its function, or ValueError saying why not."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f'"{spec}": no file "{path}" (current directory: {Path.cwd()}); expected my_file.py:my_fn')
    try:
        values = runpy.run_path(path)
    except Exception as error:
        raise ValueError(f'"{spec}": the file failed with {type(error).__name__}: {error}') from error
    function = values.get(name)
    if not callable(function):
        found = [key for key, value in values.items() if inspect.isfunction(value)]
        raise ValueError(f'"{spec}": no function "{name}" in {path}; found: {", ".join(found) or "none"}')
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError:
        raise ValueError(f'"{spec}": takes {inspect.signature(function)}; expected ({arguments})') from None
    return function


def compute_advantages(rewards: Tensor, spec: str | Advantage, info: AdvantageInfo | None = None) -> Tensor:
    """Advantages (Q, G) of rewards (Q, G). `spec`: a name of ADVANTAGES, "my_file.py:my_fn", or the function itself.

    Raises ValueError naming the function if it fails, or if its result is not a finite float tensor of that shape.
    Example: [[1, 0]], "rloo" -> [[1, -1]]
    """
    if rewards.dim() != 2 or not rewards.isfinite().all():
        raise ValueError(f"rewards of shape {tuple(rewards.shape)}; expected finite numbers, (questions, completions)")
    function = _find(spec)
    name = f'advantage "{spec if isinstance(spec, str) else getattr(spec, "__name__", repr(spec))}"'
    try:
        with torch.no_grad():
            advantages = function(rewards.float().clone(), info)  # a clone: formulas may write in place
    except Exception as error:
        raise ValueError(f"{name} failed with {type(error).__name__}: {error}") from error
    if not isinstance(advantages, Tensor) or advantages.shape != rewards.shape:
        got = f"shape {tuple(advantages.shape)}" if isinstance(advantages, Tensor) else f"a {type(advantages).__name__}"
        raise ValueError(f"{name} returned {got}; expected {tuple(rewards.shape)} (questions, completions)")
    if not advantages.is_floating_point() or not advantages.isfinite().all() or advantages.requires_grad:
        got = f"{advantages.dtype}, finite: {bool(advantages.isfinite().all())}, gradient: {advantages.requires_grad}"
        raise ValueError(f"{name} returned {got}; expected finite floats without gradient")
    return advantages.float()


def check_advantage(spec: str | Advantage, parts: Iterable[str] = PARTS) -> Advantage:
    """The formula as a function, after a dry run on a fixed (2, 4) table, so that a mistake fails at start-up.

    parts: names of the reward's parts. Groups of equal rewards come in every run, so they are tried as well.
    """
    function = _find(spec)
    compute_advantages(TABLE, function, _table_info(parts=parts))
    try:
        compute_advantages(torch.ones_like(TABLE), function, _table_info(parts=parts))
    except ValueError as error:
        raise ValueError(f"{error}; tried on groups of equal rewards, whose std is 0") from None
    return function


def _find(spec: str | Advantage) -> Advantage:
    if not isinstance(spec, str):
        return spec
    if ":" in spec:
        return load_function(spec)
    if spec not in ADVANTAGES:
        near = difflib.get_close_matches(spec, ADVANTAGES, n=1) or [" or ".join(ADVANTAGES)]
        raise ValueError(f'unknown advantage "{spec}"; did you mean {near[0]}? (your own: my_file.py:my_fn)')
    return ADVANTAGES[spec]


def _table_info(columns: tuple[int, ...] = (0, 1, 2, 3), parts: Iterable[str] = PARTS) -> AdvantageInfo:
    lengths = torch.tensor([[9, 30, 12, 20], [8, 15, 7, 40]])[:, columns]
    return AdvantageInfo(lengths, lengths == 40, {name: (TABLE[:, columns] >= 1).float() for name in parts})


def contract(spec: str | Advantage) -> list[str]:
    """One line per property of a formula on a small table. Only shape and finiteness are required (ValueError)."""
    base, order = compute_advantages(TABLE, spec, _table_info()), (2, 0, 3, 1)
    noise = compute_advantages(torch.full((2, 8), 0.7), spec, _table_info((0, 1, 2, 3) * 2)).abs().max()

    def outcome(rewards: Tensor, expected: dict[str, Tensor], columns: tuple[int, ...] = (0, 1, 2, 3)) -> str:
        try:
            actual = compute_advantages(rewards, spec, _table_info(columns))
        except ValueError as error:
            return f"fails: {error}"
        # 2e-3: the eps of a denominator does not count as a dependence on scale.
        return next((word for word, table in expected.items() if torch.allclose(actual, table, atol=2e-3)), "no")

    results = {
        "(Q, G), finite floats": "yes",
        "equal rewards give exactly 0": "yes" if noise == 0 else f"no, up to {noise:.2g}",
        "sums to 0 in every group": "yes" if base.sum(dim=1).abs().max() < 1e-4 else "no",
        "follows a permutation of the group": outcome(TABLE[:, order], {"yes": base[:, order]}, order),
        "adding 1 to every reward changes nothing": outcome(TABLE + 1, {"yes": base}),
        "doubling every reward": outcome(TABLE * 2, {"changes nothing": base, "doubles it": base * 2}),
    }
    return [f"{name:<45}{result}" for name, result in results.items()]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m grpo.advantage my_file.py:my_fn")
    try:
        print("\n".join(contract(sys.argv[1])))
    except ValueError as failure:
        sys.exit(str(failure))
