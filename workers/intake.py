"""Where requests come from, and in which order they are offered to the policy.

The engine never holds more than a window of requests that have not started, and never blocks on its
input while it has work. Within a window the longest go first (against the tail), and a window is
admitted whole before the next one is taken in, so nothing is overtaken for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from workers.request import Request
from workers.sequence import Sequence


class RequestSource(Protocol):
    """A stream of requests, read by the engine's thread only."""

    def take(self, max_requests: int, *, wait: bool) -> list[Request]:
        """Up to `max_requests` requests that are at hand; with `wait`, blocks until there is one or
        none will come.
        """
        ...

    @property
    def exhausted(self) -> bool:
        """True once nothing more will come."""
        ...


class IterableSource:
    """A `RequestSource` over any iterable; reads it only as far as asked."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests: Iterator[Request] = iter(requests)
        self.exhausted = False

    def take(self, max_requests: int, *, wait: bool) -> list[Request]:  # noqa: ARG002
        taken = list(islice(self._requests, max_requests))
        self.exhausted = len(taken) < max_requests
        return taken


class Waiting:
    """Sequences that hold no KV blocks, in the order in which they should be admitted.

    Three groups: suspended ones (oldest first), siblings of a sample whose prompt is in KV memory,
    and the current window, longest first. `next_window` collects arrivals until the current one is
    empty.
    """

    def __init__(self) -> None:
        self._suspended: list[Sequence] = []
        self._siblings: deque[Sequence] = deque()
        self._window: deque[Sequence] = deque()
        self._next_window: list[Sequence] = []

    def __len__(self) -> int:
        return (
            len(self._suspended) + len(self._siblings) + len(self._window) + len(self._next_window)
        )

    def arrive(self, seq: Sequence) -> None:
        self._next_window.append(seq)

    def add_siblings(self, sequences: Iterable[Sequence]) -> None:
        self._siblings.extend(sequences)

    def suspend(self, seq: Sequence) -> None:
        """Back in line, before everything that has not started; the oldest first among its kind."""
        self._suspended.append(seq)
        self._suspended.sort(key=lambda item: item.seq_id)

    def ordered(self) -> list[Sequence]:
        """All that may be admitted now, in order."""
        if not self._window and self._next_window:
            # Longest first; the serial number breaks ties, so the order is a function of the input.
            self._next_window.sort(key=lambda seq: (-seq.max_total_tokens, seq.seq_id))
            self._window.extend(self._next_window)
            self._next_window.clear()
        return [*self._suspended, *self._siblings, *self._window]

    def admit(self, seq: Sequence) -> None:
        """Take a sequence out: it holds blocks from now on."""
        for group in (self._window, self._siblings, self._suspended):
            if group and group[0] is seq:
                if isinstance(group, deque):
                    group.popleft()
                else:
                    del group[0]
                return
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        for group in (self._suspended, self._siblings, self._window, self._next_window):
            if seq in group:
                group.remove(seq)
                return

    def clear(self) -> list[Sequence]:
        """Drop everything; returns what was dropped."""
        dropped = [*self._suspended, *self._siblings, *self._window, *self._next_window]
        self.__init__()
        return dropped
