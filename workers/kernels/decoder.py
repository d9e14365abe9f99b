"""The native decoder: a whole batch through all layers of a transformer in one call.

Legend: T tokens of a batch, S sampled rows, G segments, M blocks per table, D hidden size, V
vocabulary.

The structures mirror those of `decoder.cpp`. They hold addresses only: whoever fills them keeps the
tensors alive.
"""

from __future__ import annotations

import ctypes
from time import perf_counter

import torch
from torch import Tensor

from workers import kernels
from workers.kernels.products import Address, Scratch, Times, WeightStruct, address, library

BLOCK_SIZE = 16
"""Positions of a KV block, as the kernel has it."""


class LayerStruct(ctypes.Structure):
    """`HeadraceLayer`."""

    _fields_ = (
        *((name, WeightStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, Address) for name in ("attention_norm", "mlp_norm", "head_norm", "pool")),
        ("window", ctypes.c_int32),
    )


class DecoderStruct(ctypes.Structure):
    """`HeadraceDecoder`."""

    _fields_ = (
        ("layers", Address),
        ("head", WeightStruct),
        *((name, Address) for name in ("norm", "embedding", "cos", "sin")),
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
            (name, Address)
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


def is_available() -> bool:
    """Whether the kernels could be built and this processor multiplies bfloat16 and bytes."""
    found = kernels.load()
    return found is not None and bool(found.headrace_has_decoder())


def scratch_bytes(decoder: DecoderStruct, num_rows: int) -> int:
    """Scratch memory for a batch of so many tokens, or so many rows of the head."""
    count = library().headrace_decoder_scratch_bytes
    count.restype = ctypes.c_int64
    return int(count(ctypes.byref(decoder), ctypes.c_int64(num_rows)))


class Runner:
    """Calls the kernel, and keeps its scratch memory between calls.

    Attributes:
        times: what the kernel says of `run`.
        run_s: seconds in `run`, added up.
        head_s: seconds in `logits` and `likeliest`, added up.
    """

    def __init__(self, decoder: DecoderStruct) -> None:
        self._decoder = decoder
        self._library = library()
        self._scratch = Scratch()
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
        return self._scratch.room(scratch_bytes(self._decoder, num_rows))
