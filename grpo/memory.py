"""Will it fit? An estimate of a run's peak memory from its shapes, before hours are spent, and what to lower.

    weights       parameters x bytes of their dtype; once more where a frozen reference is kept beside them
    training      gradient and two Adam moments of what trains, float32 each
    sampling      keys and values of the prompts and of all rows, and one step's logits
    evaluation    the same, of eval.batch_size greedy rows with a prompt each
    update        what the backward pass needs of one micro-batch, tree by tree: prompt + G completions, and the logits

These do not happen at once: the largest counts. The factors are counted in the code and checked against measured peaks
of CPU steps, which lie within a third of the estimate (tests/test_memory.py).
"""

from pathlib import Path

import torch

from grpo.batch import MAX_LOGITS
from grpo.config import Config
from grpo.policy import adapter_starts_at_zero
from model.config import Qwen2Config
from model.qwen2 import Qwen2


def estimate_memory(model: Qwen2, config: Config, prompt_length: int) -> dict[str, float]:
    """Bytes of each kind, and the "peak"; prompt_length: tokens of the longest prompt.

    Example: 1,000 float32 parameters, all trained, no reference -> weights 4,000, training 12,000
    """
    c, g = model.config, config.grpo
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in parameters)
    size = parameters[0].element_size()
    key_value = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * size  # of one token

    def sampled(prompts: int, rows: int) -> float:
        tokens = prompts * prompt_length + rows * g.max_completion_length
        return tokens * key_value + prompts * prompt_length * per_layer(c) * size + 10.0 * 4 * rows * c.vocab_size

    parts = {"weights": float(weights), "training": 12.0 * trained}
    parts["reference"] = float(weights) if g.beta and not adapter_starts_at_zero(config) else 0.0
    parts["sampling"] = sampled(g.questions_per_step, g.questions_per_step * g.num_generations)
    parts["evaluation"] = sampled(config.eval.batch_size, config.eval.batch_size)
    tree = g.micro_batch_size * (prompt_length + g.num_generations * g.max_completion_length)
    scored = g.micro_batch_size * g.num_generations * g.max_completion_length
    layers = 1 if model.gradient_checkpointing else c.num_hidden_layers
    activations = tree * (layers * per_layer(c) + c.num_hidden_layers * c.hidden_size) * size
    parts["update"] = activations + 5.0 * 4 * min(scored * c.vocab_size, MAX_LOGITS)
    fixed = parts["weights"] + parts["training"] + parts["reference"]
    return parts | {"peak": fixed + max(parts[phase] for phase in ("sampling", "evaluation", "update"))}


def per_layer(c: Qwen2Config) -> int:
    """Numbers that one layer keeps of one token for its backward pass."""
    heads = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    return 8 * c.hidden_size + 4 * c.intermediate_size + 3 * heads


def available_memory(device: torch.device) -> float | None:
    """Bytes that are free on the device; None where the system does not say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)


def check_memory(model: Qwen2, config: Config, prompt_length: int) -> str:
    """The estimate in words; ValueError that names what to lower if it is more than there is.

    The weights are there already, so they are left out of what must still fit.
    """
    need = estimate_memory(model, config, prompt_length)
    free = available_memory(model.model.embed_tokens.weight.device)
    words = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in need.items() if size and name != "peak")
    words = f"about {need['peak'] / 1e9:.2f} GB at its peak ({words}), prompts of up to {prompt_length} tokens"
    if free is not None and need["peak"] - need["weights"] > free:
        what = "grpo.questions_per_step, num_generations or max_completion_length"
        if need["evaluation"] > max(need["sampling"], need["update"]):
            what = "eval.batch_size or grpo.max_completion_length"
        elif need["update"] > need["sampling"]:
            what = "grpo.micro_batch_size, max_completion_length or data.max_prompt_length"
            what += "" if model.gradient_checkpointing else ", set model.gradient_checkpointing"
        raise ValueError(f"this run needs {words}, but {free / 1e9:.2f} GB are free: lower {what}, or use LoRA")
    return words
