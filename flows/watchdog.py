"""Notices a device that does not come back from a step.

A call that hangs inside a library cannot be interrupted. So the run is ended around it: the
engine's thread is left behind, what was finished is made durable, and the process ends with an
error instead of waiting for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedulers.view import SeqId
from workers.backends.base import Backend, Batch, Executed, KVBlocks
from workers.encoding import EncodeBackend, PackedTexts


class Step(NamedTuple):
    """A batch that is being computed."""

    started_s: float
    num_tokens: int
    num_seqs: int


class WatchedBackend:
    """A backend of which one can see what it is computing. Speaks the `Backend` protocol.

    Attributes:
        step: what is being computed; None between two steps.
    """

    def __init__(self, backend: Backend, *, clock: Callable[[], float]) -> None:
        self.info = backend.info
        self.step: Step | None = None
        self._backend = backend
        self._clock = clock

    def allocate(self, *, num_blocks: int, block_size: int) -> None:
        self._backend.allocate(num_blocks=num_blocks, block_size=block_size)

    def execute(self, batch: Batch) -> Executed:
        self.step = Step(self._clock(), batch.num_tokens, len(batch.segments))
        try:
            return self._backend.execute(batch)
        finally:
            self.step = None

    def read_kv(self, blocks: Sequence[int]) -> KVBlocks:
        return self._backend.read_kv(blocks)

    def write_kv(self, blocks: Sequence[int], data: KVBlocks, *, skip: int = 0) -> None:
        self._backend.write_kv(blocks, data, skip=skip)

    def forget(self, seq_id: SeqId) -> None:
        self._backend.forget(seq_id)

    def close(self) -> None:
        self._backend.close()


class WatchedEncoder:
    """The same for an encoder's backend: micro-batches are its steps."""

    def __init__(self, backend: EncodeBackend, *, clock: Callable[[], float]) -> None:
        self.info = backend.info
        self.step: Step | None = None
        self._backend = backend
        self._clock = clock

    def execute(self, texts: PackedTexts) -> NDArray[np.float32]:
        self.step = Step(self._clock(), texts.num_tokens, len(texts))
        try:
            return self._backend.execute(texts)
        finally:
            self.step = None

    def close(self) -> None:
        self._backend.close()


class Watchdog:
    """Waits for a step that takes too long.

    Args:
        backend: watched.
        step_timeout_s: longest a step may take.
        stop_grace_s: longest it may still take after `stop`.
        clock: seconds, monotonic; the backend's.
    """

    def __init__(
        self,
        backend: WatchedBackend | WatchedEncoder,
        *,
        step_timeout_s: float,
        stop_grace_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._step_timeout_s = step_timeout_s
        self._stop_grace_s = stop_grace_s
        self._clock = clock
        self._stopped_s: float | None = None
        self._ended = threading.Event()

    def wait(self) -> Step | None:
        """Wait for a step that hangs; None after `end`."""
        poll_s = min(1.0, self._step_timeout_s / 4, self._stop_grace_s / 4)
        while not self._ended.wait(poll_s):
            step = self._backend.step
            if step is not None and self._clock() > self._due_s(step):
                return step
        return None

    def _due_s(self, step: Step) -> float:
        due_s = step.started_s + self._step_timeout_s
        if self._stopped_s is None:
            return due_s
        return min(due_s, self._stopped_s + self._stop_grace_s)

    def stop(self) -> None:
        """The run is ending: what hangs now is waited for no longer than the grace."""
        if self._stopped_s is None:
            self._stopped_s = self._clock()

    def end(self) -> None:
        """Let `wait` return. Without effect the second time."""
        self._ended.set()
