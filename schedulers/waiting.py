"""What waits, and in which order it is offered to the policy.

Within a window the longest go first (against the tail), and a window is admitted whole before the
next one is taken in, so nothing is overtaken for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from schedulers.view import SequenceView

S = TypeVar("S", bound=SequenceView)


class Waiting(Generic[S]):
    """Ss that hold no KV blocks, in the order in which they should be admitted.

    Three groups: suspended ones (oldest first), siblings of a sample whose prompt is in KV memory,
    and the current window, longest first. `next_window` collects arrivals until the current one is
    empty.
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
        self._next_window.append(seq)

    def add_siblings(self, sequences: Iterable[S]) -> None:
        self._siblings.extend(sequences)

    def suspend(self, seq: S) -> None:
        """Back in line, before everything that has not started; the oldest first among its kind."""
        self._suspended.append(seq)
        self._suspended.sort(key=lambda item: item.seq_id)

    def ordered(self) -> list[S]:
        """All that may be admitted now, in order."""
        if not self._window and self._next_window:
            # Longest first; the serial number breaks ties, so the order is a function of the input.
            self._next_window.sort(key=lambda seq: (-seq.max_total_tokens, seq.seq_id))
            self._window.extend(self._next_window)
            self._next_window.clear()
        return [*self._suspended, *self._siblings, *self._window]

    def admit(self, seq: S) -> None:
        """Take a sequence out: it holds blocks from now on."""
        for group in (self._window, self._siblings, self._suspended):
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
