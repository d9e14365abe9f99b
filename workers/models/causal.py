"""Decoders that read texts: hidden states and logits of all positions, with nothing kept.

Legend: N texts, T tokens, S wanted rows, D hidden size, V vocabulary, M blocks per table, R rows.

No keys and values outlive a layer: the torch code attends over the batch itself, and the native
decoder writes those of every layer to the same memory. The residual stream is float32 in both.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from workers.encoding import PackedTexts, Places
from workers.kernels.decoder import BLOCK_SIZE
from workers.kv import KVPool
from workers.models.decoder import DecoderModel, activation_bytes_per_token
from workers.models.layers import DecoderLayer
from workers.models.native import NativeDecoder
from workers.models.packed import CAUSAL, PackedBatch, Reach, attend, to_device
from workers.models.step import StepLayout


class CausalModel(Protocol):
    """A decoder up to its logits, and an `EncoderModel`."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_len(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def activation_bytes_per_token(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...

    def hidden(self, batch: PackedTexts) -> Tensor:
        """The hidden states (T, D) behind the final norm, float32."""
        ...

    def stream(self, batch: PackedTexts, rows_S: Places) -> Tensor:
        """The residual stream (S, D) of some rows behind the last layer, for `logits`."""
        ...

    def logits(self, stream_RD: Tensor) -> Tensor:
        """Logits (R, V) of rows of the stream, float32."""
        ...


def make_causal(model: DecoderModel | NativeDecoder, device: torch.device) -> CausalModel:
    """A loaded decoder as a reader of texts; it is changed, and reads texts only from then on."""
    if isinstance(model, NativeDecoder):
        return NativeCausal(model)
    return TorchCausal(model, device)


class TorchCausal:
    """A `DecoderModel` whose residual stream and norms are made float32."""

    def __init__(self, model: DecoderModel, device: torch.device) -> None:
        self._model = model
        self.device = device
        self.hidden_size = model.config.hidden_size
        self.vocab_size = model.config.vocab_size
        self.max_len = model.config.max_model_len
        self._dtype = model.embedding_VD.dtype
        self.weights_bytes = model.weights_bytes
        self.num_parameters = count_parameters(model)
        norms = [norm for item in model.layers for norm in (item.attention_norm, item.mlp_norm)]
        for norm in (*norms, model.norm):
            norm.weight_D = norm.weight_D.float()

    @property
    def activation_bytes_per_token(self) -> int:
        """As of a generating model, with a stream of float32 and the rows that are wanted of it."""
        config = self._model.config
        own = activation_bytes_per_token(config, self._dtype.itemsize)
        return own + 4 * 6 * config.hidden_size

    def hidden(self, batch: PackedTexts) -> Tensor:
        return self._model.norm(self._layers(batch))

    def stream(self, batch: PackedTexts, rows_S: Places) -> Tensor:
        return self._layers(batch)[torch.from_numpy(rows_S).to(self.device)]

    def logits(self, stream_RD: Tensor) -> Tensor:
        normed_RD = self._model.norm(stream_RD)
        return self._model.head(normed_RD.to(self._dtype)).float()

    def _layers(self, batch: PackedTexts) -> Tensor:
        """The residual stream behind the last layer. (T, D)"""
        model, packed = self._model, to_device(batch, self.device)
        x_TD = functional.embedding(packed.token_ids_T, model.embedding_VD).float()
        tables = model.rotary.tables(packed.position_T, packed.longest - 1)
        for layer in model.layers:
            x_TD = layer.finish(x_TD, self._attend(layer, x_TD, tables, packed))
        return x_TD

    def _attend(
        self,
        layer: DecoderLayer,
        x_TD: Tensor,
        tables: tuple[Tensor, Tensor],
        packed: PackedBatch,
    ) -> Tensor:
        heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        q_TNH, k_TKH, v_TKH = layer.project(x_TD, *tables).split(heads, dim=1)
        reach = Reach(layer.window - 1, 0) if layer.window else CAUSAL
        scale = self._model.attention.scale
        out_TNH = attend(q_TNH, k_TKH, v_TKH, packed.runs, scale=scale, reach=reach)
        return out_TNH.flatten(1)


class NativeCausal:
    """The native decoder over scratch memory, which is one layer's, grown as batches ask for it."""

    def __init__(self, model: NativeDecoder) -> None:
        config = model.config
        self._model = model
        self.device = torch.device("cpu")
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_len = config.max_model_len
        self.weights_bytes = model.weights_bytes
        self.num_parameters = model.num_parameters
        self._pool: KVPool | None = None

    @property
    def activation_bytes_per_token(self) -> int:
        """The kernel's scratch memory, one layer's keys and values (of a whole block for a text of
        one token), and the rows that are wanted.
        """
        config = self._model.config
        kv = 2 * 2 * config.num_kv_heads * config.head_size * BLOCK_SIZE
        return self._model.activation_bytes_per_token + kv + 4 * 2 * config.hidden_size

    def hidden(self, batch: PackedTexts) -> Tensor:
        return self._model.normed(self.stream(batch, np.arange(batch.num_tokens)))

    def stream(self, batch: PackedTexts, rows_S: Places) -> Tensor:
        layout = lay_out_texts(batch, rows_S, BLOCK_SIZE)
        return self._model.stream(layout, self._pool_of(int(layout.tables_GM.max()) + 1))

    def logits(self, stream_RD: Tensor) -> Tensor:
        return self._model.logits_of(stream_RD)

    def _pool_of(self, num_blocks: int) -> KVPool:
        if self._pool is None or self._pool.num_blocks < num_blocks:
            config = self._model.config
            self._pool = None  # before the new one takes memory
            self._pool = KVPool(
                num_layers=config.num_layers,
                num_blocks=num_blocks,
                num_kv_heads=config.num_kv_heads,
                block_size=BLOCK_SIZE,
                head_size=config.head_size,
                dtype=torch.bfloat16,
                device=self.device,
                shared=True,
            )
        return self._pool


def lay_out_texts(batch: PackedTexts, rows_S: Places, block_size: int) -> StepLayout:
    """Packed texts as a step whose segments are whole texts, each over blocks of its own."""
    lengths_N = batch.lengths_N
    position_T = np.arange(batch.num_tokens) - np.repeat(batch.begins_N, lengths_N)
    num_blocks_N = -(-lengths_N // block_size)
    first_block_N = num_blocks_N.cumsum() - num_blocks_N
    blocks_M = np.arange(int(num_blocks_N.max(initial=1)))
    # Filled up with a text's own first block: entries behind its last are not read.
    tables_NM = first_block_N[:, None] + np.where(blocks_M < num_blocks_N[:, None], blocks_M, 0)
    block_T = np.repeat(first_block_N, lengths_N) + position_T // block_size
    return StepLayout(
        token_ids_T=batch.token_ids_T.astype(np.int64),
        position_T=position_T,
        slots_T=block_T * block_size + position_T % block_size,
        sampled_S=rows_S,
        ends_G=batch.ends_N,
        counts_G=lengths_N,
        starts_G=np.zeros(len(batch), dtype=np.int64),
        tables_GM=tables_NM,
        num_chunks=int((lengths_N > 1).sum()),
    )


def count_parameters(model: DecoderModel) -> int:
    """Weights that each token is multiplied with in the layers."""
    return sum(
        linear.weight_OI.numel()
        for layer in model.layers
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )
