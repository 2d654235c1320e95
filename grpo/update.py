"""One GRPO step's update: score the rollouts, push up what beat its group, step the optimizer.

Groups are scored and differentiated in micro-batches, each divided by the whole step's count of tokens (or rows), so
that splitting changes no number. The rollouts are used `num_iterations` times: the log-probabilities of the first pass
are the frozen old ones, so in that pass the ratio is one, no clip acts, and the gradient is REINFORCE's.

A group whose advantages are all zero has no gradient (unless beta > 0), so it is not scored at all (but for bnpo); its
tokens still count in the average, as in TRL. The metrics of the loss therefore speak of the groups that were scored.
"""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo.batch import TreeBatch, build_tree, score
from grpo.config import GrpoConfig
from grpo.loss import Pair, loss_normalizer, policy_loss
from grpo.rollout import Rollouts
from model.lora import adapter_disabled, lora_parameters
from model.qwen2 import Qwen2

# What [grpo] and the loss both have, by the same names.
LOSS_SETTINGS = ["loss_type", "epsilon", "epsilon_high", "delta", "beta", "kl_estimator", "use_bias_correction_kl"]
LOSS_SETTINGS += ["importance_sampling_level", "importance_sampling_cap", "max_completion_length"]


@dataclass
class MicroBatch:
    """Some groups of the step, ready for the model, with what stays frozen during its iterations."""

    tree: TreeBatch
    mask: Tensor  # (B, S) tokens that count: the tree's, less truncated completions where they are left out
    advantages: Tensor  # (B,)
    sampling_logprobs: Tensor  # (B, S) as the sampler computed them
    old_logprobs: Tensor | None = None  # (B, S) of the policy before this step's first update
    ref_logprobs: Tensor | None = None  # (B, S) of the reference policy


def update_policy(
    model: Qwen2,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    advantages: Tensor,
    config: GrpoConfig,
    *,
    vocab_size: int | None = None,
    reference: Qwen2 | None = None,
) -> dict[str, Pair]:
    """One step of GRPO on Q x G rollouts: `num_iterations` optimizer steps, in place.

    advantages: (Q, G). vocab_size: as in sampling. reference: the frozen policy of the KL term; the model itself means
    the model without its adapter. Returns {TRL metric name: (sum, count)} over all tokens and iterations: the loss's
    statistics, grad_norm (before clipping) and `gradient_norms`, one each an iteration, tokens/with_gradient_ratio
    (tokens scored with an advantage, all tokens). The optimizer steps even without a signal, on zero gradients.
    """
    # (Q, G). A masked completion leaves the loss only: its reward is in the group's advantages already.
    counted = ~(rollouts.truncated & config.mask_truncated_completions)
    normalizer = loss_normalizer(config.loss_type, counted.numel(), int((rollouts.lengths * counted).sum()))
    settings = {name: getattr(config, name) for name in LOSS_SETTINGS} | {"normalizer": normalizer}
    scoring = {"temperature": config.temperature, "vocab_size": vocab_size}
    device, parts = model.model.embed_tokens.weight.device, micro_batches(advantages, config)
    batches = [make_micro_batch(rollouts.select(part), advantages[part], counted[part], device) for part in parts]
    if config.beta:
        with torch.no_grad(), adapter_disabled(model) if reference is model else nullcontext():
            for batch in batches:
                batch.ref_logprobs = score(reference, batch.tree, **scoring)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    taught = sum(int((batch.mask & (batch.advantages != 0)[:, None]).sum()) for batch in batches)
    totals: dict[str, Pair] = {"tokens/with_gradient_ratio": (taught, int(rollouts.lengths.sum()))}
    for _ in range(config.num_iterations):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # not None: Adam steps on, whether or not there is a signal
        for batch in batches:
            logprobs = score(model, batch.tree, **scoring)
            if batch.old_logprobs is None:
                batch.old_logprobs = logprobs.detach()
            others = {"ref_logprobs": batch.ref_logprobs, "sampling_logprobs": batch.sampling_logprobs}
            loss, stats = policy_loss(logprobs, batch.old_logprobs, batch.advantages, batch.mask, **others, **settings)
            (loss / len(batches) if config.loss_type == "bnpo" else loss).backward()
            add_pairs(totals, stats)
        matrices = gradient_norms(model)
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        add_pairs(totals, {name: (value, 1.0) for name, value in {"grad_norm": norm, **matrices}.items()})
        optimizer.step()
    return totals


def gradient_norms(model: Qwen2) -> dict[str, float]:
    """The norm of the gradient of all A matrices of an adapter, and of all B; a B that never moves learns nothing."""
    names = lora_parameters(model)
    norms = {kind: [p.grad.norm() for name, p in names.items() if name.endswith(kind)] for kind in ("lora_A", "lora_B")}
    return {f"grad_norm/{kind}": float(torch.stack(found).norm()) for kind, found in norms.items() if found}


def micro_batches(advantages: Tensor, config: GrpoConfig) -> list[list[int]]:
    """The groups that have something to say, in micro-batches. Example: advantages [[0, 0], [1, -1]] -> [[1]]"""
    everything = config.beta or config.loss_type == "bnpo"  # its average is over what a micro-batch holds
    groups = [q for q in range(len(advantages)) if everything or advantages[q].any()]
    return [groups[i : i + config.micro_batch_size] for i in range(0, len(groups), config.micro_batch_size)]


def make_micro_batch(rollouts: Rollouts, advantages: Tensor, counted: Tensor, device: torch.device) -> MicroBatch:
    """The tensors of selected groups, one row a completion; advantages and counted are theirs, (Q, G)."""
    tree = build_tree(rollouts.prompt_ids, rollouts.completion_ids, device)
    mask = tree.mask & counted.flatten().to(device)[:, None]
    logprobs = torch.tensor([p for group in rollouts.logprobs for row in group for p in row], device=device)
    sampling_logprobs = torch.zeros(mask.shape, device=device).masked_scatter(tree.mask, logprobs)
    return MicroBatch(tree, mask, advantages.flatten().to(device), sampling_logprobs)


def add_pairs(totals: dict[str, Pair], pairs: dict[str, Pair]) -> None:
    """Add (sum, count) pairs, in place: the mean of a step is one sum over one count, never a mean of means."""
    for name, (total, count) in pairs.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = (before[0] + float(total), before[1] + float(count))


def make_optimizer(parameters: Iterable[nn.Parameter], config) -> torch.optim.AdamW:
    """AdamW over the trainable parameters with a section's learning rate, betas and weight decay."""
    betas = (config.adam_beta1, config.adam_beta2)
    trained = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(trained, lr=config.learning_rate, betas=betas, weight_decay=config.weight_decay)


def learning_rate(config, step: int, max_steps: int) -> float:
    """The rate of step `step` (0-based) of `max_steps`: a linear warm-up, then the named schedule.

    Example: linear, learning_rate 1.0, warmup_steps 2, max_steps 6 -> 0.5, 1.0, 1.0, 0.75, 0.5, 0.25
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    decay = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return config.learning_rate * decay.get(config.lr_scheduler_type, 1.0)
