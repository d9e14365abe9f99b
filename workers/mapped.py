"""Tensors in memory of their own, mapped from the system and given back to it."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor


def mapped_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, *, large_pages: bool = False
) -> Tensor:
    """Zeros on the CPU whose pages are mapped when they are first touched. The memory is given back
    as soon as the tensor and its views are gone.

    Args:
        shape: of the tensor.
        dtype: of its numbers.
        large_pages: in pages of 2 MiB where the system has them. Their first touch may be several
            times slower, as the system has to find them, and reading in order is a little faster:
            for what is written once and read in every step.

    Raises:
        MemoryError: the system does not grant that much.
    """
    num_bytes = max(math.prod(shape) * dtype.itemsize, 1)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot map {num_bytes:,} bytes: {error}") from error
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # small pages do as well
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[: math.prod(shape)].view(shape)
