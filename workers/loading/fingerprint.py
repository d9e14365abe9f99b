"""A model's identity from its bytes: the same for every copy, and cheap (a few megabytes are read,
whatever the size).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

HEAD_BYTES = 16 << 20
WINDOW_BYTES = 4096
NUM_WINDOWS = 256


def fingerprint(small: Iterable[Path], large: Iterable[Path]) -> str:
    """32 hex digits over the names and all bytes of `small`, and the size, head and evenly spaced
    windows of `large`.

    Training changes practically all weights, so that windows tell models apart; a hand-made change
    of a few bytes between the windows goes unnoticed, as the price of not reading every byte of a
    large model at each start.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in small:
        data = path.read_bytes()
        digest.update(f"{path.name}:{len(data)}:".encode())
        digest.update(data)
    for path in large:
        _update_sampled(digest, path)
    return digest.hexdigest()


def _update_sampled(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"weights:{size}:".encode())
    with path.open("rb") as file:
        digest.update(file.read(HEAD_BYTES))
        rest = size - HEAD_BYTES - WINDOW_BYTES
        if rest <= 0:
            digest.update(file.read())
            return
        for index in range(NUM_WINDOWS + 1):
            file.seek(HEAD_BYTES + rest * index // NUM_WINDOWS)
            digest.update(file.read(WINDOW_BYTES))
