"""A decoder whose layers run in the native kernel.

Legend: T tokens, S sampled rows, D hidden size, V vocabulary, P positions, H head size, M blocks.

Made from a `DecoderModel` whose weights have been loaded: they are packed layer by layer, and each
layer is dropped when it has been. A row's result does not depend, to the bit, on what else is in
its batch, nor on the chunks in which its prompt was computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from workers.errors import InternalError
from workers.kernels import decoder as kernel
from workers.kernels.products import (
    PANEL,
    PackedWeight,
    WeightFormat,
    address,
    check_range,
    pack,
)
from workers.kv import KVPool
from workers.models.decoder import DecoderModel, WeightedModel
from workers.models.device import cpu_has
from workers.models.layers import ROPE_PAGE, DecoderLayer, Linear, frequencies
from workers.models.step import StepLayout
from workers.times import ModelTimes

LANES = 16
MAX_HEAD_SIZE = 256
ROWS_COUNTED = 1024


def supports(
    model: WeightedModel, *, dtype: torch.dtype, device: torch.device
) -> TypeGuard[DecoderModel]:
    """Whether the native decoder runs this model here, in bfloat16 or int8, and is the fastest that
    does: a processor with matrix tiles (AMX) multiplies bfloat16 faster through torch.
    """
    config = model.config
    sizes = (config.hidden_size, config.intermediate_size, config.head_size)
    return (
        isinstance(model, DecoderModel)
        and device.type == "cpu"
        and (dtype == torch.int8 or (dtype == torch.bfloat16 and not cpu_has("amx_tile")))
        and all(size % LANES == 0 for size in sizes)
        and config.head_size <= MAX_HEAD_SIZE
        and kernel.is_available()
    )


class NativeDecoder:
    """Embedding, layers, norm and head as one structure of addresses.

    Args:
        model: loaded, in bfloat16 on the CPU; taken apart.
        dtype: bfloat16 or int8, of the projections and the head.
        has_head: False leaves the head out, for models of which only hidden states are asked.

    Attributes:
        num_parameters: weights that each token is multiplied with in the layers.
    """

    def __init__(self, model: DecoderModel, dtype: torch.dtype, *, has_head: bool = True) -> None:
        self.config = model.config
        self.num_parameters = 0
        self._has_head = has_head
        self._weight_format: WeightFormat = "int8" if dtype == torch.int8 else "bfloat16"
        self._kept: list[Tensor] = []
        self._packed: list[PackedWeight] = []
        self._frequencies = frequencies(self.config.rope, self.config.head_size)
        self._cos_PH = self._sin_PH = torch.empty(0, self.config.head_size // 2)
        self._layers = (kernel.LayerStruct * self.config.num_layers)()
        for struct in self._layers:
            self._take_layer(model.layers.pop(0), struct)
        self._struct = self._take_ends(model)
        self._runner = kernel.Runner(self._struct)
        self._pool: KVPool | None = None

    # -- weights --

    def _take_layer(self, layer: DecoderLayer, struct: kernel.LayerStruct) -> None:
        inner = self.config.intermediate_size
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
            self.num_parameters += linear.weight_OI.numel()
        struct.qkv = self._pack(layer.qkv)
        struct.out = self._pack(layer.out)
        struct.gate_up = self._pack(layer.gate_up, list(_paired(inner)))
        struct.down = self._pack(layer.down)
        struct.attention_norm = self._keep(layer.attention_norm.weight_D.float())
        struct.mlp_norm = self._keep(layer.mlp_norm.weight_D.float())
        if layer.head_norm is not None:
            struct.head_norm = self._keep(layer.head_norm.weight_AH.float())
        struct.window = layer.window

    def _take_ends(self, model: DecoderModel) -> kernel.DecoderStruct:
        config = self.config
        self._norm_D = model.norm.weight_D.float()
        head = {"head": self._pack(model.head)} if self._has_head else {}
        return kernel.DecoderStruct(
            **head,
            layers=ctypes.cast(self._layers, ctypes.c_void_p),
            norm=self._keep(self._norm_D),
            embedding=self._keep(model.embedding_VD),
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            vocab_size=config.vocab_size,
            eps=config.rms_eps,
        )

    def _pack(self, linear: Linear, order: list[int] | None = None) -> ctypes.Structure:
        packed = pack(
            linear.weight_OI, linear.bias_O, weight_format=self._weight_format, order=order
        )
        self._packed.append(packed)
        return packed.struct

    def _keep(self, tensor: Tensor) -> ctypes.c_void_p:
        self._kept.append(tensor)
        return address(tensor)

    @property
    def weights_bytes(self) -> int:
        kept = sum(tensor.nbytes for tensor in self._kept)
        return kept + sum(packed.num_bytes for packed in self._packed)

    @property
    def activation_bytes_per_token(self) -> int:
        """Scratch memory per token of a batch, integers included."""
        scratch = kernel.scratch_bytes(self._struct, ROWS_COUNTED) // ROWS_COUNTED
        return scratch + 4 * self.config.hidden_size + 16 * 8

    # -- a step --

    def logits(self, layout: StepLayout, pool: KVPool) -> NativeLogits:
        return NativeLogits(self._runner, self.stream(layout, pool))

    def logits_of(self, stream_RD: Tensor) -> Tensor:
        """Logits (R, V) of rows of the residual stream, float32."""
        if not self._has_head:
            raise InternalError("logits were asked of a decoder without a head")
        return self._runner.logits(stream_RD)

    def normed(self, stream_RD: Tensor) -> Tensor:
        """Rows of the residual stream behind the final norm, float32."""
        return functional.rms_norm(stream_RD, self._norm_D.shape, self._norm_D, self.config.rms_eps)

    def stream(self, layout: StepLayout, pool: KVPool) -> Tensor:
        """Run a batch: the residual stream (S, D) of the sampled rows behind the last layer."""
        if self._pool is not pool:
            self._take_pool(pool)
        check_range("token id", layout.token_ids_T, self.config.vocab_size)
        check_range("block", layout.tables_GM, pool.num_blocks)
        self._grow_rotary(int(layout.position_T.max()))
        out_SD = torch.empty(len(layout.sampled_S), self.config.hidden_size)
        begins_G1 = np.concatenate([[0], layout.ends_G]).astype(np.int32)
        starts_G = layout.starts_G.astype(np.int32)
        tables_GM = layout.tables_GM.astype(np.int32)
        step = kernel.StepStruct(
            *(
                array.ctypes.data
                for array in (
                    layout.token_ids_T,
                    layout.position_T,
                    layout.slots_T,
                    layout.sampled_S,
                    begins_G1,
                    starts_G,
                    tables_GM,
                )
            ),
            layout.num_tokens,
            len(starts_G),
            tables_GM.shape[1],
            len(layout.sampled_S),
        )
        self._runner.run(step, out_SD)
        return out_SD

    @property
    def kv_divisions(self) -> int:
        return self.config.num_kv_heads

    def times(self) -> ModelTimes:
        runner = self._runner
        products_s, attention_s = runner.times.products, runner.times.attention
        # What the kernel's own clock leaves out, the embedding and its start, is done row by row.
        rows_s = runner.run_s - products_s - attention_s
        return ModelTimes(products_s, attention_s, rows_s, runner.head_s)

    def _take_pool(self, pool: KVPool) -> None:
        """The memory of a pool, laid out as the kernel wants it."""
        if pool.block_size != kernel.BLOCK_SIZE:
            raise ValueError(
                f"the native decoder needs KV blocks of {kernel.BLOCK_SIZE} positions, "
                f"not of {pool.block_size}"
            )
        for struct, memory in zip(self._layers, pool.memory, strict=True):
            struct.pool = address(memory)
        self._struct.num_blocks = pool.num_blocks
        self._pool = pool

    def _grow_rotary(self, last: int) -> None:
        if last < len(self._cos_PH):
            return
        length = (last // ROPE_PAGE + 1) * ROPE_PAGE
        angle_PH = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies
        self._cos_PH, self._sin_PH = angle_PH.cos(), angle_PH.sin()
        self._struct.cos, self._struct.sin = address(self._cos_PH), address(self._sin_PH)


class NativeLogits:
    """`Logits` computed on demand from the residual stream."""

    def __init__(self, runner: kernel.Runner, residual_SD: Tensor) -> None:
        self._runner = runner
        self._residual_SD = residual_SD

    def likeliest(self) -> tuple[Tensor, Tensor]:
        return self._runner.likeliest(self._residual_SD)

    def rows(self, index_R: Tensor) -> Tensor:
        return self._runner.logits(self._residual_SD[index_R])


def _paired(inner: int) -> Iterator[int]:
    """Order of the fused gate and up projections: 32 of the gate, the same 32 of up, and so on."""
    half = PANEL // 2
    for first in range(0, inner, half):
        for base in (0, inner):
            for index in range(first, first + half):
                yield base + index if index < inner else -1
