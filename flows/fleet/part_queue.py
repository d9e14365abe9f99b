"""Rows that a worker has been given and has not begun to read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from flows.fleet.messages import Assign, Ordinals


class PartQueue:
    """Parts of shards, in order; the last ones can be taken back. Thread-safe."""

    def __init__(self) -> None:
        self._unread: deque[Assign] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, part: Assign) -> None:
        """Queue rows behind the earlier ones."""
        with self._changed:
            self._unread.append(part)
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing will follow."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def drop(self) -> None:
        """Forget what is queued, and close."""
        with self._changed:
            self._unread.clear()
        self.close()

    def take(self, first_rows: Callable[[int], int] = lambda num_rows: num_rows) -> Assign | None:
        """The next part, or its first rows; waits for one; None when nothing will follow.

        Args:
            first_rows: how many of a part's rows to take; the rest stays, and can be taken back.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._unread or self._closed)
            if not self._unread:
                return None
            part = self._unread.popleft()
            count = first_rows(part.num_rows)
            if count < part.num_rows:
                self._unread.appendleft(part._replace(ordinals=part.ordinals[count:]))
            return part._replace(ordinals=part.ordinals[:count])

    def take_back(self, max_rows: int) -> list[Assign]:
        """Rows, of the last that were submitted, that nobody has begun to read."""
        taken: list[Assign] = []
        with self._changed:
            while self._unread and max_rows > 0:
                part = self._unread.pop()
                kept = max(0, part.num_rows - max_rows)
                if kept:
                    self._unread.append(part._replace(ordinals=part.ordinals[:kept]))
                taken.append(part._replace(ordinals=part.ordinals[kept:]))
                max_rows -= part.num_rows - kept
        return taken


class AllBut:
    """All numbers but some: what to skip so that a part's rows are read.

    Args:
        ordinals: those that are not in it.
    """

    def __init__(self, ordinals: Ordinals) -> None:
        self._some = frozenset(ordinals.tolist())

    def __contains__(self, number: object) -> bool:
        return number not in self._some
