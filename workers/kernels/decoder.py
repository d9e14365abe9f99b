"""The native decoder: a whole batch through all layers of a transformer in one call.

Legend: T tokens of a batch, S sampled rows, G segments, M blocks per table, D hidden size, V
vocabulary, O outputs, I inputs.

The structures mirror those of `decoder.cpp`. They hold addresses only: whoever fills them keeps the
tensors alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from workers import kernels
from workers.mapped import mapped_zeros

WeightFormat = Literal["bfloat16", "int8"]

BLOCK_SIZE = 16
"""Positions of a KV block, as the kernel has it."""

PANEL = 64
"""Outputs of a packed panel."""

_FORMATS: dict[WeightFormat, int] = {"bfloat16": 0, "int8": 1}
_Address = ctypes.c_void_p
_ALIGNMENT = 64


class _Weight(ctypes.Structure):
    _fields_ = (
        ("packed", _Address),
        ("scale", _Address),
        ("correction", _Address),
        ("bias", _Address),
        ("num_outputs", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("format", ctypes.c_int32),
    )


class LayerStruct(ctypes.Structure):
    """`HeadraceLayer`."""

    _fields_ = (
        *((name, _Weight) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _Address) for name in ("attention_norm", "mlp_norm", "head_norm", "pool")),
        ("window", ctypes.c_int32),
    )


class DecoderStruct(ctypes.Structure):
    """`HeadraceDecoder`."""

    _fields_ = (
        ("layers", _Address),
        ("head", _Weight),
        *((name, _Address) for name in ("norm", "embedding", "cos", "sin")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_layers",
                "hidden_size",
                "inner_size",
                "num_heads",
                "num_kv_heads",
                "head_size",
                "vocab_size",
            )
        ),
        ("eps", ctypes.c_float),
        ("num_blocks", ctypes.c_int64),
    )


class StepStruct(ctypes.Structure):
    """`HeadraceStep`."""

    _fields_ = (
        *(
            (name, _Address)
            for name in (
                "token_ids",
                "positions",
                "slots",
                "sampled",
                "begins",
                "starts",
                "tables",
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("num_tokens", "num_segments", "max_blocks", "num_sampled")
        ),
    )


class Times(ctypes.Structure):
    """Seconds of the first thread by kind of work, added up over all calls."""

    _fields_ = tuple((name, ctypes.c_double) for name in ("products", "attention", "rows"))


def is_available() -> bool:
    """Whether the kernels could be built and this processor multiplies bfloat16 and bytes."""
    library = kernels.load()
    return library is not None and bool(library.headrace_has_decoder())


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in panels, and what it takes to keep it alive."""

    struct: _Weight
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def pack(
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    weight_format: WeightFormat,
    order: Sequence[int] | None = None,
) -> PackedWeight:
    """Pack a bfloat16 weight for the kernel.

    Args:
        weight_OI: contiguous; I is a multiple of 16.
        bias_O: added to the outputs.
        weight_format: int8 has one scale per output, and inputs are quantised as they come.
        order: the output that stands at each place, -1 for none; None: as they are.
    """
    library = _library()
    num_inputs = weight_OI.shape[1]
    rows = np.arange(len(weight_OI)) if order is None else np.asarray(order)
    rows = np.concatenate([rows, np.full(-len(rows) % PANEL, -1)]).astype(np.int64)
    bias = None if bias_O is None else _permuted(bias_O.float(), rows)
    if weight_format == "bfloat16":
        packed = mapped_zeros((len(rows) * num_inputs,), torch.bfloat16, large_pages=True)
        library.headrace_pack_bf16(
            address(weight_OI),
            rows.ctypes.data_as(_Address),
            ctypes.c_int64(len(rows)),
            ctypes.c_int64(num_inputs),
            address(packed),
        )
        tensors = [packed]
    else:
        packed = mapped_zeros((len(rows) * num_inputs,), torch.int8, large_pages=True)
        scale = torch.empty(len(rows), dtype=torch.float32)
        num_groups = -(-num_inputs // library.headrace_group_size())
        correction = torch.empty(num_groups * len(rows), dtype=torch.int32)
        library.headrace_pack_int8(
            address(weight_OI),
            rows.ctypes.data_as(_Address),
            ctypes.c_int64(len(rows)),
            ctypes.c_int64(num_inputs),
            *map(address, (packed, scale, correction)),
        )
        tensors = [packed, scale, correction]
    addresses = [address(tensor) for tensor in tensors] + [None] * (3 - len(tensors))
    struct = _Weight(
        *addresses,
        None if bias is None else address(bias),
        len(rows),
        num_inputs,
        _FORMATS[weight_format],
    )
    return PackedWeight(struct, (*tensors, *(() if bias is None else (bias,))))


def _permuted(values_O: Tensor, rows: np.ndarray) -> Tensor:
    padded = torch.cat([values_O, values_O.new_zeros(1)])
    return padded[torch.from_numpy(rows)].contiguous()


def scratch_bytes(decoder: DecoderStruct, num_rows: int) -> int:
    """Scratch memory for a batch of so many tokens, or so many rows of the head."""
    library = _library()
    library.headrace_decoder_scratch_bytes.restype = ctypes.c_int64
    return int(
        library.headrace_decoder_scratch_bytes(ctypes.byref(decoder), ctypes.c_int64(num_rows))
    )


class Runner:
    """Calls the kernel, and keeps its scratch memory between calls.

    Attributes:
        times: what the kernel says of `run`.
        run_s: seconds in `run`, added up.
        head_s: seconds in `logits` and `likeliest`, added up.
    """

    def __init__(self, decoder: DecoderStruct) -> None:
        self._decoder = decoder
        self._library = _library()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.times = Times()
        self.run_s = self.head_s = 0.0

    def run(self, step: StepStruct, out_SD: Tensor) -> None:
        """The residual stream, float32, of the sampled rows behind the last layer."""
        started_s = perf_counter()
        self._library.headrace_decoder_run(
            ctypes.byref(self._decoder),
            ctypes.byref(step),
            self._room(step.num_tokens),
            address(out_SD),
            ctypes.byref(self.times),
        )
        self.run_s += perf_counter() - started_s

    def logits(self, residual_SD: Tensor) -> Tensor:
        """Logits (S, V), float32."""
        started_s = perf_counter()
        out_SV = torch.empty(len(residual_SD), self._decoder.vocab_size)
        self._library.headrace_decoder_logits(
            ctypes.byref(self._decoder),
            address(residual_SD),
            len(residual_SD),
            self._room(len(residual_SD)),
            address(out_SV),
        )
        self.head_s += perf_counter() - started_s
        return out_SV

    def likeliest(self, residual_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of the likeliest tokens and their logits, (S,) each; NaN where a row holds one."""
        started_s = perf_counter()
        ids_S = torch.empty(len(residual_SD), dtype=torch.int64)
        best_S = torch.empty(len(residual_SD))
        self._library.headrace_decoder_likeliest(
            ctypes.byref(self._decoder),
            address(residual_SD),
            len(residual_SD),
            self._room(len(residual_SD)),
            address(ids_S),
            address(best_S),
        )
        self.head_s += perf_counter() - started_s
        return ids_S, best_S

    def _room(self, num_rows: int) -> ctypes.c_void_p:
        wanted = scratch_bytes(self._decoder, num_rows) + _ALIGNMENT
        if wanted > len(self._scratch):
            self._scratch = torch.empty(0, dtype=torch.uint8)  # before the new one takes memory
            self._scratch = torch.empty(wanted, dtype=torch.uint8)
        start = self._scratch.data_ptr()
        return _Address(start + -start % _ALIGNMENT)


def _library() -> ctypes.CDLL:
    library = kernels.load()
    assert library is not None
    return library


def address(tensor: Tensor) -> ctypes.c_void_p:
    """Where a contiguous tensor begins."""
    assert tensor.is_contiguous(), (
        f"a kernel needs contiguous memory, got strides {tensor.stride()}"
    )
    return _Address(tensor.data_ptr())
