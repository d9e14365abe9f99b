"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from workers.models.config import ConfigReader, ModelConfig


def read_config(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Options of a Mistral model."""
    shared: dict[str, Any] = reader.shared() | {
        "windows": reader.layer_windows(default_full_layers=0)
    }
    return ModelConfig(architecture=architecture, **shared)
