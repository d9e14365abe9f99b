"""Tensors in large pages: what is read in scattered runs loses less to address translation."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor


def zeros_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU whose pages are mapped when they are first touched, in pages of 2 MiB where
    the system has them. The memory is given back when the tensor and its views are gone.

    Raises:
        MemoryError: the system does not grant that much.
    """
    num_bytes = max(math.prod(shape) * dtype.itemsize, 1)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot map {num_bytes:,} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # small pages do as well
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[: math.prod(shape)].view(shape)
