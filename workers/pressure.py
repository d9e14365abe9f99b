"""What the engine does when the device has no memory for a batch: halve it, and plan smaller ones
for a while.
"""

from __future__ import annotations

from dataclasses import replace

from schedulers.view import Budget
from workers.backends.base import Batch


class MemoryPressure:
    """Lowers a budget after an out-of-memory, and raises it again after a healthy while.

    Args:
        budget: the configured budget, never exceeded.
        recover_after: healthy steps until the token budget doubles.
    """

    def __init__(self, budget: Budget, *, recover_after: int = 256) -> None:
        self._configured = budget
        self._recover_after = recover_after
        self._num_healthy = 0

    def after_step(self, budget: Budget, num_tokens: int, largest_executed: int) -> Budget:
        """The budget of the next step, after one of `num_tokens` whose largest executed part is
        given.
        """
        if largest_executed < num_tokens:
            self._num_healthy = 0
            return self._limited(max(1, largest_executed))
        if budget is self._configured:
            return budget
        self._num_healthy += 1
        if self._num_healthy < self._recover_after:
            return budget
        self._num_healthy = 0
        return self._limited(budget.max_batch_tokens * 2)

    def _limited(self, max_batch_tokens: int) -> Budget:
        full = self._configured
        if max_batch_tokens >= full.max_batch_tokens:
            return full
        chunk = full.chunk_tokens
        return replace(
            full,
            max_batch_tokens=max_batch_tokens,
            chunk_tokens=None if chunk is None else min(chunk, max_batch_tokens),
        )


def split(batch: Batch) -> tuple[Batch, Batch]:
    """Two batches with the work of one, in an order that keeps each sequence's tokens in order."""
    first, *rest = batch.segments
    if rest:
        middle = len(batch.segments) // 2
        return Batch(batch.segments[:middle]), Batch(batch.segments[middle:])
    half = first.num_tokens // 2
    head = first._replace(num_tokens=half, sample=False)
    tail = first._replace(start=first.start + half, num_tokens=first.num_tokens - half)
    return Batch((head,)), Batch((tail,))
