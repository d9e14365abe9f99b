r"""The bounded queues between the threads of a run, and what travels on them.

    feeder --Request--> RequestQueue --> engine --Result--> Outbox --> outlet
       \------------------ Settled (rows that need no engine) ---------^

Every wait ends when the run stops.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from workers.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class RowRef(NamedTuple):
    """Where a row's result belongs."""

    shard_index: int
    ordinal: int
    row_id: str


class Stopped(Exception):
    """The run is ending: whoever waits on a queue should leave."""


RowKey = tuple[int, int]
"""Shard index and ordinal: a row, without its name."""


class RequestQueue:
    """A bounded queue of requests: the feeder's end is `put`, the engine's the `RequestSource`
    protocol.

    Args:
        max_requests: `put` waits while that many are ready.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._ready: deque[Request] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._stopped = False
        self._woken = False

    def put(self, requests: Sequence[Request]) -> None:
        """Add requests in order; waits for room.

        Raises:
            Stopped: the run is ending.
        """
        start = 0
        while start < len(requests):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopped or len(self._ready) < self._max_requests
                )
                if self._stopped:
                    raise Stopped
                room = self._max_requests - len(self._ready)
                self._ready.extend(requests[start : start + room])
                start += room
                self._changed.notify_all()

    def close(self) -> None:
        """Nothing more will be put."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Drop what is ready and let everybody go."""
        with self._changed:
            self._closed = self._stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def put_first(self, requests: Sequence[Request]) -> None:
        """Add requests before all others, however many are ready."""
        with self._changed:
            if not self._stopped:
                self._ready.extendleft(reversed(requests))
                self._changed.notify_all()

    def take_back(self, max_requests: int) -> list[Request]:
        """Take the last ones out again."""
        with self._changed:
            taken = [self._ready.pop() for _ in range(min(max_requests, len(self._ready)))]
            self._changed.notify_all()
            return taken[::-1]

    def wake(self) -> None:
        """Let a waiting `take` return, with nothing if there is nothing."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def take(self, max_requests: int, *, wait: bool) -> list[Request]:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._ready or self._closed or self._woken)
            self._woken = False
            taken = [self._ready.popleft() for _ in range(min(max_requests, len(self._ready)))]
            if taken:
                self._changed.notify_all()
            return taken

    @property
    def exhausted(self) -> bool:
        with self._changed:
            return self._closed and not self._ready

    def __len__(self) -> int:
        return len(self._ready)


class Outbox(Generic[T]):
    """A bounded queue into the collector, from several threads; taken in lists to save wake-ups.

    Args:
        max_items: `put` waits while that many are queued.
        weigh: as how many items one counts.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        max_items: int,
        *,
        weigh: Callable[[T], int] = lambda _: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_items = max_items
        self._weigh = weigh
        self._weight = 0
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._clock = clock
        self._stopped = False
        self._woken = False

    def put(self, items: Sequence[T]) -> None:
        """Add items; waits for room.

        Raises:
            Stopped: nobody will read any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._weight < self._max_items)
            if self._stopped:
                raise Stopped
            self._items.extend(items)
            self._weight += sum(map(self._weigh, items))
            self._changed.notify_all()

    def take(self, *, timeout_s: float) -> list[T]:
        """All that is queued; waits for something, or for `wake`, for at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._woken, timeout=max(0.0, timeout_s))
            self._woken = False
            taken = list(self._items)
            self._items.clear()
            self._weight = 0
            self._changed.notify_all()
            return taken

    def wake(self) -> None:
        """Let a waiting `take` return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Let writers go."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._items)
