"""The policy that RL starts from: weights, adapter, and the supervised stages that come first.

What the stages make depends on the model, the stages, the seed and every training pair. All of it is hashed, and the
result is kept under that hash as a Hugging Face folder (or a PEFT adapter), so that runs with the same beginning share
it and a changed one can never be mistaken for it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from grpo.checkpoint import derived_generator, save_policy
from grpo.config import Config, ModelConfig
from grpo.sft import Pair, make_groups, train_sft
from model.adapters import load_adapter
from model.config import Qwen2Config
from model.lora import add_lora
from model.qwen2 import Qwen2
from model.weights import load_model


def choose_device(name: str) -> torch.device:
    """ "auto" is cuda if there is one, else cpu. Raises ValueError if cuda is asked for and missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError('model.device = "cuda", but torch sees no CUDA device; use "auto" or "cpu"')
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def make_policy(config: ModelConfig, seed: int) -> Qwen2:
    """The model of a [model] section: loaded or drawn at random, with its adapter loaded or new if it has one."""
    device, dtype = choose_device(config.device), getattr(torch, config.dtype)
    generator = derived_generator(seed, "weights")
    if config.init == "load":
        model = load_model(config.path, dtype=dtype, device=device)
    else:
        model = Qwen2(random_config(config))
        model.init_weights(generator)
        model.to(device, dtype)
    if config.adapter:
        load_adapter(model, config.adapter)
    elif config.lora_r:
        add_lora(model, config.lora_r, config.lora_alpha, config.lora_target_modules, generator=generator)
    model.gradient_checkpointing = config.gradient_checkpointing
    return model


def random_config(config: ModelConfig) -> Qwen2Config:
    """The sizes of a [model] section with init = "random"."""
    return Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        rope_theta=config.rope_theta,
        tie_word_embeddings=config.tie_word_embeddings,
    )


def load_policy(config: ModelConfig, folder: str | Path) -> Qwen2:
    """A policy that was saved: a PEFT adapter on the section's base model, or a whole model."""
    device, dtype = choose_device(config.device), getattr(torch, config.dtype)
    is_adapter = (Path(folder) / "adapter_config.json").is_file()
    model = load_model(config.path if is_adapter else folder, dtype=dtype, device=device)
    if is_adapter:
        load_adapter(model, folder)
    model.gradient_checkpointing = config.gradient_checkpointing
    return model


def train_stages(
    config: Config,
    pairs: list[list[list[Pair]]],
    report: Callable[[int, int, dict[str, float]], None],
) -> Path:
    """Run the [[sft]] stages one after the other, unless an earlier run made exactly the same; the result's folder.

    Args:
        pairs: for each stage and database, (prompt ids, completion ids).
        report: called after every step with (stage, step, metrics).
    """
    folder = Path(config.data.cache_dir) / f"sft-{stages_hash(config, pairs)}"
    if not folder.is_dir():
        model = make_policy(config.model, config.run.seed)
        for index, stage in enumerate(config.sft):
            groups = make_groups(pairs[index], stage.max_branches)
            train_sft(model, groups, stage, config.run.seed, lambda step, row, i=index: report(i, step, row))
        temporary = folder.with_name(folder.name + ".writing")
        shutil.rmtree(temporary, ignore_errors=True)
        save_policy(model, temporary, config.model.path)
        os.replace(temporary, folder)
    return folder


def stages_hash(config: Config, pairs: list[list[list[Pair]]]) -> str:
    """Sixteen hex digits of everything that determines what the stages make."""
    settings = asdict(config.model) | {"device": None, "gradient_checkpointing": None, "path": None, "adapter": None}
    digest = hashlib.sha256(json.dumps([settings, [asdict(s) for s in config.sft], config.run.seed, pairs]).encode())
    for source in filter(None, (config.model.path, config.model.adapter)):  # sizes and lora_alpha stand in *config.json
        for file in sorted([*Path(source).glob("*.safetensors"), *Path(source).glob("*config.json")]):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]
