"""From safetensors files to fused weights, tensor by tensor.

Legend as in `layers.py`. Every tensor is read once, straight into its place, so memory peaks at the
model's size and one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.errors import ModelError
from workers.models.config import ModelConfig
from workers.models.layers import LayerWeights, ModelWeights

IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
"""Buffers that old exports keep beside the weights."""


class TensorFiles:
    """The tensors of a model by name, over its safetensors files; remembers which were taken."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        self._where: dict[str, Any] = {}
        self._left: set[str] = set()
        for path in files:
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as fault:
                raise ModelError(f"{path.name} cannot be read: {fault}; fetch it again") from fault
            self._where.update(dict.fromkeys(handle.keys(), handle))
        self._left = set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...], into: Tensor) -> None:
        """Copy a tensor into its place.

        Raises:
            ModelError: missing, or of another shape.
        """
        if name not in self._where:
            raise ModelError(f"the weights have no tensor {name}; the model's files do not match")
        tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"tensor {name} has shape {tuple(tensor.shape)}; config.json asks for {shape}"
            )
        if not tensor.is_floating_point():
            raise ModelError(
                f"tensor {name} is {tensor.dtype}; quantised weights are not supported"
            )
        into.copy_(tensor)
        self._left.discard(name)

    def ignore(self, name: str) -> None:
        self._left.discard(name)

    def unexpected(self) -> Iterator[str]:
        """Names that nothing asked for."""
        return (name for name in sorted(self._left) if not name.endswith(IGNORED_SUFFIXES))


def load_weights(
    files: Sequence[Path], config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Read a model's weights.

    Raises:
        ModelError: a tensor is missing, unexpected, misshaped or quantised; names it.
    """
    with ExitStack() as stack:
        loader = _Loader(TensorFiles(files, stack), config, dtype, device)
        weights = loader.model()
        extra = list(loader.tensors.unexpected())
    if extra:
        raise ModelError(
            f"the weights have {len(extra)} tensors that a {config.architecture} does not, such as "
            f"{extra[0]}; config.json and the weights do not match"
        )
    return weights


class _Loader:
    """Knows which named tensors make which fused weight."""

    def __init__(
        self, tensors: TensorFiles, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tensors = tensors
        self._config = config
        self._dtype = dtype
        self._device = device

    def model(self) -> ModelWeights:
        config = self._config
        vocab = (config.vocab_size, config.hidden_size)
        embedding = self._matrix([("model.embed_tokens.weight", vocab[0])], vocab[1])
        layers = [self._layer(f"model.layers.{index}") for index in range(config.num_layers)]
        norm = self._vector([("model.norm.weight", config.hidden_size)])
        if config.tie_embeddings:
            self.tensors.ignore("lm_head.weight")
            return ModelWeights(embedding, layers, norm, embedding)
        return ModelWeights(
            embedding, layers, norm, self._matrix([("lm_head.weight", vocab[0])], vocab[1])
        )

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        hidden, wide, size = config.hidden_size, config.intermediate_size, config.head_size
        query, kv = config.num_heads * size, config.num_kv_heads * size
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [(f"{attn}.q_proj", query), (f"{attn}.k_proj", kv), (f"{attn}.v_proj", kv)]
        gate_up = [(f"{mlp}.gate_proj", wide), (f"{mlp}.up_proj", wide)]
        out, down = [(f"{attn}.o_proj", hidden)], [(f"{mlp}.down_proj", hidden)]
        return LayerWeights(
            input_norm_D=self._vector([(f"{prefix}.input_layernorm.weight", hidden)]),
            qkv_QD=self._fused(qkv, hidden),
            qkv_bias_Q=self._bias(qkv, wanted=config.attention_bias),
            q_norm_H=self._head_norm(f"{attn}.q_norm.weight"),
            k_norm_H=self._head_norm(f"{attn}.k_norm.weight"),
            out_DX=self._fused(out, query),
            out_bias_D=self._bias(out, wanted=config.output_bias),
            mlp_norm_D=self._vector([(f"{prefix}.post_attention_layernorm.weight", hidden)]),
            gate_up_2FD=self._fused(gate_up, hidden),
            gate_up_bias_2F=self._bias(gate_up, wanted=config.mlp_bias),
            down_DF=self._fused(down, wide),
            down_bias_D=self._bias(down, wanted=config.mlp_bias),
        )

    def _head_norm(self, name: str) -> Tensor | None:
        return self._vector([(name, self._config.head_size)]) if self._config.qk_norm else None

    def _fused(self, parts: list[tuple[str, int]], width: int) -> Tensor:
        return self._matrix([(f"{name}.weight", rows) for name, rows in parts], width)

    def _bias(self, parts: list[tuple[str, int]], *, wanted: bool) -> Tensor | None:
        return self._vector([(f"{name}.bias", rows) for name, rows in parts]) if wanted else None

    def _matrix(self, parts: list[tuple[str, int]], width: int) -> Tensor:
        return self._stack(parts, (width,))

    def _vector(self, parts: list[tuple[str, int]]) -> Tensor:
        return self._stack(parts, ())

    def _stack(self, parts: list[tuple[str, int]], rest: tuple[int, ...]) -> Tensor:
        """One tensor with the parts below each other."""
        total = sum(rows for _, rows in parts)
        whole = torch.empty((total, *rest), dtype=self._dtype, device=self._device)
        at = 0
        for name, rows in parts:
            self.tensors.take(name, (rows, *rest), whole[at : at + rows])
            at += rows
        return whole
