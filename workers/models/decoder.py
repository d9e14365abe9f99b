"""A decoder-only transformer of shared layers.

Legend: T tokens of a batch, S sampled rows, D hidden size, E width of the attention's output, V
vocabulary, A heads of the fused projection, H head size, R rows of KV memory.
"""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from workers.attention import Attention
from workers.kv import KVPool
from workers.models.config import ModelConfig
from workers.models.layers import DecoderLayer, Linear, Make, RMSNorm, Rotary, in_tiles
from workers.models.step import Step, StepLayout, build_step
from workers.models.weights import Place, Places, unique_tensors
from workers.sampling.logits import DenseLogits, Logits
from workers.times import ModelTimes, Stopwatch

TILE_ROWS = 32
"""Rows of a tile in deterministic mode."""


class Model(Protocol):
    """What the torch backend needs of a model."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def weights_bytes(self) -> int:
        """Resident size of the weights."""
        ...

    @property
    def activation_bytes_per_token(self) -> int:
        """Upper estimate of scratch memory per token of a batch."""
        ...

    @property
    def kv_divisions(self) -> int:
        """How many runs of all blocks a layer's KV memory is made of."""
        ...

    def logits(self, layout: StepLayout, pool: KVPool) -> Logits:
        """Run a batch: write its keys and values, and give the logits of the sampled rows."""
        ...

    def times(self) -> ModelTimes | None:
        """Where the time of all calls so far went, that of the logits' own methods included; None
        where the device works by itself and only waiting for it could tell.
        """
        ...


class WeightedModel(Model, Protocol):
    """A model that weight files can be read into."""

    def places(self) -> Places:
        """Where each tensor of the weight files goes."""
        ...

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor that the files may hold is not needed."""
        ...


class DecoderModel:
    """Embedding, layers, norm, head."""

    kv_divisions = 2  # keys and values

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        make = Make(dtype, device)
        self._spent = make.spent
        self.config = config
        self.device = device
        self.tile_rows = TILE_ROWS if deterministic else None
        self.embedding_VD = make(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, layer, make) for layer in range(config.num_layers)]
        self.norm = RMSNorm(make, config.hidden_size, config.rms_eps)
        self.head = Linear(make, 0, 0, bias=False)
        self.head.weight_OI = (
            self.embedding_VD
            if config.tie_embeddings
            else make(config.vocab_size, config.hidden_size)
        )
        # Kept, as mapping 40 MB anew at each step takes longer than filling it.
        self._logits_SV = torch.empty(0, config.vocab_size)
        self.rotary = Rotary(config.rope, config.head_size, make)
        self.attention = Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            dtype=dtype,
            device=device,
            deterministic=deterministic,
        )

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in unique_tensors(self.places()))

    @property
    def activation_bytes_per_token(self) -> int:
        return activation_bytes_per_token(self.config, self.embedding_VD.itemsize)

    def logits(self, layout: StepLayout, pool: KVPool) -> DenseLogits:
        step = build_step(layout, pool, self.device)
        spent, watch = self._spent, Stopwatch(time.perf_counter)
        counted_s = spent.products_s + spent.attention_s
        x_SD = self._forward(step, pool)
        counted_s = spent.products_s + spent.attention_s - counted_s
        spent.rows_s += watch.lap() - counted_s
        products_s = spent.products_s
        logits_SV = in_tiles(self._head, self.tile_rows, x_SD)
        if logits_SV.dtype != torch.float32:
            if len(logits_SV) > len(self._logits_SV):
                self._logits_SV = torch.empty_like(logits_SV, dtype=torch.float32)
            logits_SV = self._logits_SV[: len(logits_SV)].copy_(logits_SV)
        spent.products_s = products_s  # the head's has a name of its own
        spent.head_s += watch.lap()
        return DenseLogits(logits_SV)

    def times(self) -> ModelTimes | None:
        return ModelTimes(*astuple(self._spent)) if self.device.type == "cpu" else None

    def _forward(self, step: Step, pool: KVPool) -> Tensor:
        """The residual stream of the sampled rows behind the last layer. (S, D)"""
        x_TD = functional.embedding(step.token_ids_T, self.embedding_VD)
        tables = self.rotary.tables(step.position_T, step.last_position)
        *inner, last = range(len(self.layers))
        for layer in inner:
            attended_TE = self._attend(layer, x_TD, tables, step, pool)
            x_TD = in_tiles(self.layers[layer].finish, self.tile_rows, x_TD, attended_TE)
        attended_TE = self._attend(last, x_TD, tables, step, pool)
        # Nothing reads the other rows any more.
        rows = x_TD[step.sampled_S], attended_TE[step.sampled_S]
        return in_tiles(self.layers[last].finish, self.tile_rows, *rows)

    def _attend(
        self, index: int, x_TD: Tensor, tables: tuple[Tensor, Tensor], step: Step, pool: KVPool
    ) -> Tensor:
        layer = self.layers[index]
        qkv_TAH = in_tiles(layer.project, self.tile_rows, x_TD, *tables)
        heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        q_TNH, k_TKH, v_TKH = qkv_TAH.split(heads, dim=1)
        kv = pool.layers[index]
        started_s = time.perf_counter()
        attended_TNH = self.attention(q_TNH, k_TKH, v_TKH, kv, step.attention, window=layer.window)
        self._spent.attention_s += time.perf_counter() - started_s
        return attended_TNH.flatten(1)

    def _head(self, x_SD: Tensor) -> Tensor:
        return self.head(self.norm(x_SD))

    def places(self) -> Places:
        places = {"model.embed_tokens.weight": _whole(self.embedding_VD)}
        for index, layer in enumerate(self.layers):
            places.update(layer.places(f"model.layers.{index}"))
        places.update(self.norm.places("model.norm"))
        if not self.config.tie_embeddings:
            places.update(self.head.places("lm_head"))
        return places

    def is_ignored(self, name: str) -> bool:
        tied_head = self.config.tie_embeddings and name == "lm_head.weight"
        return tied_head or name.endswith(".rotary_emb.inv_freq")


def activation_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Upper estimate of scratch memory per token: what one layer has alive at once, counted as if
    its two halves were alive together, plus the step's integers.
    """
    attended = config.num_heads * config.head_size
    heads = attended + 2 * config.num_kv_heads * config.head_size
    values = 6 * config.hidden_size + 4 * heads + 3 * attended + 5 * config.intermediate_size
    integers = 16 * (8 + config.num_kv_heads)
    return itemsize * values + integers


def _whole(tensor: Tensor) -> Place:
    return Place(tensor, tuple(tensor.shape))
