"""Qwen2 and Qwen2.5: biases on q, k, v; a sliding window in the upper layers if switched on."""

from __future__ import annotations

from typing import Any

from workers.models.config import ConfigReader, ModelConfig


def read_config(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Options of a Qwen2 model."""
    shared: dict[str, Any] = reader.shared() | {
        "attention_bias": True,
        "windows": qwen_windows(reader),
    }
    return ModelConfig(architecture=architecture, **shared)


def qwen_windows(reader: ConfigReader) -> tuple[int, ...]:
    """Windows of the Qwen families: none unless `use_sliding_window`, then from `max_window_layers`
    on.
    """
    num_layers = reader.integer("num_hidden_layers")
    if not reader.flag("use_sliding_window", default=False):
        return (0,) * num_layers
    return reader.layer_windows(default_full_layers=reader.integer("max_window_layers", 28))
