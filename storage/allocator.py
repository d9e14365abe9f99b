"""Which allocator a run uses, and how.

Arrow's default (mimalloc) keeps freed pages per thread: a run of 60,000 rows peaked 5 to 12 % above
one of 10,000, and both 35 MiB above what the system's allocator needs. A run that streams wants its
memory back, so runs use the system's.

The system's (glibc) keeps up to eight arenas for each core, and what a thread frees in one the
others cannot use: a run of 4,000 partitions, each written by one of four threads, grew by a MiB a
second. And it learns from the first large buffer that is freed to keep such buffers: good for
those of a generating model, which come again with every step, but not for an encode call's
vectors, of which some are in memory and gone soon.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

import pyarrow as pa

ARENAS = 2
LARGE_BYTES = 4 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def use_system_allocator(*, keep_large: bool = True) -> None:
    """For the whole process, from now on. Without effect on what was allocated before.

    Args:
        keep_large: buffers of more than `LARGE_BYTES` are kept for the next ones when they are
            freed; False: they go back to the system at once.
    """
    pa.set_memory_pool(pa.system_memory_pool())  # where Arrow was loaded before `storage`
    _tune(_M_ARENA_MAX, ARENAS)
    if not keep_large:
        _tune(_M_MMAP_THRESHOLD, LARGE_BYTES)
        _tune(_M_TRIM_THRESHOLD, LARGE_BYTES)


def return_unused() -> None:
    """Give freed pages back to the system, after something large."""
    pa.default_memory_pool().release_unused()


def _tune(parameter: int, value: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).mallopt(parameter, value)
