"""Decoders that read texts: hidden states and logits of all positions, with nothing kept.

Legend: N texts, T tokens, S wanted rows in ascending order, D hidden size, V vocabulary, M blocks
per table, R rows.

No keys and values outlive a layer: the torch code attends over the batch itself, and the native
decoder writes those of every layer to the same memory. The residual stream is float32 in both.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from workers.encoding import PackedTexts, Places
from workers.kernels.decoder import BLOCK_SIZE
from workers.kv import KVPool
from workers.models.decoder import DecoderModel, activation_bytes_per_token
from workers.models.encoder import EncoderSizes
from workers.models.layers import DecoderLayer
from workers.models.native import NativeDecoder
from workers.models.packed import CAUSAL, PackedBatch, Reach, attend, to_device
from workers.models.step import StepLayout


class CausalModel(EncoderSizes, Protocol):
    """A decoder up to its logits, and an `EncoderModel`."""

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
        """The residual stream (S, D) of some rows behind the last layer, for `logits`. The rows
        are in ascending order.
        """
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
    """Packed texts as a step: a segment a text, over blocks of its own. What a text begins with is
    computed once for the texts behind it that begin with it too: they start later, over the blocks
    of the first one. Rows are of the batch; those of the layout are fewer then.
    """
    lengths_N, begins_N = batch.lengths_N, batch.begins_N
    shared_N, leader_N = shared_prefixes(batch, rows_S, block_size)
    counts_N = lengths_N - shared_N
    ends_N = counts_N.cumsum()
    owner_T = np.repeat(np.arange(len(batch)), counts_N)
    position_T = np.arange(len(owner_T)) + (shared_N - ends_N + counts_N)[owner_T]
    tables_NM = _tables(lengths_N, shared_N, leader_N, block_size)
    blocks_T = tables_NM[owner_T, position_T // block_size]
    owner_S = np.searchsorted(batch.ends_N, rows_S, side="right")
    return StepLayout(
        token_ids_T=batch.token_ids_T[begins_N[owner_T] + position_T].astype(np.int64),
        position_T=position_T,
        slots_T=blocks_T * block_size + position_T % block_size,
        sampled_S=rows_S + (ends_N - counts_N - begins_N - shared_N)[owner_S],
        ends_G=ends_N,
        counts_G=counts_N,
        starts_G=shared_N,
        tables_GM=tables_NM,
        num_chunks=int((counts_N > 1).sum()),
    )


def _tables(
    lengths_N: Places, shared_N: Places, leader_N: Places, block_size: int
) -> NDArray[np.int64]:
    """Block tables (N, M): the leader's blocks, then own ones; filled up with an own one, which is
    not read there.
    """
    num_shared_N1 = (shared_N // block_size)[:, None]
    num_blocks_N1 = -(-lengths_N // block_size)[:, None]
    num_own_N = (num_blocks_N1 - num_shared_N1)[:, 0]
    first_N1 = (num_own_N.cumsum() - num_own_N)[:, None]
    index_M = np.arange(int(num_blocks_N1.max(initial=1)))
    own_NM = first_N1 + np.where(index_M < num_blocks_N1, index_M - num_shared_N1, 0)
    return np.where(index_M < num_shared_N1, first_N1[leader_N] + index_M, own_NM)


def shared_prefixes(batch: PackedTexts, rows_S: Places, block_size: int) -> tuple[Places, Places]:
    """Which texts begin like one before them: the tokens, in whole blocks, that each has in common
    with its leader, the nearest text before it that shares nothing itself; and that leader.

    A text's wanted rows are its own: it shares what lies before the first of them.
    """
    begins_N, ends_N = batch.begins_N, batch.ends_N
    first_wanted_N = np.append(rows_S, batch.num_tokens)[np.searchsorted(rows_S, begins_N)]
    most_N = (np.minimum(first_wanted_N, ends_N - 1) - begins_N) // block_size * block_size
    shared_N = np.zeros(len(batch), dtype=np.int64)
    leader_N = np.arange(len(batch))
    leader = 0
    for index, most in enumerate(most_N.tolist()):
        most = min(most, int(ends_N[leader] - begins_N[leader]))  # noqa: PLW2901
        if index and most >= block_size:
            first = batch.token_ids_T[begins_N[leader] : begins_N[leader] + most]
            own = batch.token_ids_T[begins_N[index] : begins_N[index] + most]
            differs = np.flatnonzero(first != own)
            common = int(differs[0]) if len(differs) else most
            shared_N[index] = common // block_size * block_size
        if shared_N[index]:
            leader_N[index] = leader
        else:
            leader = index
    return shared_N, leader_N


def count_parameters(model: DecoderModel) -> int:
    """Weights that each token is multiplied with in the layers."""
    return sum(
        linear.weight_OI.numel()
        for layer in model.layers
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )
