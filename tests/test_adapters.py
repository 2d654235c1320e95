"""LoRA adapters in PEFT's format (with step 9): save, load, and refuse what this decoder cannot represent.

Built here: model/adapters.py `save_adapter`, `load_adapter`.
Rule: `base_model.model.<module>.lora_A.weight` (R, in), `.lora_B.weight` (out, R); scaling alpha / r, or, with
use_rslora, alpha / sqrt(r).
A key of the config that is not known to be harmless must be empty.
Run: pytest tests/test_adapters.py
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.adapters import load_adapter, save_adapter
from model.config import CheckpointError, Qwen2Config
from model.lora import LINEAR_NAMES, add_lora, lora_modules, lora_parameters, merge_lora
from model.qwen2 import Qwen2
from model.weights import load_model, save_model

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
DOWN_A = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


def tiny() -> Qwen2:
    """The same random model at every call."""
    model = Qwen2(Qwen2Config(20, 16, 12, 2, 4, 2, 4))
    model.init_weights(torch.Generator().manual_seed(1), std=0.4)
    return model


def adapted(r: int = 2, alpha: float = 6.0, targets: tuple[str, ...] = LINEAR_NAMES, rslora: bool = False) -> Qwen2:
    model = tiny()
    add_lora(model, r, alpha, targets, rslora)
    with torch.no_grad():
        for parameter in lora_parameters(model).values():
            parameter.normal_()
    return model


def edit(folder: Path, **changes) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def edit_tensors(folder: Path, change) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    file.unlink()
    save_file(change(tensors), file)


def test_files_are_in_pefts_format(tmp_path):
    """r 2, scaling 3: lora_alpha 6. A is (R, in) and B (out, R): down_proj goes from 12 to 16."""
    save_adapter(adapted(targets=("down_proj", "q_proj")), tmp_path, "Qwen/Qwen2.5-Coder-0.5B")
    config = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    wanted = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 6, "bias": "none"}
    wanted |= {"target_modules": ["down_proj", "q_proj"], "base_model_name_or_path": "Qwen/Qwen2.5-Coder-0.5B"}
    assert wanted.items() <= config.items()
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2  # layers x targets x matrices
    assert tensors[DOWN_A].shape == (2, 12)
    assert tensors[DOWN_A.replace("lora_A", "lora_B")].shape == (16, 2)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_a_loaded_adapter_adds_scaling_times_b_a_entry_by_entry(tmp_path):
    """W'[i][j] = W[i][j] + alpha / r * sum_k B[i][k] A[k][j], with alpha / r = 6 / 2 = 3."""
    save_adapter(adapted(), tmp_path)
    model = tiny()
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    load_adapter(model, tmp_path)
    a = load_file(tmp_path / "adapter_model.safetensors")[DOWN_A].tolist()
    b = load_file(tmp_path / "adapter_model.safetensors")[DOWN_A.replace("lora_A", "lora_B")].tolist()
    merge_lora(model)
    after = model.model.layers[0].mlp.down_proj.weight
    for i in range(16):
        for j in range(12):
            difference = 3 * sum(b[i][k] * a[k][j] for k in range(2))
            assert abs(after[i, j].item() - before[i, j].item() - difference) < 1e-5


@pytest.mark.parametrize("targets", [LINEAR_NAMES, ("q_proj", "v_proj"), ("o_proj",)])
@pytest.mark.parametrize("rslora", [False, True])
def test_save_and_load_return_the_same_adapter(tmp_path, targets, rslora):
    model = adapted(4, 6.0, targets, rslora)
    save_adapter(model, tmp_path)
    again = tiny()
    load_adapter(again, tmp_path)
    ours, theirs = lora_parameters(model), lora_parameters(again)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * 2 * len(targets)
    assert all(torch.equal(ours[name], theirs[name]) and theirs[name].requires_grad for name in ours)
    assert torch.equal(model(IDS), again(IDS))


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 16 / 8), (True, 16 / math.sqrt(8))])
def test_scaling_is_alpha_over_r_or_over_its_root(tmp_path, rslora, scaling):
    save_adapter(adapted(r=8), tmp_path)
    edit(tmp_path, lora_alpha=16, use_rslora=rslora)
    model = tiny()
    load_adapter(model, tmp_path)
    assert all(layer.scaling == scaling for _, layer in lora_modules(model))


def test_what_says_nothing_about_the_function_is_ignored(tmp_path):
    """Dropout acts in training only; half-precision files become float32; "all-linear" is the seven names."""
    model = adapted()
    save_adapter(model, tmp_path)
    edit(tmp_path, lora_dropout=0.5, inference_mode=False, target_modules="all-linear", init_lora_weights="gaussian")
    edit(tmp_path, rank_pattern={}, layers_to_transform=None, loftq_config={}, megatron_core="x", peft_version="9")
    edit_tensors(tmp_path, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    state = torch.get_rng_state()
    again = tiny()
    rng = torch.get_rng_state()
    load_adapter(again, tmp_path)
    assert torch.equal(rng, torch.get_rng_state()), "loading draws from the run's generator"
    torch.set_rng_state(state)
    for name, parameter in lora_parameters(again).items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, model.get_parameter(name).bfloat16().float())


def test_targets_may_be_written_as_paths_if_they_cover_every_layer(tmp_path):
    """PEFT writes "all-linear" of a small model as the full path of each module."""
    save_adapter(adapted(targets=("q_proj", "up_proj")), tmp_path)
    paths = [f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.up_proj")]
    edit(tmp_path, target_modules=paths)
    model = tiny()
    load_adapter(model, tmp_path)
    assert sorted(name for name, _ in lora_modules(model)) == sorted(paths)
    edit(tmp_path, target_modules=paths[:3])
    with pytest.raises(CheckpointError, match=r"target_modules: expected names that cover every layer"):
        load_adapter(tiny(), tmp_path)


REFUSED_KEYS = [
    ("peft_type", "LOHA"), ("peft_type", None), ("bias", "all"), ("bias", "lora_only"), ("lora_bias", True),
    ("use_dora", True), ("modules_to_save", ["lm_head"]), ("rank_pattern", {"q_proj": 4}),
    ("alpha_pattern", {"q_proj": 4}), ("layers_to_transform", [1]), ("layers_to_transform", 0),
    ("layers_pattern", "layers"), ("fan_in_fan_out", True), ("init_lora_weights", "pissa"),
    ("init_lora_weights", "loftq"), ("target_modules", r".*\.q_proj"), ("target_modules", []),
    ("target_modules", ["q_proj", "lm_head"]),
    ("target_modules", ["proj"]), ("target_modules", [["q_proj"]]), ("target_modules", None),
    ("target_parameters", ["w"]), ("trainable_token_indices", [1]), ("layer_replication", [[0, 1]]),
    ("exclude_modules", ["q_proj"]), ("use_qalora", True), ("some_later_method", {"x": 1}), ("r", 0), ("r", True),
    ("r", "8"), ("r", None), ("lora_alpha", 0), ("lora_alpha", "16"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), REFUSED_KEYS)
def test_other_kinds_of_adapter_are_refused_and_the_model_is_untouched(tmp_path, key, value):
    save_adapter(adapted(), tmp_path)
    edit(tmp_path, **{key: value})
    model = tiny()
    with pytest.raises(CheckpointError, match=rf"adapter_config\.json: {key}: expected .*, found "):
        load_adapter(model, tmp_path)
    assert not list(lora_modules(model))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_config_that_does_not_say_its_kind_is_refused(tmp_path):
    save_adapter(adapted(), tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 6}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"peft_type: expected 'LORA', found None"):
        load_adapter(tiny(), tmp_path)


def test_an_adapter_on_the_output_head_is_refused(tmp_path):
    save_adapter(adapted(), tmp_path)
    edit(tmp_path, target_modules=[*LINEAR_NAMES, "lm_head"])
    untied = Qwen2(Qwen2Config(20, 16, 12, 2, 4, 2, 4, tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=r"target_modules: expected .* out of q_proj, .*, found .*lm_head"):
        load_adapter(untied, tmp_path)


def drop_one(tensors: dict) -> dict:
    return {name: tensor for name, tensor in tensors.items() if name != DOWN_A}


REFUSED_TENSORS = {
    "missing": (drop_one, r"expected shape \(2, 12\), found nothing"),
    "rank": (lambda tensors: tensors | {DOWN_A: torch.ones(3, 12)}, r"expected shape \(2, 12\), found \(3, 12\)"),
    "magnitude": (
        lambda tensors: tensors | {DOWN_A.replace("A.weight", "magnitude_vector"): torch.ones(16)},
        "no such",
    ),
    "base layer": (lambda tensors: tensors | {DOWN_A.replace("lora_A", "base_layer"): torch.ones(16, 12)}, "no such"),
    "third layer": (lambda tensors: tensors | {DOWN_A.replace("0", "2"): torch.ones(2, 12)}, "no such"),
}


@pytest.mark.parametrize("kind", REFUSED_TENSORS)
def test_every_matrix_is_accounted_for(tmp_path, kind):
    change, message = REFUSED_TENSORS[kind]
    save_adapter(adapted(), tmp_path)
    edit_tensors(tmp_path, change)
    model = tiny()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: base_model.*" + message):
        load_adapter(model, tmp_path)
    assert not list(lora_modules(model))


def test_a_folder_without_an_adapter_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: file: expected a readable JSON object"):
        load_adapter(tiny(), tmp_path)
    save_adapter(adapted(), tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: file: .*FileNotFoundError"):
        load_adapter(tiny(), tmp_path)


def test_a_model_without_an_adapter_has_nothing_to_save(tmp_path):
    with pytest.raises(ValueError, match="has no LoRA adapter to save"):
        save_adapter(tiny(), tmp_path)


def test_adapters_give_the_logits_that_peft_gave(shared):
    root = shared / "checkpoints"
    for case in json.loads((root / "adapters" / "manifest.json").read_text(encoding="utf-8"))["cases"]:
        folder, base = root / "adapters" / case["name"], root / case["base"]
        model = load_model(base)
        if case["expect"] != "load":
            with pytest.raises(CheckpointError, match=r"adapter_config\.json: .*: expected .*, found "):
                load_adapter(model, folder)
            continue
        load_adapter(model, folder)
        oracle = {name: torch.from_numpy(array) for name, array in np.load(folder / "oracle.npz").items()}
        padded = {name: torch.from_numpy(array) for name, array in np.load(base / "oracle.npz").items()}
        ids, mask = padded["pad_input_ids"], padded["pad_attention_mask"]
        with torch.no_grad():
            torch.testing.assert_close(model(oracle["input_ids"]), oracle["logits_adapter"], atol=2e-3, rtol=0)
            logits = model(ids, mask) * mask[..., None]
            torch.testing.assert_close(logits, oracle["pad_logits_adapter"], atol=2e-3, rtol=0)
            while ids.shape[1] < oracle["greedy_sequences_adapter"].shape[1]:
                ids = torch.cat([ids, model(ids, mask)[:, -1:].argmax(dim=-1)], dim=1)
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            assert torch.equal(ids, oracle["greedy_sequences_adapter"])
            merge_lora(model)
            torch.testing.assert_close(model(oracle["input_ids"]), oracle["logits_merged"], atol=2e-3, rtol=0)
        for name in (name for name in oracle if name.startswith("merged.")):
            merged = model.get_parameter(name.removeprefix("merged."))
            torch.testing.assert_close(merged, oracle[name], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_reads_what_we_write_and_we_read_what_it_writes(tmp_path, rslora):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    save_model(tiny(), tmp_path / "base")
    model = adapted(4, 6.0, rslora=rslora)
    save_adapter(model, tmp_path / "ours", str(tmp_path / "base"))

    def base():
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)

    theirs = peft.PeftModel.from_pretrained(base(), tmp_path / "ours")
    config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=rslora, target_modules="all-linear", lora_dropout=0.1)
    fresh = peft.get_peft_model(base(), config)
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, model(IDS), atol=1e-4, rtol=0)
        for name, parameter in fresh.named_parameters():
            if "lora_" in name:
                parameter.normal_()
        fresh.eval().save_pretrained(tmp_path / "theirs")
        again = tiny()
        load_adapter(again, tmp_path / "theirs")
        torch.testing.assert_close(again(IDS), fresh(IDS).logits, atol=1e-4, rtol=0)
        merge_lora(again)
        save_model(again, tmp_path / "merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(merged(IDS).logits, fresh(IDS).logits, atol=1e-3, rtol=0)
