"""A Qwen2 decoder from scratch: weights, tokenizer, adapters, sampling. Knows torch; knows neither GRPO nor SQL."""

from model.adapters import load_adapter, save_adapter
from model.config import CheckpointError, Qwen2Config
from model.lora import add_lora
from model.qwen2 import Qwen2
from model.tokenizer import load_tokenizer
from model.weights import load_model, save_model

__all__ = [
    "CheckpointError",
    "Qwen2",
    "Qwen2Config",
    "add_lora",
    "load_adapter",
    "load_model",
    "load_tokenizer",
    "save_adapter",
    "save_model",
]
