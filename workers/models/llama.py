"""Llama (Llama 2 and 3, SmolLM2): the shared layers as they are, biases where the config asks."""

from __future__ import annotations

from typing import Any

from workers.models.config import ConfigReader, ModelConfig


def read_config(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Options of a Llama model."""
    bias = reader.flag("attention_bias", default=False)
    shared: dict[str, Any] = reader.shared() | {
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": reader.flag("mlp_bias", default=False),
    }
    return ModelConfig(architecture=architecture, **shared)
