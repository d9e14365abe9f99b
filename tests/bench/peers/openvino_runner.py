"""OpenVINO GenAI's continuous batching, in its own environment.

int8 is weights of 8 bits with activations quantised by group as they come, and keys and values of
8 bits, which served it best.
Options: max_num_batched_tokens, max_num_seqs, dynamic_split_fuse (0 or 1), group (of dynamic
quantisation, int8 alone), and any property of the plugin in capitals, such as KV_CACHE_PRECISION.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from tests.bench.peers.protocol import Item, Settings, serve

GIB = 1 << 30
MAX_BATCHED_TOKENS = 512
MAX_SEQS = 256
GROUP = 64


class OpenVinoSide:
    """Its prefix cache has no reset, so with one each run has a new pipeline."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pipeline = self._load()
        self._used = False

    def _load(self) -> ContinuousBatchingPipeline:
        settings = self._settings
        config = SchedulerConfig()
        config.cache_size = settings.kv_bytes // GIB
        config.max_num_batched_tokens = settings.number(
            "max_num_batched_tokens", MAX_BATCHED_TOKENS
        )
        config.max_num_seqs = settings.number("max_num_seqs", MAX_SEQS)
        config.dynamic_split_fuse = bool(settings.number("dynamic_split_fuse", 1))
        config.enable_prefix_caching = settings.prefix_caching
        return ContinuousBatchingPipeline(settings.model, config, "CPU", _properties(settings))

    def reset(self) -> None:
        if self._used and self._settings.prefix_caching:
            del self._pipeline
            self._pipeline = self._load()
        self._used = True

    def generate(self, items: Sequence[Item]) -> list[list[int]]:
        results = self._pipeline.generate(
            [ov.Tensor(np.array([item.prompt_token_ids], dtype=np.int64)) for item in items],
            [_forced(item.num_output_tokens) for item in items],
        )
        return [list(result.m_generation_ids[0]) for result in results]


def _properties(settings: Settings) -> dict[str, object]:
    precision = "f32" if settings.dtype == "float32" else "bf16"
    properties: dict[str, object] = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": settings.threads,
    }
    if settings.dtype == "int8":
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = settings.number("group", GROUP)
        properties["KV_CACHE_PRECISION"] = "u8"
    properties |= {name: value for name, value in settings.options.items() if name.isupper()}
    return properties


def _forced(num_tokens: int) -> GenerationConfig:
    config = GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    serve(OpenVinoSide)
