"""The table of architectures. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from workers.errors import ModelError
from workers.models import llama, mistral, qwen2, qwen3
from workers.models.config import ConfigReader, ModelConfig

FAMILIES: Mapping[str, Callable[[str, ConfigReader], ModelConfig]] = MappingProxyType(
    {
        "LlamaForCausalLM": llama.read_config,
        "MistralForCausalLM": mistral.read_config,
        "Qwen2ForCausalLM": qwen2.read_config,
        "Qwen3ForCausalLM": qwen3.read_config,
    }
)


def read_config(raw: Mapping[str, object]) -> ModelConfig:
    """The checked config of a model.

    Raises:
        ModelError: unknown architecture, or values that cannot be; names key and value.
    """
    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name](name, ConfigReader(raw))
    raise ModelError(
        f"the model's architecture is {architectures!r}; supported are {', '.join(FAMILIES)}"
    )
