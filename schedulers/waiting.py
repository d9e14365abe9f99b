"""What waits, and in which order it is offered to the policy.

Within a window the longest go first (against the tail), and all of a window come before what
arrives behind it, so nothing is overtaken for ever.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from schedulers.view import SequenceView

S = TypeVar("S", bound=SequenceView)


class Waiting(Generic[S]):
    """Ss that hold no KV blocks, in the order in which they should be admitted.

    Four groups: suspended ones (oldest first), siblings of a sample whose prompt is in KV memory,
    the current window and the next one, both longest first. The next window collects arrivals, and
    becomes the current one when that is empty.
    """

    def __init__(self) -> None:
        self._suspended: list[S] = []
        self._siblings: deque[S] = deque()
        self._window: deque[S] = deque()
        self._next_window: list[S] = []

    def __len__(self) -> int:
        return (
            len(self._suspended) + len(self._siblings) + len(self._window) + len(self._next_window)
        )

    def arrive(self, seq: S) -> None:
        # The serial number breaks ties, so the order is a function of the input.
        insort(self._next_window, seq, key=lambda item: (-item.max_total_tokens, item.seq_id))

    def add_siblings(self, sequences: Iterable[S]) -> None:
        self._siblings.extend(sequences)

    def suspend(self, seq: S) -> None:
        """Back in line, before everything that has not started; the oldest first among its kind."""
        self._suspended.append(seq)
        self._suspended.sort(key=lambda item: item.seq_id)

    def ordered(self) -> list[S]:
        """All of them, in order."""
        if not self._window and self._next_window:
            self._window.extend(self._next_window)
            self._next_window.clear()
        return [*self._suspended, *self._siblings, *self._window, *self._next_window]

    def admit(self, seq: S) -> None:
        """Take a sequence out: it holds blocks from now on."""
        for group in (self._window, self._siblings, self._suspended, self._next_window):
            if group and group[0] is seq:
                if isinstance(group, deque):
                    group.popleft()
                else:
                    del group[0]
                return
        self.remove(seq)

    def remove(self, seq: S) -> None:
        for group in (self._suspended, self._siblings, self._window, self._next_window):
            if seq in group:
                group.remove(seq)
                return

    def clear(self) -> list[S]:
        """Drop everything; returns what was dropped."""
        dropped = [*self._suspended, *self._siblings, *self._window, *self._next_window]
        self.__init__()
        return dropped
