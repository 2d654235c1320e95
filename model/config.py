"""The shape of a Qwen2 decoder, read from a Hugging Face config.json and written back.

Idea: a config key that changes the function is either understood or refused, never skipped: a sliding window or a YaRN
scaling that is read as nothing still gives fluent, wrong logits. Departure from transformers: a missing `rope_theta`,
`rms_norm_eps` or `num_key_value_heads` is refused too. The published spelling (`rope_theta`, `torch_dtype`) and that of
transformers 5 (`rope_parameters`, `dtype`) are read, the published one is written; the stored dtype decides nothing.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
CHOICES = {"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False}  # what model/qwen2.py computes
PLAIN_ROPE = {"rope_theta": None, "rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}  # any theta


class CheckpointError(ValueError):
    """A checkpoint, adapter or tokenizer folder that cannot be loaded exactly as it is meant."""


@dataclass(frozen=True, slots=True)
class Qwen2Config:
    """Sizes and constants of one decoder, under Hugging Face's names (q, k and v always have a bias)."""

    vocab_size: int  # V: rows of the embedding, at least the tokenizer's size
    hidden_size: int  # D
    intermediate_size: int  # F
    num_hidden_layers: int
    num_attention_heads: int  # H query heads
    num_key_value_heads: int  # K; a query head h reads key/value head h // (H // K)
    head_dim: int  # E; H * E need not be D
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    tie_word_embeddings: bool = True  # the output head is the embedding matrix
    max_position_embeddings: int = 32_768  # informative: rotary angles are computed for any position


def mismatch(file: Path, what: str, expected: object, found: object) -> CheckpointError:
    """The one shape of every complaint: `a/config.json: model_type: expected 'qwen2', found 'gpt2'`."""
    return CheckpointError(f"{file}: {what}: expected {expected}, found {found}")


def read_json(file: Path) -> dict:
    """The object in a JSON file; CheckpointError if it is missing, unreadable or something else."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise mismatch(file, "file", "a readable JSON object", f"{type(error).__name__}: {error}") from error
    if not isinstance(data, dict):
        raise mismatch(file, "file", "a JSON object", type(data).__name__)
    return data


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary path beside `file` that takes its place when the block ends well: never half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically, the same bytes on every system."""
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def positive(file: Path, raw: dict, key: str, kind: type | tuple = (int, float), default: object = None) -> float:
    """`raw[key]` as a positive number of that kind; null counts as absent, and a bool is no number."""
    value = default if raw.get(key) is None else raw[key]
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < float("inf"):
        raise mismatch(file, key, f"a positive {'whole ' * (kind is int)}number", repr(value))
    return value


def config_from_json(folder: str | Path) -> Qwen2Config:
    """Read `folder/config.json` or raise CheckpointError. Example: hidden_size 64, 4 heads, no `head_dim` -> 16"""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise mismatch(file, "folder", "a Hugging Face model folder (download it first)", "no config.json")
    raw = read_json(file)
    for key, choice in {**CHOICES, "partial_rotary_factor": 1.0}.items():
        if raw.get(key, choice if key != "model_type" else None) != choice:
            raise mismatch(file, key, repr(choice), repr(raw.get(key)))
    if set(map(str, raw.get("layer_types") or ["full_attention"])) != {"full_attention"}:
        raise mismatch(file, "layer_types", "only 'full_attention'", raw["layer_types"])
    sizes = {key: positive(file, raw, key, int) for key in SIZES}
    hidden, heads, kv_heads = (sizes[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if heads % kv_heads:
        raise mismatch(file, "num_attention_heads", f"a multiple of num_key_value_heads = {kv_heads}", heads)
    if raw.get("head_dim") is None and hidden % heads:
        raise mismatch(file, "hidden_size", f"a multiple of num_attention_heads = {heads}, or a head_dim", hidden)
    head_dim = positive(file, raw, "head_dim", int, default=hidden // heads)
    if head_dim % 2:
        raise mismatch(file, "head_dim", "an even number (rotary pairs)", head_dim)
    tied = raw.get("tie_word_embeddings", False)  # transformers' default; weights.py catches a wrong guess
    if not isinstance(tied, bool):
        raise mismatch(file, "tie_word_embeddings", "true or false", repr(tied))
    places = [raw]  # where the rotary base may stand
    for key in ("rope_parameters", "rope_scaling"):
        places.append(raw.get(key) or {})
        if not isinstance(places[-1], dict) or PLAIN_ROPE | places[-1] | {"rope_theta": None} != PLAIN_ROPE:
            raise mismatch(file, key, "a rope_theta and the type 'default', nothing else", places[-1])
    thetas = {float(positive(file, place, "rope_theta")) for place in places if place.get("rope_theta") is not None}
    if len(thetas) != 1:
        raise mismatch(file, "rope_theta", "one value (there is no safe default)", sorted(thetas) or "nothing")
    eps, length = positive(file, raw, "rms_norm_eps"), positive(file, raw, "max_position_embeddings", int, 32_768)
    return Qwen2Config(*sizes.values(), head_dim, float(eps), thetas.pop(), tied, length)


def config_to_json(config: Qwen2Config, dtype: str = "float32") -> str:
    """The text of a config.json that transformers, and `config_from_json`, read back to the same decoder."""
    head = {"architectures": ["Qwen2ForCausalLM"], **CHOICES, "attention_dropout": 0.0, "torch_dtype": dtype}
    return json.dumps({**head, **asdict(config)}, indent=2) + "\n"
