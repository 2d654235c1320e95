"""Step 6: load a Hugging Face checkpoint, and refuse what cannot be loaded exactly.

Built here: model/config.py `config_from_json`, `config_to_json`; model/weights.py `load_model`, `save_model`.
Rule: every key that changes the function is understood or refused; every tensor of the model is in the files, every
tensor of the files is in the model. The judge is `slow_logits`, a second decoder written with loops, which reads the
folder on its own.
Run: pytest tests/test_06_weights.py
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.config import CheckpointError, Qwen2Config, config_from_json, config_to_json
from model.qwen2 import Qwen2
from model.weights import load_model, save_model

TINY = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def make(folder: Path, dtype: torch.dtype | None = None, **changes) -> Qwen2:
    """A checkpoint whose every tensor matters: biases and norm weights are random too."""
    model = Qwen2(Qwen2Config(**TINY | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4 + (parameter.ndim == 1))
    save_model(model, folder, dtype)
    return model


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes) -> None:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    text = json.dumps({key: value for key, value in raw.items() if key not in remove})
    (folder / "config.json").write_text(text, encoding="utf-8")


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()  # the loaded tensors may still be mapped to it
    save_file({name: tensor.clone() for name, tensor in change(tensors).items()}, folder / "model.safetensors")


def shard(folder: Path, parts: int = 3) -> dict[str, str]:
    """Split the single file into shards with an index, as large checkpoints are; returns the index's map."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    files = [f"model-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)]
    weight_map = {name: files[i % parts] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def slow_logits(folder: Path, ids: list[int]) -> np.ndarray:
    """Logits (T, V) of one row, from the files, with one loop for each sum that the paper writes. float64."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    w = {name: t.double().numpy() for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    heads, groups, size = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / math.sqrt(np.mean(x * x) + raw["rms_norm_eps"]) * w[name]

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        out, half = x.copy(), size // 2
        for i in range(half):
            angle = position * raw["rope_theta"] ** (-2 * i / size)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    xs = [w["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(raw["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        project = {p: (w[f"{name}self_attn.{p}_proj.weight"], w[f"{name}self_attn.{p}_proj.bias"]) for p in "qkv"}
        q, k, v = ([], [], [])
        for position, x in enumerate(xs):
            h = norm(x, name + "input_layernorm.weight")
            parts = {p: (weight @ h + bias).reshape(-1, size) for p, (weight, bias) in project.items()}
            q.append([turned(head, position) for head in parts["q"]])
            k.append([turned(head, position) for head in parts["k"]])
            v.append(parts["v"])
        for t in range(len(xs)):
            out = []
            for head in range(heads):
                group = head // (heads // groups)
                scores = np.array([q[t][head] @ k[s][group] / math.sqrt(size) for s in range(t + 1)])
                shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                out.append(sum(shares[s] * v[s][group] for s in range(t + 1)))
            x = xs[t] + w[name + "self_attn.o_proj.weight"] @ np.concatenate(out)
            h = norm(x, name + "post_attention_layernorm.weight")
            gate = w[name + "mlp.gate_proj.weight"] @ h
            wide = gate / (1 + np.exp(-gate)) * (w[name + "mlp.up_proj.weight"] @ h)
            xs[t] = x + w[name + "mlp.down_proj.weight"] @ wide
    head = w["model.embed_tokens.weight" if raw["tie_word_embeddings"] else "lm_head.weight"]
    return np.array([head @ norm(x, "model.norm.weight") for x in xs])


# --- config.json ---


def test_both_spellings_of_a_config_give_the_same_decoder(tmp_path):
    """64 hidden over 4 heads: head_dim 16. transformers 5 moved rope_theta into rope_parameters."""
    published = {"model_type": "qwen2", "hidden_act": "silu", "vocab_size": 320, "hidden_size": 64}
    published |= {"intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    published |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 512}
    published |= {"sliding_window": 32768, "max_window_layers": 28, "use_sliding_window": False}
    newer = published | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "dtype": "float32"}
    newer |= {"layer_types": ["full_attention"] * 3, "sliding_window": None, "head_dim": None, "rope_scaling": None}
    configs = []
    for raw in (published | {"rope_theta": 5e5, "torch_dtype": "bfloat16"}, newer):
        (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        configs.append(config_from_json(tmp_path))
    assert configs[0] == configs[1] == Qwen2Config(320, 64, 160, 3, 4, 2, 16, 1e-6, 5e5, True, 512)


def test_a_written_config_reads_back_the_same(tmp_path):
    config = Qwen2Config(**TINY | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "tie_word_embeddings": False})
    (tmp_path / "config.json").write_text(config_to_json(config, "bfloat16"), encoding="utf-8")
    assert config_from_json(tmp_path) == config


REFUSED_VALUES = [
    ("model_type", "gpt2"), ("model_type", "qwen3"), ("hidden_act", "gelu"), ("use_sliding_window", True),
    ("layer_types", ["full_attention", "sliding_attention"]), ("partial_rotary_factor", 0.5),
    ("rope_scaling", {"type": "yarn", "factor": 4.0}), ("rope_scaling", "linear"),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}),
    ("rope_parameters", {"full_attention": {"rope_theta": 1e4}}),
    ("rope_theta", "10000"), ("rope_theta", -1), ("rms_norm_eps", 0), ("vocab_size", "20"), ("hidden_size", 16.0),
    ("num_hidden_layers", True), ("num_key_value_heads", 3), ("num_attention_heads", 0), ("head_dim", 3),
    ("tie_word_embeddings", "yes"), ("max_position_embeddings", -5),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), REFUSED_VALUES)
def test_a_key_that_we_do_not_compute_is_refused_by_name(tmp_path, key, value):
    make(tmp_path)
    edit_config(tmp_path, **{key: value})
    known_as = "num_attention_heads" if (key, value) == ("num_key_value_heads", 3) else key
    with pytest.raises(CheckpointError, match=rf"config\.json: {known_as}: expected .*, found "):
        load_model(tmp_path)


REQUIRED = ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
REQUIRED += ["num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta"]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_has_no_silent_default(tmp_path, key):
    make(tmp_path)
    edit_config(tmp_path, remove=(key,))
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}: expected .*, found (nothing|None)"):
        load_model(tmp_path)


def test_two_different_rotary_bases_are_refused(tmp_path):
    make(tmp_path)
    edit_config(tmp_path, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    with pytest.raises(CheckpointError, match=r"rope_theta: expected one value .*, found \[10000.0, 1000000.0\]"):
        load_model(tmp_path)


def test_heads_that_do_not_divide_need_an_explicit_head_dim(tmp_path):
    make(tmp_path)
    edit_config(tmp_path, remove=("head_dim",), hidden_size=18)
    with pytest.raises(CheckpointError, match=r"hidden_size: expected a multiple of num_attention_heads = 4"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "found"), [("{", "JSONDecodeError"), ("[]", "list"), ("\udcff", "UnicodeDecodeError")]
)
def test_a_broken_config_is_named(tmp_path, text, found):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=rf"config\.json: file: expected .*JSON object, found {found}"):
        load_model(tmp_path)


def test_a_folder_that_is_not_there_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere.config\.json: folder: expected a Hugging Face model folder"):
        load_model(tmp_path / "nowhere")


# --- what loads ---


def test_parameters_have_hugging_face_names_and_a_tied_head_is_not_stored_twice(tmp_path):
    layer = "model.layers.0."
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    names |= {f"{layer}{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")}
    names |= {f"{layer}self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")}
    names |= {f"{layer}self_attn.o_proj.weight"} | {f"{layer}mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    make(tmp_path / "tied", num_hidden_layers=1)
    make(tmp_path / "untied", num_hidden_layers=1, tie_word_embeddings=False)
    assert set(load_file(tmp_path / "tied" / "model.safetensors")) == names
    assert set(load_file(tmp_path / "untied" / "model.safetensors")) == names | {"lm_head.weight"}
    assert set(load_model(tmp_path / "tied").state_dict()) == names


KINDS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one key/value head per query head": {"num_key_value_heads": 4},
    "one key/value head for all": {"num_key_value_heads": 1},
    "heads wider than the model": {"head_dim": 8},
    "large eps": {"rms_norm_eps": 1e-2},
    "large rotary base": {"rope_theta": 1e6},
    "one layer": {"num_hidden_layers": 1},
    "odd sizes": {"vocab_size": 23, "hidden_size": 12, "intermediate_size": 7, "num_attention_heads": 6, "head_dim": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_slow_decoder_that_reads_the_same_files(tmp_path, kind):
    make(tmp_path, **KINDS[kind])
    model = load_model(tmp_path)
    with torch.no_grad():
        logits = model(IDS)[0].double().numpy()
    np.testing.assert_allclose(logits, slow_logits(tmp_path, IDS[0].tolist()), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_load_as_float32_or_as_they_are(tmp_path, dtype):
    model = make(tmp_path, dtype)
    for wanted in (torch.float32, dtype):
        loaded = load_model(tmp_path, dtype=wanted)
        for name, parameter in loaded.named_parameters():
            assert parameter.dtype == wanted
            assert parameter.requires_grad
            assert torch.equal(parameter, model.get_parameter(name).to(dtype).to(wanted)), name
    assert f'"torch_dtype": "{str(dtype)[6:]}"' in (tmp_path / "config.json").read_text(encoding="utf-8")


def test_shards_with_an_index_equal_the_single_file(tmp_path):
    whole = make(tmp_path, tie_word_embeddings=False).state_dict()
    shard(tmp_path)
    parts = load_model(tmp_path).state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_snapshot_of_the_hugging_face_cache_loads_through_its_symlinks(tmp_path):
    """snapshots/<commit>/model-1.safetensors -> ../../blobs/<hash>: outside the folder, but named inside it."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    model = make(blobs)
    shard(blobs)
    snapshot.mkdir(parents=True)
    try:
        for i, file in enumerate(sorted(blobs.iterdir())):
            (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"hash{i}"))
            file.rename(blobs / f"hash{i}")
    except OSError:
        pytest.skip("this system lets nobody make symlinks")
    assert torch.equal(load_model(snapshot)(IDS), model(IDS))


def test_a_tied_checkpoint_may_hold_an_equal_copy_of_its_head(tmp_path):
    model = make(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    loaded = load_model(tmp_path)
    assert "lm_head.weight" not in loaded.state_dict()
    assert torch.equal(loaded(IDS), model(IDS))


def test_loaded_weights_may_be_trained_and_saved_over_their_own_file(tmp_path):
    make(tmp_path)
    model = load_model(tmp_path)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert not torch.equal(load_model(tmp_path).model.norm.weight, model.model.norm.weight)
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path).model.norm.weight, model.model.norm.weight)


# --- what is refused ---

EMBED, NORM, BIAS = "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.bias"


def without(name: str):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def added(name: str, tensor: torch.Tensor):
    return lambda tensors: tensors | {name: tensor}


def without_prefix(tensors: dict) -> dict:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


REFUSED_TENSORS = {
    "missing norm": (without(NORM), rf"{NORM}: expected shape \(16,\), found nothing \(1 of 26"),
    "missing bias": (without(BIAS), rf"{BIAS}: expected shape \(8,\), found nothing"),
    "unknown": (added("extra.weight", torch.ones(1)), r"extra\.weight: expected no such tensor, found it"),
    "q_norm of another architecture": (added("model.layers.0.self_attn.q_norm.weight", torch.ones(4)), r"q_norm"),
    "a third layer": (added("model.layers.2.input_layernorm.weight", torch.ones(16)), r"layers\.2\..*no such tensor"),
    "shape": (added(EMBED, torch.ones(20, 15)), rf"{EMBED}: expected shape \(20, 16\), found \(20, 15\)"),
    "transposed": (
        added("model.layers.0.mlp.up_proj.weight", torch.ones(16, 12)),
        r"shape \(12, 16\), found \(16, 12\)",
    ),
    "integers": (added(NORM, torch.ones(16, dtype=torch.int8)), r"expected float32, float16 or bfloat16, found I8"),
    "base model, no prefix": (without_prefix, r"embed_tokens\.weight: expected no such tensor"),
    "stale head": (added("lm_head.weight", torch.ones(20, 16)), rf"lm_head\.weight: expected a copy of {EMBED}"),
    "head of another shape": (added("lm_head.weight", torch.ones(21, 16)), r"lm_head.*found \(21, 16\)"),
}


@pytest.mark.parametrize("kind", REFUSED_TENSORS)
def test_every_tensor_is_accounted_for(tmp_path, kind):
    change, message = REFUSED_TENSORS[kind]
    make(tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*" + message):
        load_model(tmp_path)


def test_an_untied_checkpoint_without_head_is_refused(tmp_path):
    make(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected shape \(20, 16\), found nothing"):
        load_model(tmp_path)
    edit_config(tmp_path, remove=("tie_word_embeddings",))  # transformers' default is untied
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected shape \(20, 16\), found nothing"):
        load_model(tmp_path)


@pytest.mark.parametrize("left", [0, 5, 200, 5000])
def test_a_file_that_is_cut_short_is_refused(tmp_path, left):
    make(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: file: expected a whole safetensors file"):
        load_model(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    make(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: file: .*found FileNotFoundError"):
        load_model(tmp_path)


def test_an_absent_shard_is_refused_by_name(tmp_path):
    make(tmp_path)
    shard(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: file: .*FileNotFoundError"):
        load_model(tmp_path)


def test_a_tensor_that_no_shard_or_two_shards_hold_is_refused(tmp_path):
    make(tmp_path)
    weight_map = shard(tmp_path)
    file = tmp_path / weight_map[NORM]
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    norm = tensors.pop(NORM)
    file.unlink()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"{NORM}: expected shape \(16,\), found nothing"):
        load_model(tmp_path)
    save_file(tensors | {NORM: norm}, file)
    save_file({NORM: norm}, tmp_path / "model-extra.safetensors")
    write_index(tmp_path, weight_map | {"again": "model-extra.safetensors"})
    with pytest.raises(CheckpointError, match=rf"{NORM}: expected it once"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "name", ["../elsewhere/model.safetensors", "/etc/model.safetensors", "a/../../b", "..\\b", "C:\\b"]
)
def test_an_index_may_not_name_a_file_outside_its_folder(tmp_path, name):
    make(tmp_path / "elsewhere")
    folder = tmp_path / "folder"
    make(folder)
    weight_map = shard(folder)
    write_index(folder, dict.fromkeys(weight_map, name))
    with pytest.raises(CheckpointError, match=r"index\.json: .*: expected a file inside the folder, found "):
        load_model(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], {NORM: 3}])
def test_an_index_without_a_map_is_refused(tmp_path, weight_map):
    make(tmp_path)
    shard(tmp_path)
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map: expected tensor names with their files"):
        load_model(tmp_path)


# --- saving ---


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    model = make(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full_disk(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("model.weights.save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_model(model, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_saving_twice_gives_the_same_bytes(tmp_path):
    model = make(tmp_path / "a")
    save_model(load_model(tmp_path / "a"), tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert model.config == load_model(tmp_path / "b").config


# --- against transformers ---


def greedy(model: Qwen2, ids: torch.Tensor, mask: torch.Tensor, steps: int) -> torch.Tensor:
    """The plain loop: run everything again for each new token."""
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, mask)[:, -1:].argmax(dim=-1)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids


def test_checkpoints_give_the_logits_that_transformers_gave(shared):
    """Every folder of the local oracle set: loads with equal logits, or is refused, as its manifest says."""
    root = shared / "checkpoints"
    loaded = 0
    for case in json.loads((root / "manifest.json").read_text(encoding="utf-8"))["cases"]:
        folder = root / case["name"]
        if case["expect"] != "load":  # of "load-or-refuse" we refuse all: windows, YaRN, other architectures
            with pytest.raises(CheckpointError, match=rf"{case['name']}.*: .*: expected .*, found "):
                load_model(folder)
            continue
        model = load_model(folder)
        oracle = {name: torch.from_numpy(array) for name, array in np.load(folder / "oracle.npz").items()}
        mask = oracle["pad_attention_mask"]
        with torch.no_grad():
            logits = model(oracle["input_ids"])
            padded = model(oracle["pad_input_ids"], mask) * mask[..., None]
            sequences = greedy(model, oracle["pad_input_ids"], mask, 20)
        assert torch.equal(logits.argmax(dim=-1), oracle["logits"].argmax(dim=-1))
        torch.testing.assert_close(logits, oracle["logits"], atol=1e-3, rtol=0)
        torch.testing.assert_close(padded, oracle["pad_logits"], atol=1e-3, rtol=0)
        assert torch.equal(sequences, oracle["greedy_sequences"]), case["name"]
        loaded += 1
    assert loaded >= 7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["tied", "untied", "one key/value head for all", "heads wider than the model"])
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    ours = make(tmp_path / "ours", **KINDS[kind])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    again = load_model(tmp_path / "theirs")
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, ours(IDS), atol=1e-4, rtol=0)
        assert torch.equal(again(IDS), ours(IDS))
    shutil.rmtree(tmp_path / "theirs")
