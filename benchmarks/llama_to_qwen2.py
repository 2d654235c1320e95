"""A Llama checkpoint as a Qwen2 one: the same decoder, whose q, k and v biases are zero.

    hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir models/smollm2-llama
    python benchmarks/llama_to_qwen2.py models/smollm2-llama models/smollm2-135m

For small real models of that family (SmolLM2 is a Llama); scaled rotary embeddings and attention biases are refused.
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file, save_file

from model.config import read_json
from model.weights import load_model, weight_files

KEPT = """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
max_position_embeddings rms_norm_eps hidden_act rope_theta rope_parameters dtype torch_dtype tie_word_embeddings
bos_token_id eos_token_id""".split()


def convert(source: Path, target: Path) -> None:
    """Write `target` as a Qwen2 folder and load it once; ValueError if `source` is no plain Llama."""
    raw = read_json(source / "config.json")
    odd = [key for key in ("rope_scaling", "attention_bias", "mlp_bias") if raw.get(key)]
    if raw.get("model_type") != "llama" or odd:
        raise ValueError(f"{source}: model_type = {raw.get('model_type')!r}, {odd}; expected a plain llama")
    tensors = {}
    for file in weight_files(source):
        tensors |= {
            name: tensor for name, tensor in load_file(file).items() if not name.endswith("rotary_emb.inv_freq")
        }
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = torch.zeros(len(tensors[name]), dtype=tensors[name].dtype)
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    config |= {key: raw[key] for key in KEPT if key in raw}
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    load_model(target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
