"""Checkpoints: complete, atomic, bounded in number.

    runs/<name>/checkpoints/40/    adapter (PEFT format) or model (Hugging Face format), tokenizer, training_state.pt
    runs/<name>/checkpoints/last   a text file that names the newest complete one

A checkpoint is written beside its final place and renamed when it is complete, and `last` changes only after that: a
run that is killed at any moment leaves the previous checkpoint usable.
"""

import hashlib
import os
import random
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.optim import Optimizer

from model.adapters import save_adapter
from model.config import replacing, write_text
from model.lora import lora_parameters
from model.qwen2 import Qwen2
from model.weights import save_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def derived_generator(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    """A CPU generator whose stream depends only on (seed, purpose, step): a resumed run needs no saved stream."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def save_policy(model: Qwen2, folder: Path, base_model: str = "") -> None:
    """What was trained: the adapter in PEFT's format if the model has one, else the whole model."""
    if lora_parameters(model):
        save_adapter(model, folder, base_model_name=base_model)
    else:
        save_model(model, folder)


def save_checkpoint(
    run_dir: Path,
    model: Qwen2,
    tokenizer_folder: Path,
    optimizer: Optimizer,
    progress: dict,
    base_model: str = "",
    config: str = "",
) -> None:
    """Write checkpoints/<step>, point `last` at it; of the older ones progress["best_step"] stays.

    config: the text of config.toml, kept with the weights that it made.
    """
    root, step = run_dir / "checkpoints", progress["step"]
    temporary, final, aside = root / f"{step}.writing", root / str(step), root / f"{step}.old"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        save_policy(model, temporary, base_model)
        for name in TOKENIZER_FILES:  # so that a checkpoint is a folder that can be used alone
            if (tokenizer_folder / name).is_file():
                shutil.copy(tokenizer_folder / name, temporary / name)
        write_text(temporary / "config.toml", config)
        save_state(temporary / "training_state.pt", progress=progress, optimizer=optimizer.state_dict())
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of these
        shutil.rmtree(temporary, ignore_errors=True)
        what = f"the checkpoint of step {step} could not be written ({error}); the one before it is whole"
        raise OSError(f"{root}: {what}: make room, then --resume {run_dir}") from error
    if final.exists():  # a folder cannot be replaced: the old one steps aside, and goes with the other old ones below
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(final, aside)
    os.replace(temporary, final)
    write_text(root / "last", f"{step}\n")
    for folder in root.iterdir():
        if folder.is_dir() and folder.name not in (str(step), str(progress["best_step"])):
            shutil.rmtree(folder)


def last_checkpoint(run_dir: Path) -> Path:
    """The folder of the newest complete checkpoint. Raises ValueError if there is none."""
    root = run_dir / "checkpoints"
    step = (root / "last").read_text(encoding="utf-8").strip() if (root / "last").is_file() else "none"
    numbered = sorted((path for path in root.glob("*") if path.name.isdigit()), key=lambda path: -int(path.name))
    # .old: killed while the same step was written again; numbered: killed before `last` named the first one
    for folder in (root / step, root / f"{step}.old", *numbered):
        if (folder / "training_state.pt").is_file():
            return folder
    raise ValueError(f"{root}: no complete checkpoint to resume from")


def load_training_state(folder: Path, optimizer: Optimizer, config) -> dict:
    """Put optimizer and random states back and return the progress; ValueError if the file is damaged.

    config: the [grpo] section, whose betas and weight decay hold from now on; Adam's moments are the saved ones.
    """
    state = load_state(folder / "training_state.pt")
    optimizer.load_state_dict(state["optimizer"])
    betas = (config.adam_beta1, config.adam_beta2)
    optimizer.param_groups[0].update(betas=betas, weight_decay=config.weight_decay)
    return state["progress"]


def save_state(file: Path, **state: object) -> None:
    """Write a state with the global random states, which custom functions may use, atomically."""
    state["randomness"] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    with replacing(file) as temporary:
        torch.save(state, temporary)


def load_state(file: Path) -> dict:
    """What `save_state` wrote, the random states set as they were; ValueError if the file is damaged."""
    try:
        state = torch.load(file, weights_only=True)
    except Exception as error:  # damaged bytes raise whatever the unpickler stumbles over: KeyError, EOFError, ...
        raise ValueError(f"{file} is damaged ({error}); expected a whole checkpoint") from error
    torch.set_rng_state(state["randomness"]["torch"])
    random.setstate(state["randomness"]["python"])
    return state
