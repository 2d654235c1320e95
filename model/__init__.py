"""A Qwen2 decoder from scratch: weights, tokenizer, adapters, sampling. Knows torch; knows neither GRPO nor SQL."""

from model.adapters import load_adapter, save_adapter
from model.config import CheckpointError
from model.tokenizer import load_tokenizer
from model.weights import load_model

__all__ = ["CheckpointError", "load_adapter", "load_model", "load_tokenizer", "save_adapter"]
