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
    """The loss of a micro-batch, and its statistics as detached (sum, count) pairs under TRL's metric names: loss;
    clip_ratio/{low,high,region}_mean, or cispo_clip_ratio (rho > cap and A > 0); kl (times rho if corrected);
    sampling/sampling_logp_difference/mean (|old - sampler|), sampling/importance_sampling_ratio/mean (before the cap).

    logprobs: of the policy at the sampling temperature, nats, (B, S), with gradient; float32 inside.
    old_logprobs: (B, S), frozen before the updates; None: on-policy, rho = 1 and the gradient is -A grad log pi.
    advantages: (B,). mask: (B, S), true where a completion token counts.
    delta: cap of rho in the unclipped branch, which shows where A < 0 (2505.07291). epsilon_high: None = epsilon.
    beta, ref_logprobs (B, S), kl_estimator, use_bias_correction_kl (times rho): see `kl_estimate`.
    importance_sampling_level: "sequence": one rho a row, exp(mean over tokens of log rho) (GSPO, 2507.18071).
    sampling_logprobs: the sampler's, (B, S), logged against the old ones. importance_sampling_cap > 0: token losses are
        weighted by min(pi_old / pi_sampler, cap), without gradient (truncated importance sampling).
    normalizer: `loss_normalizer` of the whole step, which makes micro-batch losses add up; None: of this batch.
    Raises ValueError for a wrong shape or choice, or for an argument that a choice needs, such as "beta = 0.1 needs
    ref_logprobs".
    Example: one row, A = 1, rho = (1.5, 0.5), epsilon 0.2 -> -(1.2 + 0.5) / 2 = -0.85; clip_ratio/region_mean (1, 2)
    """
    if loss_type not in ("grpo", "dapo", "bnpo", "dr_grpo", "cispo"):
        raise ValueError(f'loss_type = "{loss_type}"; expected grpo, dapo, bnpo, dr_grpo or cispo')
    if loss_type == "dr_grpo" and not max_completion_length:
        raise ValueError('loss_type = "dr_grpo" divides by max_completion_length; expected a number of tokens')
    mask = _checked(mask, logprobs, "mask").bool()
    logp = _clean(logprobs, logprobs, mask, "logprobs")
    old = logp.detach() if old_logprobs is None else _clean(old_logprobs, logprobs, mask, "old_logprobs").detach()
    advantage = _checked(advantages, logprobs[:, 0], "advantages").float().unsqueeze(1)  # (B, 1)

    log_ratio, counted = logp - old, mask
    if importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
        counted = mask.any(1, keepdim=True)
    elif importance_sampling_level != "token":
        raise ValueError(f'importance_sampling_level = "{importance_sampling_level}"; expected token or sequence')
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()  # (B, S) or (B, 1), as everything made from it
    if loss_type == "cispo":  # REINFORCE with a capped weight: a token far away weighs less, but keeps its gradient
        if epsilon_high is None:
            raise ValueError('loss_type = "cispo" needs epsilon_high, the absolute cap of the ratio, such as 5.0')
        token_loss = -ratio.clamp(max=epsilon_high).detach() * advantage * logp
        clipped = {"cispo_clip_ratio": (ratio > epsilon_high) & (advantage > 0)}
    else:  # PPO's pessimistic surrogate: the minimum, for both signs of A, takes away the profit of moving far
        low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
        capped = ratio if delta is None else ratio.clamp(max=delta)
        token_loss = -torch.min(capped * advantage, ratio.clamp(low, high) * advantage)
        is_low, is_high = (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)
        clipped = {"clip_ratio/low_mean": is_low, "clip_ratio/high_mean": is_high}
        clipped["clip_ratio/region_mean"] = is_low | is_high
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

    per_row = (token_loss * mask).sum(1)  # a (B, 1) token loss counts once per token of its row
    if loss_type == "grpo":
        per_row = per_row / mask.sum(1).clamp(min=1)
    own = torch.as_tensor(loss_normalizer(loss_type, len(mask), mask.sum()), device=mask.device)
    total = own if normalizer is None or loss_type == "bnpo" else torch.as_tensor(normalizer, device=mask.device)
    loss = per_row.sum() / (total.clamp(min=1) * (max_completion_length if loss_type == "dr_grpo" else 1))
    return loss, stats | {"loss": (loss.detach(), own / total.clamp(min=1))}  # the shares of a step add up to one


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


def _pair(values: Tensor, counted: Tensor) -> Pair:
    return (values.detach().float() * counted).sum(), counted.sum()


def _clean(values: Tensor, logprobs: Tensor, mask: Tensor, name: str) -> Tensor:
    """float32 and 0 where masked, before any arithmetic: 0 * inf would be NaN in the backward pass."""
    return _checked(values, logprobs, name).float().masked_fill(~mask, 0.0)


def _checked(values: Tensor, like: Tensor, name: str) -> Tensor:
    if values.shape != like.shape:
        raise ValueError(f"{name}: shape {tuple(values.shape)}; expected {tuple(like.shape)}, as logprobs")
    return values
