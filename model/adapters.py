"""LoRA adapters in PEFT's format, in and out: adapter_config.json and adapter_model.safetensors.

A layer's matrices are stored as `base_model.model.<module>.lora_A.weight` (R, in) and `.lora_B.weight` (out, R).
What this decoder can represent is one rank and one scaling (alpha / r, or alpha / sqrt(r) with use_rslora) over whole
sets of linear layers. Whatever else PEFT can write (DoRA, biases, rank patterns, some layers only, initialisations that
change the base weights, ...) is refused by an allow-list: a key that is not known must be empty.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.config import mismatch, positive, read_json, replacing, write_text
from model.lora import LINEAR_NAMES, add_lora, lora_modules, lora_parameters
from model.qwen2 import Qwen2
from model.weights import read_tensors

# Keys of any value: read below, or without effect here (dropout acts in training, qalora_group_size under use_qalora).
IGNORED = {"base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout", "peft_version"}
IGNORED |= {"auto_mapping", "megatron_core", "qalora_group_size", "r", "lora_alpha", "target_modules", "use_rslora"}
FIXED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, None, "gaussian")}
STORED = "base_model.model.{}.weight"  # model.norm.lora_A is stored as base_model.model.model.norm.lora_A.weight


def load_adapter(model: Qwen2, folder: str | Path) -> None:
    """Put a saved adapter on the model, in place, or raise CheckpointError before anything is changed.

    Example: r 8, lora_alpha 16 gives the scaling 2, with use_rslora 16 / sqrt(8) = 5.657
    """
    file = Path(folder) / "adapter_config.json"
    raw = read_json(file)
    for key, value in {"peft_type": None, **raw}.items():
        if key in FIXED and value not in FIXED[key]:
            raise mismatch(file, key, " or ".join(map(repr, FIXED[key])), repr(value))
        empty = value is None or value is False or value in ({}, [], "")
        if key not in FIXED and key not in IGNORED and not empty:
            raise mismatch(file, key, "nothing: plain LoRA only", repr(value))
    r, alpha = positive(file, raw, "r", int), positive(file, raw, "lora_alpha")
    paths = LINEAR_NAMES if raw.get("target_modules") == "all-linear" else raw.get("target_modules")
    kinds = {str(path).rsplit(".", 1)[-1] for path in paths} if isinstance(paths, (list, tuple)) else set()
    layers = {name: layer for name, layer in model.named_modules() if name.rsplit(".", 1)[-1] in kinds}
    covered = all(any(f".{name}".endswith(f".{path}") for path in paths) for name in layers)
    if not kinds or not kinds <= set(LINEAR_NAMES) or not covered:
        wanted = f"names that cover every layer, out of {', '.join(LINEAR_NAMES)}"
        raise mismatch(file, "target_modules", wanted, repr(raw.get("target_modules")))
    shapes = {STORED.format(f"{name}.lora_A"): (r, layer.in_features) for name, layer in layers.items()}
    shapes |= {STORED.format(f"{name}.lora_B"): (layer.out_features, r) for name, layer in layers.items()}
    tensors = read_tensors([file.with_name("adapter_model.safetensors")], shapes, {}, torch.float32, "cpu")
    add_lora(model, r, alpha, sorted(kinds), bool(raw.get("use_rslora")), torch.Generator())  # not the run's generator
    model.load_state_dict({name: tensors[STORED.format(name)] for name in lora_parameters(model)}, strict=False)


def save_adapter(model: Qwen2, folder: str | Path, base_model_name: str = "") -> None:
    """Write the model's adapter, float32, each file atomically; `base_model_name` tells PEFT what it belongs to."""
    layers = dict(lora_modules(model))
    if not layers:
        raise ValueError("the model has no LoRA adapter to save; expected add_lora or load_adapter before")
    first = next(iter(layers.values()))
    r, alpha = len(first.lora_A), first.scaling * len(first.lora_A)  # alpha / r is the scaling, rslora or not
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model_name or None}
    settings |= {"r": r, "lora_alpha": alpha if alpha % 1 else int(alpha), "use_rslora": False, "lora_dropout": 0.0}
    kinds = {name.rsplit(".", 1)[-1] for name in layers}
    settings |= {"target_modules": sorted(kinds), "bias": "none", "inference_mode": True}
    tensors = {STORED.format(name): p.detach().cpu().contiguous() for name, p in lora_parameters(model).items()}
    with replacing(Path(folder) / "adapter_model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_text(Path(folder) / "adapter_config.json", json.dumps(settings, indent=2) + "\n")
