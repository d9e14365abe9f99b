"""Qwen3: q and k heads normalised before the rotary embedding; biases where the config asks."""

from __future__ import annotations

from typing import Any

from workers.models.config import ConfigReader, ModelConfig
from workers.models.qwen2 import qwen_windows


def read_config(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Options of a Qwen3 model."""
    bias = reader.flag("attention_bias", default=False)
    shared: dict[str, Any] = reader.shared() | {
        "attention_bias": bias,
        "output_bias": bias,
        "qk_norm": True,
        "head_size": reader.integer("head_dim", 128),
        "windows": qwen_windows(reader),
    }
    return ModelConfig(architecture=architecture, **shared)
