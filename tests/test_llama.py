"""A Llama checkpoint as a Qwen2 one (benchmarks/llama_to_qwen2.py): the same logits, and other models refused.

Run: pytest -m slow tests/test_llama.py, with transformers installed
"""

import json

import pytest
import torch

from benchmarks.llama_to_qwen2 import convert
from model import load_model


@pytest.mark.slow
def test_a_llama_with_zero_biases_is_a_qwen2(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "rope_theta": 5e4, "tie_word_embeddings": True}
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    llama.save_pretrained(tmp_path / "llama")
    convert(tmp_path / "llama", tmp_path / "qwen2")
    ids = torch.randint(0, 300, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "qwen2")(ids), llama(ids).logits, atol=1e-5, rtol=1e-5)


def test_anything_but_a_plain_llama_is_refused(tmp_path):
    for raw in ({"model_type": "mistral"}, {"model_type": "llama", "attention_bias": True}):
        (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        with pytest.raises(ValueError, match="expected a plain llama"):
            convert(tmp_path, tmp_path / "out")
