"""Checkpoints in Hugging Face's layout, in and out: config.json and safetensors, one file or shards with an index.

Idea: strict, both ways. Every tensor of the model is in the files and every tensor of the files is in the model, with
the right shape, before a single number is read; transformers fills a missing bias with noise and goes on. Only a tied
model, which has no `lm_head.weight`, may find one: an equal copy is dropped, a different one refused. The parameters
exist once: the model is built without storage and takes the tensors over.
"""

from pathlib import Path, PureWindowsPath

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.config import config_from_json, config_to_json, mismatch, read_json, replacing, write_text
from model.qwen2 import Qwen2

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Shapes = dict[str, tuple[int, ...]]


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Qwen2:
    """Load a Hugging Face Qwen2 folder; CheckpointError for whatever would not compute what transformers computes."""
    folder = Path(folder)
    with torch.device("meta"):
        model = Qwen2(config_from_json(folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    spare = {HEAD: shapes[EMBEDDING]} if model.config.tie_word_embeddings else {}
    files = weight_files(folder)
    tensors = read_tensors(files, shapes, spare, dtype, device)
    if spare and not torch.equal(tensors.pop(HEAD, tensors[EMBEDDING]), tensors[EMBEDDING]):
        raise mismatch(files[-1], HEAD, f"a copy of {EMBEDDING} (tie_word_embeddings is true)", "other values")
    model.load_state_dict(tensors, assign=True)
    return model


def save_model(model: Qwen2, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors, nothing else, each atomically, in `dtype` (default: the model's own)."""
    if any(".lora_" in name for name in model.state_dict()):
        raise ValueError("the model has a LoRA adapter; expected merged weights (merge_lora), or use save_adapter")
    dtype = dtype or model.model.embed_tokens.weight.dtype
    tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    with replacing(Path(folder) / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_text(Path(folder) / "config.json", config_to_json(model.config, str(dtype).removeprefix("torch.")))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the single one, or the shards of its index, sorted."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return [folder / "model.safetensors"]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise mismatch(index, "weight_map", "tensor names with their files", shards)
    for tensor, name in shards.items():
        path = PureWindowsPath(name)  # knows both kinds of slash, and drives; a symlink may lead anywhere
        if path.anchor or ".." in path.parts:
            raise mismatch(index, tensor, "a file inside the folder", repr(name))
    return sorted({folder / name for name in shards.values()})


def read_tensors(
    files: list[Path], expected: Shapes, optional: Shapes, dtype: torch.dtype, device: str | torch.device
) -> dict[str, Tensor]:
    """All tensors of the files by name, once names, shapes and stored types are found to be as expected."""
    holder: dict[str, safe_open] = {}  # the open file that each tensor is in
    shapes = expected | optional
    for file in files:
        try:
            handle = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise mismatch(file, "file", "a whole safetensors file", f"{type(error).__name__}: {error}") from error
        for name in handle.keys():
            stored = handle.get_slice(name)
            shape, kind = tuple(stored.get_shape()), stored.get_dtype()
            if name not in shapes or name in holder:
                raise mismatch(file, name, "it once" if name in holder else "no such tensor", "it")
            if shape != shapes[name]:
                raise mismatch(file, name, f"shape {shapes[name]}", shape)
            if kind not in ("F32", "F16", "BF16"):
                raise mismatch(file, name, "float32, float16 or bfloat16", kind)
            holder[name] = handle
    missing = [name for name in expected if name not in holder]
    if missing:
        found = f"nothing ({len(missing)} of {len(expected)} tensors are missing)"
        where = files[0] if len(files) == 1 else files[0].parent
        raise mismatch(where, missing[0], f"shape {expected[missing[0]]}", found)
    # Copied: a file that stays mapped cannot be replaced on Windows.
    return {name: handle.get_tensor(name).to(device, dtype, copy=True) for name, handle in holder.items()}
