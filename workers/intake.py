"""Where requests come from. The engine never holds more than a window of requests that have not
started, and never blocks on its input while it has work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from workers.request import Request


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
