"""The native encoder: a batch of whole texts through all layers of a BERT-like model in one call.

Legend: T tokens of a batch, D hidden size.

The structures mirror those of `encoder.cpp`. They hold addresses only: whoever fills them keeps the
tensors alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from time import perf_counter

from torch import Tensor

from workers import kernels
from workers.kernels.products import Address, Scratch, Times, WeightStruct, address, library

_TANH = -2.302208198, -0.1029432397, 0.0, 0.0, 0.0, 0.0
_EXACT = -2.30217464, -0.104926970, 1.65492513e-4, 1.36762229e-4, -8.11512335e-6, 1.64782857e-7

GELU_TERMS: Mapping[str, tuple[float, ...]] = {
    "gelu": _EXACT,
    "gelu_new": _TANH,
    "gelu_pytorch_tanh": _TANH,
}
"""What `gelu16` computes, by transformers' names. The exact form's odds in powers of two, divided
by x, as a polynomial of x^2 whose largest error in GELU is 6e-7; tanh's are one of degree 1."""


class LayerStruct(ctypes.Structure):
    """`HeadraceEncoderLayer`."""

    _fields_ = (
        *((name, WeightStruct) for name in ("qkv", "out", "up", "down")),
        *(
            (name, Address)
            for name in ("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias")
        ),
    )


class EncoderStruct(ctypes.Structure):
    """`HeadraceEncoder`."""

    _fields_ = (
        *(
            (name, Address)
            for name in ("layers", "words", "positions", "norm", "norm_bias", "activation")
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("num_layers", "hidden_size", "inner_size", "num_heads", "head_size")
        ),
        ("eps", ctypes.c_float),
    )


class TextsStruct(ctypes.Structure):
    """`HeadraceTexts`."""

    _fields_ = (
        *((name, Address) for name in ("token_ids", "positions", "ends")),
        ("num_texts", ctypes.c_int32),
    )


def is_available() -> bool:
    """Whether the kernels could be built and this processor multiplies words of 16 bits."""
    found = kernels.load()
    return found is not None and bool(found.headrace_has_encoder())


def scratch_bytes(encoder: EncoderStruct, longest: int) -> int:
    """Scratch memory for batches in which no text has more than `longest` tokens."""
    count = library().headrace_encoder_scratch_bytes
    count.restype = ctypes.c_int64
    return int(count(ctypes.byref(encoder), ctypes.c_int64(longest)))


class Runner:
    """Calls the kernel, and keeps its scratch memory between calls.

    Attributes:
        times: what the kernel says of `run`.
        run_s: seconds in `run`, added up.
    """

    def __init__(self, encoder: EncoderStruct) -> None:
        self._encoder = encoder
        self._library = library()
        self._scratch = Scratch()
        self.times = Times()
        self.run_s = 0.0

    def run(self, texts: TextsStruct, longest: int, out_TD: Tensor) -> None:
        """The output of the last layer, float32."""
        started_s = perf_counter()
        self._library.headrace_encoder_run(
            ctypes.byref(self._encoder),
            ctypes.byref(texts),
            self._scratch.room(scratch_bytes(self._encoder, longest)),
            address(out_TD),
            ctypes.byref(self.times),
        )
        self.run_s += perf_counter() - started_s
