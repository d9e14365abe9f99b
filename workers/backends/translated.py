"""torch's errors under our names."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from workers.errors import BackendError, DeviceOutOfMemory


@contextmanager
def translated(what: str) -> Generator[None]:
    """Give torch's errors our names.

    Args:
        what: what is done inside, for the message.

    Raises:
        DeviceOutOfMemory: the device had no memory for it.
        BackendError: torch failed otherwise.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceOutOfMemory(f"out of memory in {what}: {error}") from error
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise DeviceOutOfMemory(f"out of memory in {what}: {error}") from error
        raise BackendError(f"torch failed in {what}: {error}") from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch's CPU allocator gave up. It raises a plain RuntimeError, so that its text is
    all there is to go by; on GPUs the type says it (`torch.OutOfMemoryError`).
    """
    return "DefaultCPUAllocator: can't allocate memory" in str(error)
