"""The layers that all families share, as functions over a model's weights.

Legend: T tokens of a step, D hidden size, F intermediate size, N query heads, K key-value heads, H
    head size, Q = (N + 2 K) H, V vocabulary, S sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.attention import StepInput, attend
from workers.kv import KVPool, LayerKV
from workers.models.config import ModelConfig, RopeConfig

ROW_TILE = 32
"""Rows of every matrix product in deterministic mode."""


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Projections that read the same input are fused: one pass over it."""

    input_norm_D: Tensor
    qkv_QD: Tensor
    qkv_bias_Q: Tensor | None
    q_norm_H: Tensor | None
    k_norm_H: Tensor | None
    out_DX: Tensor
    out_bias_D: Tensor | None
    mlp_norm_D: Tensor
    gate_up_2FD: Tensor
    gate_up_bias_2F: Tensor | None
    down_DF: Tensor
    down_bias_D: Tensor | None


@dataclass(slots=True)
class ModelWeights:
    """All of a model; `head_VD` is `embedding_VD` itself when they are tied."""

    embedding_VD: Tensor
    layers: list[LayerWeights]
    norm_D: Tensor
    head_VD: Tensor


class CausalLM:
    """A decoder-only language model over a KV pool.

    Args:
        config: sizes and options.
        weights: tensors on their device.
        deterministic: matrix products run on tiles of fixed height, so that a row's result does not
            depend on how many others there are.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, *, deterministic: bool = False
    ) -> None:
        self.config = config
        self.weights = weights
        self._deterministic = deterministic
        device = weights.embedding_VD.device
        self._frequencies_H = rope_frequencies(config.rope, config.head_size).to(device)

    def forward(self, step: StepInput, pool: KVPool) -> Tensor:
        """Compute a step: keys and values go into the pool.

        Returns:
            (S, V) float32 logits of the sampled tokens.
        """
        x_TD = F.embedding(step.token_ids_T, self.weights.embedding_VD)
        cos_TH, sin_TH = self._rotation(step.positions_T, x_TD.dtype)
        for index, layer in enumerate(self.weights.layers):
            window = self.config.windows[index]
            h_TD = self._norm(x_TD, layer.input_norm_D)
            x_TD = x_TD + self._attention(
                h_TD, layer, cos_TH, sin_TH, pool.layers[index], step, window
            )
            x_TD = x_TD + self._mlp(self._norm(x_TD, layer.mlp_norm_D), layer)
        last_SD = self._norm(x_TD.index_select(0, step.sampled), self.weights.norm_D)
        return self._linear(last_SD, self.weights.head_VD, None).float()

    def _attention(
        self,
        h_TD: Tensor,
        layer: LayerWeights,
        cos_TH: Tensor,
        sin_TH: Tensor,
        kv: LayerKV,
        step: StepInput,
        window: int,
    ) -> Tensor:
        config = self.config
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        qkv_TXH = self._linear(h_TD, layer.qkv_QD, layer.qkv_bias_Q).unflatten(-1, (-1, size))
        q_TNH, k_TKH, v_TKH = qkv_TXH.split((heads, kv_heads, kv_heads), 1)
        if layer.q_norm_H is not None and layer.k_norm_H is not None:
            q_TNH, k_TKH = self._norm(q_TNH, layer.q_norm_H), self._norm(k_TKH, layer.k_norm_H)
        q_TNH, k_TKH = rotate(q_TNH, cos_TH, sin_TH), rotate(k_TKH, cos_TH, sin_TH)
        out_TNH = attend(q_TNH, k_TKH, v_TKH, kv, step, window=window, alone=self._deterministic)
        return self._linear(out_TNH.flatten(1), layer.out_DX, layer.out_bias_D)

    def _mlp(self, h_TD: Tensor, layer: LayerWeights) -> Tensor:
        gate_TF, up_TF = self._linear(h_TD, layer.gate_up_2FD, layer.gate_up_bias_2F).chunk(2, -1)
        return self._linear(F.silu(gate_TF) * up_TF, layer.down_DF, layer.down_bias_D)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_eps)

    def _linear(self, x_TX: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._deterministic:
            return F.linear(x_TX, weight, bias)
        num_rows = x_TX.shape[0]
        padded = F.pad(x_TX, (0, 0, 0, -num_rows % ROW_TILE))
        tiles = [F.linear(tile.contiguous(), weight, bias) for tile in padded.split(ROW_TILE)]
        return torch.cat(tiles)[:num_rows]

    def _rotation(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each token's angles, (T, 1, H)."""
        angles = positions_T[:, None].float() * self._frequencies_H[None, :]
        both = torch.cat((angles, angles), -1)[:, None, :]
        return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotary embedding, the two halves of a head being the planes' two axes."""
    first, second = x_TNH.chunk(2, -1)
    return x_TNH * cos_TH + torch.cat((-second, first), -1) * sin_TH


def rope_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Radians per position of each plane, (H / 2,) float32."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    base = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(base, rope)
    return base


def _llama3_frequencies(base: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths stretched by `factor`, short ones kept, a linear ramp between (Llama 3.1)."""
    turns = rope.original_len * base / (2 * pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return base / rope.factor * (1 - ramp) + base * ramp
