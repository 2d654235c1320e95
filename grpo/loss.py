"""The GRPO loss and its relatives: per-token log-probabilities in, one number out.

With the ratio rho = pi / pi_old of a token and the advantage A of its row (GRPO, arXiv 2402.03300, eq. 3):

    token loss = -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) + beta rho k3

How token losses are averaged is `loss_type`; |o_i| tokens in row i, N rows, L = max_completion_length:

    grpo     sum_i (1/|o_i|) sum_t / N        every row weighs the same
    dapo     sum_i sum_t / sum_i |o_i|        every token of the step weighs the same (2503.14476; TRL's default)
    dr_grpo  sum_i sum_t / (N L)              a constant, so that length has no influence (2503.20783)
    bnpo     dapo over one micro-batch: by definition not invariant to the split
    cispo    as dapo, with token loss -sg(min(rho, epsilon_high)) A log pi (2506.13585); epsilon_high is absolute

Equal to TRL 1.16, but: exponents stop at MAX_LOG_RATIO, where TRL has inf forward and NaN backward; positions under
mask 0 may hold anything, NaN included; sequence-level clip shares leave out empty rows. A fully masked (truncated) row
still counts as a row, as in TRL.
"""

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is far outside any clip range; beyond, the value stays and the gradient is zero
Pair = tuple[Tensor, Tensor]  # (sum, count): both add over micro-batches, so that their quotient is the step's mean


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_estimator: Literal["k1", "k2", "k3"] = "k3",
    use_bias_correction_kl: bool = True,
    loss_type: Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo"] = "dapo",
    importance_sampling_level: Literal["token", "sequence"] = "token",
    sampling_logprobs: Tensor | None = None,
    importance_sampling_cap: float = 0.0,
    max_completion_length: int | None = None,
    normalizer: float | None = None,
) -> tuple[Tensor, dict[str, Pair]]:
    """The loss of a micro-batch, and its statistics as detached (sum, count) pairs under TRL's metric names.

    Args:
        logprobs: of the policy at the sampling temperature, nats, (B, S), with gradient; float32 inside.
        old_logprobs: (B, S), frozen before the updates; None: on-policy, rho = 1 and the gradient is -A grad log pi.
        advantages: (B,). mask: (B, S), true where a completion token counts.
        delta: cap of rho where A < 0 (two-sided clipping, 2505.07291). epsilon_high: None = epsilon.
        beta, ref_logprobs (B, S), kl_estimator, use_bias_correction_kl (times rho): see `kl_estimate`.
        importance_sampling_level: "sequence": one rho a row, exp(mean over tokens of log rho) (GSPO, 2507.18071).
        sampling_logprobs: the sampler's, (B, S), logged against the old ones; if importance_sampling_cap > 0, token
            losses are also weighted by min(pi_old / pi_sampler, cap), without gradient (truncated importance sampling).
        normalizer: `loss_normalizer` of the whole step, which makes micro-batch losses add up; None: of this batch.
    Raises: ValueError for a wrong shape or choice, or an argument that a choice needs.
    Example: one row, A = 1, rho = (1.5, 0.5), epsilon 0.2 -> -(1.2 + 0.5) / 2 = -0.85; clip_ratio/region_mean (1, 2)
    """
    mask = _checked(mask, logprobs, "mask").bool()
    logp = _clean(logprobs, logprobs, mask, "logprobs")
    old = logp.detach() if old_logprobs is None else _clean(old_logprobs, logprobs, mask, "old_logprobs").detach()
    advantage = _checked(advantages, logprobs[:, 0], "advantages").float().unsqueeze(1)  # (B, 1)

    log_ratio = logp - old
    if importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
    elif importance_sampling_level != "token":
        raise ValueError(f'importance_sampling_level = "{importance_sampling_level}"; expected token or sequence')
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()  # (B, S) or (B, 1), as everything made from it
    counted = mask if importance_sampling_level == "token" else mask.any(1, keepdim=True)
    if loss_type == "cispo":
        token_loss, clipped = _cispo(ratio, logp, advantage, epsilon_high)
    else:
        high = epsilon if epsilon_high is None else epsilon_high
        token_loss, clipped = _clipped(ratio, advantage, epsilon, high, delta)
    stats = {name: _pair(share, counted) for name, share in clipped.items()}
    if sampling_logprobs is not None:
        drift = old - _clean(sampling_logprobs, logprobs, mask, "sampling_logprobs").detach()
        weight = drift.clamp(max=MAX_LOG_RATIO).exp()
        token_loss = token_loss * (weight.clamp(max=importance_sampling_cap) if importance_sampling_cap else 1)
        stats["sampling/sampling_logp_difference/mean"] = _pair(drift.abs(), mask)
        stats["sampling/importance_sampling_ratio/mean"] = _pair(weight, mask)
    if beta:
        if ref_logprobs is None:
            raise ValueError(f"beta = {beta} needs ref_logprobs, the reference policy's log-probabilities")
        kl = kl_estimate(logp, _clean(ref_logprobs, logprobs, mask, "ref_logprobs").detach(), kl_estimator)
        kl = kl * ratio if use_bias_correction_kl else kl
        token_loss = token_loss + beta * kl
        stats["kl"] = _pair(kl, mask)
    loss, share = _average(token_loss, mask, loss_type, max_completion_length, normalizer)
    return loss, stats | {"loss": (loss.detach(), share)}


def loss_normalizer(loss_type: str, rows: int | Tensor, tokens: int | Tensor) -> int | Tensor:
    """What a step's loss is divided by: its rows, or its unmasked tokens. Pass it to `policy_loss` as `normalizer`.

    dr_grpo multiplies it by max_completion_length; bnpo ignores it (weight each of n micro-batches by 1 / n).
    Example: rows of 3 and 1 tokens: grpo and dr_grpo -> 2; dapo, cispo and bnpo -> 4
    """
    return rows if loss_type in ("grpo", "dr_grpo") else tokens


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """Per-token estimate of KL(pi || ref), nats, not masked (Schulman, joschu.net/blog/kl-approx).

    With d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. All but k2 have the right mean, but as a loss
    on samples of pi their gradients are, in expectation: k1 zero (no regularisation at all), k2 that of KL(pi || ref),
    k3 that of KL(ref || pi), and rho k3 that of KL(pi || ref) again (2512.02556; TRL's default since 1.16).
    Example: d = log 2 -> k1 0.6931, k2 0.2402, k3 0.5 + 0.6931 - 1 = 0.1931
    """
    d = logprobs - ref_logprobs
    bounded = d.clamp(min=-MAX_LOG_RATIO)
    estimates = {"k1": d, "k2": d.square() / 2, "k3": (-bounded).exp() + bounded - 1}
    if estimator not in estimates:
        raise ValueError(f'kl_estimator = "{estimator}"; expected k1, k2 or k3')
    return estimates[estimator]


def _clipped(ratio: Tensor, advantage: Tensor, low: float, high: float, delta: float | None) -> tuple[Tensor, dict]:
    """PPO's pessimistic surrogate: the minimum, for both signs of A, takes away the profit of moving far."""
    capped = ratio if delta is None else ratio.clamp(max=delta)
    token_loss = -torch.min(capped * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    is_low, is_high = (ratio < 1 - low) & (advantage < 0), (ratio > 1 + high) & (advantage > 0)
    shares = {"low_mean": is_low, "high_mean": is_high, "region_mean": is_low | is_high}
    return token_loss, {f"clip_ratio/{name}": share for name, share in shares.items()}


def _cispo(ratio: Tensor, logp: Tensor, advantage: Tensor, cap: float | None) -> tuple[Tensor, dict]:
    """REINFORCE with a capped weight: a token far away is weighted less, but keeps its gradient."""
    if cap is None:
        raise ValueError('loss_type = "cispo" needs epsilon_high, the absolute cap of the ratio, such as 5.0')
    token_loss = -ratio.clamp(max=cap).detach() * advantage * logp
    return token_loss, {"cispo_clip_ratio": (ratio > cap) & (advantage > 0)}


def _average(token_loss: Tensor, mask: Tensor, loss_type: str, length: int | None, normalizer: float | None) -> Pair:
    """The averaged loss, and this batch's share of the normaliser (the shares of a step add up to one)."""
    if loss_type not in ("grpo", "dapo", "bnpo", "dr_grpo", "cispo"):
        raise ValueError(f'loss_type = "{loss_type}"; expected grpo, dapo, bnpo, dr_grpo or cispo')
    if loss_type == "dr_grpo" and not length:
        raise ValueError('loss_type = "dr_grpo" divides by max_completion_length; expected a number of tokens')
    per_row = (token_loss * mask).sum(1)  # a (B, 1) token loss counts once per token of its row
    if loss_type == "grpo":
        per_row = per_row / mask.sum(1).clamp(min=1)
    own = torch.as_tensor(loss_normalizer(loss_type, len(mask), mask.sum()), device=mask.device)
    total = own if normalizer is None or loss_type == "bnpo" else torch.as_tensor(normalizer, device=mask.device)
    loss = per_row.sum() / (total.clamp(min=1) * (length if loss_type == "dr_grpo" else 1))
    return loss, own / total.clamp(min=1)


def _pair(values: Tensor, counted: Tensor) -> Pair:
    return (values.detach().float() * counted).sum(), counted.sum()


def _clean(values: Tensor, logprobs: Tensor, mask: Tensor, name: str) -> Tensor:
    """float32 and 0 where masked, before any arithmetic: 0 * inf would be NaN in the backward pass."""
    return _checked(values, logprobs, name).float().masked_fill(~mask, 0.0)


def _checked(values: Tensor, like: Tensor, name: str) -> Tensor:
    if values.shape != like.shape:
        raise ValueError(f"{name}: shape {tuple(values.shape)}; expected {tuple(like.shape)}, as logprobs")
    return values
