"""A BERT-like encoder whose layers run in the native kernel.

Legend: T tokens of a batch, N texts, D hidden size, P positions.

Made from a `BertModel` whose weights have been loaded: they are packed layer by layer, and each
layer is dropped when it has been. A text's result does not depend, to the bit, on what else is in
its batch. Products are of int16, which are as fast as those of bfloat16 and several times as exact.
"""

from __future__ import annotations

import ctypes
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from workers.encoding import PackedTexts
from workers.kernels import encoder as kernel
from workers.kernels.products import PackedWeight, address, check_range, pack
from workers.models.bert import BertConfig, BertLayer, BertModel, find_positions
from workers.models.device import cpu_has
from workers.models.encoder import Configured, EncoderModel, LayerNorm
from workers.models.layers import Linear
from workers.models.packed import to_device
from workers.times import ModelTimes

DIMENSIONS = 32
"""What the kernel computes at once: sizes are multiples of it."""


def supports(model: EncoderModel, *, device: torch.device) -> TypeGuard[BertModel]:
    """Whether the native encoder runs this model here and is the fastest that does: a processor
    with matrix tiles (AMX) multiplies bfloat16 faster through torch.
    """
    if not isinstance(model, BertModel) or device.type != "cpu" or cpu_has("amx_tile"):
        return False
    config = model.config
    sizes = (config.hidden_size, config.intermediate_size, config.head_size)
    return (
        config.activation in kernel.GELU_TERMS
        and all(size % DIMENSIONS == 0 for size in sizes)
        and kernel.is_available()
    )


class NativeEncoder(Configured[BertConfig]):
    """Embeddings and layers as one structure of addresses; an `EncoderModel`.

    Args:
        model: loaded, in float32 on the CPU; taken apart.
    """

    def __init__(self, model: BertModel) -> None:
        self.config = model.config
        self.device = model.device
        self.num_parameters = model.num_parameters
        self._kept: list[Tensor] = []
        self._packed: list[PackedWeight] = []
        self._layers = (kernel.LayerStruct * self.config.num_layers)()
        for struct in self._layers:
            self._take_layer(model.layers.pop(0), struct)
        self._struct = self._take_ends(model)
        self._runner = kernel.Runner(self._struct)

    # -- weights --

    def _take_layer(self, layer: BertLayer, struct: kernel.LayerStruct) -> None:
        struct.qkv = self._pack(layer.qkv)
        struct.out = self._pack(layer.out)
        struct.up = self._pack(layer.up)
        struct.down = self._pack(layer.down)
        struct.attention_norm, struct.attention_norm_bias = self._keep_norm(layer.attention_norm)
        struct.mlp_norm, struct.mlp_norm_bias = self._keep_norm(layer.output_norm)

    def _take_ends(self, model: BertModel) -> kernel.EncoderStruct:
        config = self.config
        position_PD = model.position_PD
        if model.types_XD is not None:
            position_PD = position_PD + model.types_XD[0]
        norm, norm_bias = self._keep_norm(model.embedding_norm)
        return kernel.EncoderStruct(
            layers=ctypes.cast(self._layers, ctypes.c_void_p),
            words=self._keep(model.word_VD),
            positions=self._keep(position_PD),
            norm=norm,
            norm_bias=norm_bias,
            activation=self._keep(torch.tensor(kernel.GELU_TERMS[config.activation])),
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            num_heads=config.num_heads,
            head_size=config.head_size,
            eps=config.norm_eps,
        )

    def _pack(self, linear: Linear) -> ctypes.Structure:
        packed = pack(linear.weight_OI, linear.bias_O, weight_format="int16")
        self._packed.append(packed)
        return packed.struct

    def _keep_norm(self, norm: LayerNorm) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        bias_D = torch.zeros_like(norm.weight_D) if norm.bias_D is None else norm.bias_D
        return self._keep(norm.weight_D), self._keep(bias_D)

    def _keep(self, tensor: Tensor) -> ctypes.c_void_p:
        self._kept.append(tensor)
        return address(tensor)

    # -- what it is --

    @property
    def weights_bytes(self) -> int:
        kept = sum(tensor.nbytes for tensor in self._kept)
        return kept + sum(packed.num_bytes for packed in self._packed)

    @property
    def activation_bytes_per_token(self) -> int:
        """What comes out, what is pooled of it, and the batch's integers."""
        return 12 * self.hidden_size + 32

    @property
    def scratch_bytes(self) -> int:
        """The threads' memory, which does not grow with the batch."""
        return kernel.scratch_bytes(self._struct, self.max_len)

    # -- a batch --

    def hidden(self, batch: PackedTexts) -> Tensor:
        packed = to_device(batch, self.device)
        token_ids_T = batch.token_ids_T.astype(np.int32)
        position_T = find_positions(packed, self.config).numpy().astype(np.int32)
        ends_N = batch.ends_N.astype(np.int64)
        check_range("token id", token_ids_T, self.vocab_size)
        check_range("position", position_T, self.config.num_positions)
        out_TD = torch.empty(batch.num_tokens, self.hidden_size)
        texts = kernel.TextsStruct(
            *(array.ctypes.data for array in (token_ids_T, position_T, ends_N)), len(ends_N)
        )
        self._runner.run(texts, packed.longest, out_TD)
        return out_TD

    def times(self) -> ModelTimes:
        runner = self._runner
        products_s, attention_s = runner.times.products, runner.times.attention
        return ModelTimes(products_s, attention_s, runner.run_s - products_s - attention_s, 0.0)
