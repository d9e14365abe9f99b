"""The table of architectures. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from workers.errors import ModelError
from workers.models import llama, mistral, qwen2, qwen3
from workers.models.config import ConfigReader, ModelConfig
from workers.models.decoder import DecoderModel, WeightedModel


class ReadConfig(Protocol):
    """Reads and checks what config.json says of one family."""

    def __call__(self, architecture: str, reader: ConfigReader) -> ModelConfig: ...


class Build(Protocol):
    """Makes a model with uninitialised weights. On the meta device it only has shapes."""

    def __call__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> WeightedModel: ...


class Family(NamedTuple):
    """How a model of one architecture is read and built."""

    architecture: str
    read: ReadConfig
    build: Build = DecoderModel

    def read_config(self, raw: Mapping[str, object]) -> ModelConfig:
        """The checked config.

        Raises:
            ModelError: values that cannot be, or that are not supported; names key and value.
        """
        if raw.get("quantization_config"):
            raise ModelError(
                "config.json has a quantization_config; only unquantised weights are supported"
            )
        return self.read(self.architecture, ConfigReader(raw))


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.architecture: family
        for family in (
            Family("LlamaForCausalLM", llama.read_config),
            Family("MistralForCausalLM", mistral.read_config),
            Family("Qwen2ForCausalLM", qwen2.read_config),
            Family("Qwen3ForCausalLM", qwen3.read_config),
        )
    }
)


def find_family(raw: Mapping[str, object]) -> Family:
    """The family of a config.json.

    Raises:
        ModelError: the architecture is not supported.
    """
    architectures = raw.get("architectures")
    names: list[object] = architectures if isinstance(architectures, list) else []
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    raise ModelError(
        f"the model's architecture is {architectures!r}; supported are {', '.join(FAMILIES)}"
    )
