"""Making many files durable at once."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path


@cache
def _syncfs() -> Callable[[int], int] | None:
    """The system call; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if found is not None:
        found.argtypes, found.restype = [ctypes.c_int], ctypes.c_int
    return found


class FolderSync:
    """Makes all that was written below a folder durable, by one system call for its whole file
    system where there is such a call. Made before the first file is written: then the call tells
    of every write that failed since.

    Args:
        folder: exists.
    """

    def __init__(self, folder: Path) -> None:
        self._handle = os.open(folder, os.O_RDONLY)

    @property
    def is_possible(self) -> bool:
        """Whether there is one call for all; else each file is to be synced."""
        return _syncfs() is not None

    def sync(self) -> None:
        """Wait until all is durable.

        Raises:
            OSError: something could not be written.
        """
        call = _syncfs()
        assert call is not None
        if call(self._handle):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        os.close(self._handle)


def sync_file(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folders(folders: Iterable[Path]) -> None:
    """Make the entries of folders durable, the deepest first."""
    for folder in sorted(set(folders), key=lambda path: -len(path.parts)):
        sync_file(folder)
