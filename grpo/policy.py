"""The policy that RL starts from: weights, adapter, and the supervised stages that come first.

What the stages make is kept as a Hugging Face folder (or a PEFT adapter) under the hash of the model, the stages, the
seed and every training pair: runs with the same beginning share it, and a changed one is never mistaken for it.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from tqdm import tqdm

from grpo.checkpoint import derived_generator, load_state, save_policy, save_state
from grpo.config import Config, ModelConfig
from grpo.sft import Pair, make_groups, train_sft
from grpo.telemetry import append_line, truncate_log
from model.adapters import load_adapter
from model.config import Qwen2Config
from model.lora import add_lora
from model.qwen2 import Qwen2
from model.weights import load_model

LOG_EVERY = (
    50  # steps of a supervised stage between lines of its log, and between states that a killed run goes on from
)


def make_policy(config: ModelConfig, seed: int = 0) -> Qwen2:
    """The model of a [model] section: loaded or drawn at random, with its adapter loaded or new if it has one."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError('model.device = "cuda", but torch sees no CUDA device; use "auto" or "cpu"')
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    dtype, generator = getattr(torch, config.dtype), derived_generator(seed, "weights")
    if config.init == "load":
        model = load_model(config.path, dtype=dtype, device=device)
    else:
        sizes = {f.name: getattr(config, f.name) for f in fields(Qwen2Config) if hasattr(config, f.name)}
        model = Qwen2(Qwen2Config(**sizes, head_dim=config.hidden_size // config.num_attention_heads))
        model.init_weights(generator)
        model.to(device, dtype)
    if config.adapter:
        load_adapter(model, config.adapter)
    elif config.lora_r:
        add_lora(model, config.lora_r, config.lora_alpha, config.lora_target_modules, generator=generator)
    model.gradient_checkpointing, model.cuda_graphs = config.gradient_checkpointing, config.cuda_graphs
    return model


def adapter_starts_at_zero(config: Config) -> bool:
    """Whether RL starts with a fresh adapter: the reference policy is then the model with the adapter off, no copy."""
    return bool(config.model.lora_r and not config.sft and not config.model.adapter)


def load_policy(config: ModelConfig, folder: str | Path) -> Qwen2:
    """A policy that was saved: a PEFT adapter on the section's base model, or a whole model."""
    if (Path(folder) / "adapter_config.json").is_file():
        return make_policy(replace(config, adapter=str(folder)))
    return make_policy(replace(config, init="load", path=str(folder), adapter="", lora_r=0))


def train_stages(config: Config, pairs: list[list[list[Pair]]], log: Path) -> Path:
    """Run the [[sft]] stages one after the other, unless an earlier run made exactly the same; the result's folder.

    pairs: for each stage and database, (prompt ids, completion ids). log: JSON lines, one every LOG_EVERY steps, when
    also the state is kept beside the folder: a run that is killed goes on from there, on a CPU bit for bit.
    """
    no_matter = ("device", "gradient_checkpointing", "cuda_graphs", "path", "adapter")  # but the last two's files do
    settings = {name: value for name, value in asdict(config.model).items() if name not in no_matter}
    digest = hashlib.sha256(json.dumps([settings, [asdict(s) for s in config.sft], config.run.seed, pairs]).encode())
    for source in filter(None, (config.model.path, config.model.adapter)):  # sizes and lora_alpha stand in *config.json
        for file in sorted([*Path(source).glob("*.safetensors"), *Path(source).glob("*config.json")]):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    folder = Path(config.data.cache_dir) / f"sft-{digest.hexdigest()[:16]}"
    if not folder.is_dir():
        model, unfinished = make_policy(config.model, config.run.seed), folder.with_suffix(".pt")
        state = load_state(unfinished) if unfinished.is_file() else {"stage": 0, "step": 0}
        truncate_log(log, state["step"], state["stage"])
        if "model" in state:
            model.load_state_dict(state["model"], strict=False)  # strict=False: only what trains was saved
        for index, stage in list(enumerate(config.sft))[state["stage"] :]:
            groups = make_groups(pairs[index], stage.max_branches)
            start = state if index == state["stage"] else {}
            steps = train_sft(model, groups, stage, config.run.seed, start)
            bar = tqdm(steps, f"sft {index}", stage.max_steps, initial=start.get("step", 0), disable=None)
            for step, row, optimizer in bar:
                bar.set_postfix_str(f"loss {row['sft/loss']:.3f}", refresh=False)
                if step % LOG_EVERY == 0 or step == stage.max_steps:
                    append_line(log, {"stage": index, "step": step} | row)
                    if bar.disable:
                        print(f"sft {index} step {step}/{stage.max_steps}  loss {row['sft/loss']:.3f}", flush=True)
                    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
                    progress = {"stage": index, "step": step, "model": trained, "optimizer": optimizer.state_dict()}
                    save_state(unfinished, **progress)
        temporary = folder.with_name(f"{folder.name}.{os.getpid()}")  # runs may share the cache
        save_policy(model, temporary, config.model.path)
        with suppress(OSError):  # another run was faster: its bytes are the same
            temporary.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        unfinished.unlink(missing_ok=True)
    return folder
