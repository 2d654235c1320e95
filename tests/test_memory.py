"""Will a run fit: the estimate against hand-counted shapes and a measured step, and the error that names what to lower.

Run: pytest tests/test_memory.py
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import tiny_model

import grpo.memory
from grpo.config import Config, load_config
from grpo.memory import check_memory, estimate_memory, per_layer
from model.config import Qwen2Config
from model.lora import add_lora
from model.qwen2 import Qwen2

ROOT = Path(__file__).resolve().parents[1]
CONFIG = replace(
    Config(),
    grpo=replace(Config().grpo, questions_per_step=2, num_generations=3, max_completion_length=5, micro_batch_size=1),
    eval=replace(Config().eval, batch_size=2),
)


def test_the_parts_by_hand():
    model = tiny_model()
    c, n = model.config, sum(p.numel() for p in model.parameters())
    parts = estimate_memory(model, CONFIG, 7)
    assert (parts["weights"], parts["training"], parts["reference"]) == (4 * n, 12 * n, 0)
    # 2 prompts of 7 and 6 rows of 5 tokens: keys and values of every layer; prefill; logits of 6 rows
    cache = (14 + 30) * 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4
    assert parts["sampling"] == cache + 14 * per_layer(c) * 4 + 10 * 4 * 6 * c.vocab_size
    # an evaluation: 2 rows, a prompt each
    fewer = 20 * 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4 + 10 * 4 * 4 * c.vocab_size
    assert parts["sampling"] - parts["evaluation"] == fewer
    # one tree of 7 + 3 x 5 tokens; 15 scored positions
    tree = 22 * (c.num_hidden_layers * per_layer(c) + c.num_hidden_layers * c.hidden_size) * 4
    assert parts["update"] == tree + 5 * 4 * 15 * c.vocab_size
    assert parts["peak"] == 16 * n + max(parts["sampling"], parts["update"])


def test_lora_a_reference_checkpointing_and_smaller_micro_batches_count_as_they_should():
    model = tiny_model()
    plain = estimate_memory(model, CONFIG, 7)
    with_kl = replace(CONFIG, grpo=replace(CONFIG.grpo, beta=0.1))
    assert estimate_memory(model, with_kl, 7)["reference"] == plain["weights"]
    more = replace(CONFIG, grpo=replace(CONFIG.grpo, micro_batch_size=2))
    assert estimate_memory(model, more, 7)["update"] == 2 * plain["update"]
    model.gradient_checkpointing = True
    assert estimate_memory(model, CONFIG, 7)["update"] < plain["update"]
    add_lora(model, 2, 4)
    lora = estimate_memory(model, replace(with_kl, model=replace(with_kl.model, lora_r=2)), 7)
    assert lora["reference"] == 0  # the model with its adapter off
    assert lora["training"] < plain["training"]


def test_what_does_not_fit_is_refused_with_what_to_lower(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(grpo.memory, "available_memory", lambda device: 1e12)
    assert check_memory(model, CONFIG, 10).startswith("about 0.0")
    monkeypatch.setattr(grpo.memory, "available_memory", lambda device: 1000.0)
    with pytest.raises(ValueError, match=r"are free: lower grpo.micro_batch_size.*gradient_checkpointing, or use LoRA"):
        check_memory(model, CONFIG, 10)
    many = replace(CONFIG, grpo=replace(CONFIG.grpo, questions_per_step=5000))
    with pytest.raises(
        ValueError, match=r"lower grpo.questions_per_step, num_generations or max_completion_length, or use LoRA"
    ):
        check_memory(model, many, 10)
    with pytest.raises(ValueError, match=r"lower eval.batch_size or grpo.max_completion_length, or use LoRA"):
        check_memory(model, replace(CONFIG, eval=replace(CONFIG.eval, batch_size=5000)), 10)
    monkeypatch.setattr(grpo.memory, "available_memory", lambda device: None)  # the system does not say
    check_memory(model, CONFIG, 10)


QWEN = {  # Qwen2.5-Coder: D, F, layers, H, K, E
    "0.5B": (896, 4864, 24, 14, 2, 64),
    "1.5B": (1536, 8960, 28, 12, 2, 128),
}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ("spider_qwen2.5-coder-0.5b", "0.5B"),
        ("spider_qwen2.5-coder-1.5b", "1.5B"),
        ("bird_qwen2.5-coder-0.5b", "0.5B"),
        ("published_recipe", "0.5B"),
        ("published_recipe", "1.5B"),
    ],
)
def test_the_configs_for_one_card_of_24_gb_fit_it(config, size):
    """With the longest prompts that the config lets in; the weights are there, on no device."""
    config = load_config(ROOT / "configs" / f"{config}.toml")
    hidden, *sizes = QWEN[size]
    with torch.device("meta"):
        model = Qwen2(Qwen2Config(151_936, hidden, *sizes, tie_word_embeddings=True)).bfloat16()
        add_lora(model, config.model.lora_r, config.model.lora_alpha)
    model.gradient_checkpointing = config.model.gradient_checkpointing
    assert 1e9 < estimate_memory(model, config, config.data.max_prompt_length)["peak"] < 20e9


STEP = """
import re, sys
from dataclasses import replace
from types import SimpleNamespace
import torch
from grpo.config import Config
from grpo.memory import estimate_memory
from grpo.rollout import rollout
from grpo.update import make_optimizer, update_policy
from model.config import Qwen2Config
from model.qwen2 import Qwen2

torch.set_num_threads(1)
model = Qwen2(Qwen2Config(16_000, 384, 1056, 4, 6, 2, 64))
model.init_weights(torch.Generator().manual_seed(0))
grpo = replace(Config().grpo, questions_per_step=2, num_generations=8, max_completion_length=12, micro_batch_size=2)
config = replace(Config(), grpo=replace(grpo, epsilon_high=0.2), eval=replace(Config().eval, batch_size=2))
generator = torch.Generator().manual_seed(1)
prompts = [torch.randint(0, 16_000, (300,), generator=generator).tolist() for _ in range(2)]
tokenizer = SimpleNamespace(eos_ids=(16_001,), vocab_size=16_000, decode=lambda ids: "")
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
rollouts, _ = rollout(model, tokenizer, prompts, 8, max_completion_length=12, generator=generator)
optimizer = make_optimizer(model.parameters(), config.grpo)
update_policy(model, optimizer, rollouts, torch.randn(2, 8, generator=generator), config.grpo, vocab_size=16_000)
used = peak() - before
need = estimate_memory(model, config, 300)
print(used, need["peak"] - need["weights"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_estimate_is_within_a_third_of_a_measured_step():
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    used, estimated = map(float, done.stdout.split())
    assert 0.67 < used / estimated < 1.33, f"{used / 1e6:.0f} MB measured, {estimated / 1e6:.0f} MB estimated"


def test_the_systems_free_memory_is_a_number():
    assert available_or_none() is None or available_or_none() > 1e8


def available_or_none():
    return grpo.memory.available_memory(torch.device("cpu"))
