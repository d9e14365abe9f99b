"""Random numbers that depend on a row, not on when or beside what it is computed.

A sequence has a 64-bit key, made from (job seed, request id, sample index). The number for position
i is a hash of (key, i): there is no state to carry, so a resumed, moved or re-batched sequence goes
on with the numbers it would have had anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_key(seed: int, request_id: str, sample_index: int) -> int:
    """The 64-bit key of a sequence's random stream."""
    name = f"{seed}:{sample_index}:{request_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(
        hashlib.blake2b(name, digest_size=8, person=b"headrace").digest(), "little"
    )


def uniforms(keys: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (key, position), with 52 bits."""
    key = np.array(keys, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    bits = _mix(_mix(key + (position + np.uint64(1)) * _GOLDEN) ^ key)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: U64) -> U64:
    """The finaliser of splitmix64: every input bit changes each output bit half of the time."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
