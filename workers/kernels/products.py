"""Weights as the native kernels multiply with them, and what else those of whole models share.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from workers import kernels
from workers.errors import InternalError
from workers.mapped import mapped_zeros

WeightFormat = Literal["bfloat16", "int8", "int16"]

PANEL = 64
"""Outputs of a packed panel."""

_FORMATS: dict[WeightFormat, int] = {"bfloat16": 0, "int8": 1, "int16": 2}
_TYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "int16": torch.int16}
_ALIGNMENT = 64

Address = ctypes.c_void_p


class WeightStruct(ctypes.Structure):
    """`Weight`."""

    _fields_ = (
        ("packed", Address),
        ("scale", Address),
        ("correction", Address),
        ("bias", Address),
        ("num_outputs", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("format", ctypes.c_int32),
    )


class Times(ctypes.Structure):
    """Seconds of the first thread by kind of work, added up over all calls."""

    _fields_ = tuple((name, ctypes.c_double) for name in ("products", "attention", "rows"))


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in panels, and what it takes to keep it alive."""

    struct: WeightStruct
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
    """Pack a weight for the kernel.

    Args:
        weight_OI: contiguous, float32 for int16 and else bfloat16; I is a multiple of 16.
        bias_O: added to the outputs.
        weight_format: with integers an output has one scale, and inputs are quantised as they come.
        order: the output that stands at each place, -1 for none; None: as they are.
    """
    assert weight_OI.dtype == (torch.float32 if weight_format == "int16" else torch.bfloat16)
    num_inputs = weight_OI.shape[1]
    rows = np.arange(len(weight_OI)) if order is None else np.asarray(order)
    rows = np.concatenate([rows, np.full(-len(rows) % PANEL, -1)]).astype(np.int64)
    parts = [mapped_zeros((len(rows) * num_inputs,), _TYPES[weight_format], large_pages=True)]
    if weight_format != "bfloat16":
        parts.append(torch.empty(len(rows)))
    if weight_format == "int8":
        num_groups = -(-num_inputs // library().headrace_group_size())
        parts.append(torch.empty(num_groups * len(rows), dtype=torch.int32))
    addresses = list(map(address, parts))
    getattr(library(), f"headrace_pack_{weight_format}")(
        address(weight_OI),
        rows.ctypes.data_as(Address),
        ctypes.c_int64(len(rows)),
        ctypes.c_int64(num_inputs),
        *addresses,
    )
    bias = None if bias_O is None else _permuted(bias_O.float(), rows)
    struct = WeightStruct(
        *addresses,
        *[None] * (3 - len(parts)),
        None if bias is None else address(bias),
        len(rows),
        num_inputs,
        _FORMATS[weight_format],
    )
    return PackedWeight(struct, (*parts, *(() if bias is None else (bias,))))


def _permuted(values_O: Tensor, rows: np.ndarray) -> Tensor:
    padded = torch.cat([values_O, values_O.new_zeros(1)])
    return padded[torch.from_numpy(rows)].contiguous()


class Scratch:
    """Memory that a kernel works in, kept between its calls."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> ctypes.c_void_p:
        """At least so many bytes; what was there before is lost."""
        wanted = num_bytes + _ALIGNMENT
        if wanted > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8)  # before the new one takes memory
            self._memory = torch.empty(wanted, dtype=torch.uint8)
        start = self._memory.data_ptr()
        return Address(start + -start % _ALIGNMENT)


def library() -> ctypes.CDLL:
    """The compiled kernels, which there must be."""
    found = kernels.load()
    assert found is not None
    return found


def address(tensor: Tensor) -> ctypes.c_void_p:
    """Where a contiguous tensor begins."""
    assert tensor.is_contiguous(), (
        f"a kernel needs contiguous memory, got strides {tensor.stride()}"
    )
    return Address(tensor.data_ptr())


def check_range(what: str, values: np.ndarray, end: int) -> None:
    """Make sure of the places at which a kernel is to read memory.

    Raises:
        InternalError: one is not in [0, end).
    """
    if values.size and not 0 <= values.min() <= values.max() < end:
        raise InternalError(f"a {what} of a batch is outside of 0 to {end - 1}")
