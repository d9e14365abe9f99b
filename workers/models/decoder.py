"""A decoder-only transformer of shared layers.

Legend: T tokens of a batch, S sampled rows, D hidden size, E width of the attention's output, V
vocabulary, A heads of the fused projection, H head size, R rows of KV memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from workers.attention import Attention, AttentionPlan
from workers.kv import KVPool
from workers.models.config import ModelConfig
from workers.models.layers import DecoderLayer, Linear, Make, RMSNorm, Rotary, in_tiles
from workers.models.weights import Place, Places

TILE_ROWS = 32
"""Rows of a tile in deterministic mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One batch as a model sees it.

    Attributes:
        token_ids_T: int64.
        position_T: int64, of each token in its sequence.
        last_position: the largest of them.
        sampled_S: int64, the rows after which a token is drawn.
        attention: where keys and values go and come from.
    """

    token_ids_T: Tensor
    position_T: Tensor
    last_position: int
    sampled_S: Tensor
    attention: AttentionPlan


class Model(Protocol):
    """What the torch backend needs of a family's model."""

    @property
    def config(self) -> ModelConfig: ...

    def places(self) -> Places:
        """Where each tensor of the weight files goes."""
        ...

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor that the files may hold is not needed."""
        ...

    def logits(self, step: Step, pool: KVPool) -> Tensor:
        """Run a batch: write its keys and values, and give the logits (S, V) of the sampled rows,
        in the model's dtype.
        """
        ...


class DecoderModel:
    """Embedding, layers, norm, head."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        make = Make(dtype, device)
        self.config = config
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
        self.rotary = Rotary(config.rope, config.head_size, make)
        self.attention = Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            dtype=dtype,
            device=device,
            deterministic=deterministic,
        )

    def logits(self, step: Step, pool: KVPool) -> Tensor:
        x_TD = functional.embedding(step.token_ids_T, self.embedding_VD)
        tables = self.rotary.tables(step.position_T, step.last_position)
        *inner, last = range(len(self.layers))
        for layer in inner:
            attended_TE = self._attend(layer, x_TD, tables, step, pool)
            x_TD = in_tiles(self.layers[layer].finish, self.tile_rows, x_TD, attended_TE)
        attended_TE = self._attend(last, x_TD, tables, step, pool)
        # Nothing reads the other rows any more.
        rows = x_TD[step.sampled_S], attended_TE[step.sampled_S]
        x_SD = in_tiles(self.layers[last].finish, self.tile_rows, *rows)
        return in_tiles(self._head, self.tile_rows, x_SD)

    def _attend(
        self, index: int, x_TD: Tensor, tables: tuple[Tensor, Tensor], step: Step, pool: KVPool
    ) -> Tensor:
        layer = self.layers[index]
        qkv_TAH = in_tiles(layer.project, self.tile_rows, x_TD, *tables)
        heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        q_TNH, k_TKH, v_TKH = qkv_TAH.split(heads, dim=1)
        kv = pool.layers[index]
        attended_TNH = self.attention(q_TNH, k_TKH, v_TKH, kv, step.attention, window=layer.window)
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


def _whole(tensor: Tensor) -> Place:
    return Place(tensor, tuple(tensor.shape))
