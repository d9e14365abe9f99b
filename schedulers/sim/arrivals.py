"""What arrives at a simulated engine, and when: all at once, or a bounded number in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np


class SimRequest(NamedTuple):
    """Lengths of a request.

    Attributes:
        num_output_tokens: what it will generate.
        max_output_tokens: what it may generate, as far as the policy knows.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    max_output_tokens: int


class Arrivals(Protocol):
    """A stream of requests that is told of completions."""

    def take(self, max_requests: int) -> list[SimRequest]: ...
    def finish(self, num_requests: int) -> None: ...
    @property
    def exhausted(self) -> bool: ...


class AllAtOnce:
    """The whole dataset, offered as fast as it is taken: an offline job."""

    def __init__(self, requests: Iterable[SimRequest]) -> None:
        self._requests: Iterator[SimRequest] = iter(requests)
        self.exhausted = False

    def take(self, max_requests: int) -> list[SimRequest]:
        taken = list(islice(self._requests, max_requests))
        self.exhausted = len(taken) < max_requests
        return taken

    def finish(self, num_requests: int) -> None:
        """Without effect: nothing waits for a completion."""


R = TypeVar("R")


class Stage(NamedTuple, Generic[R]):
    """Requests, and how many of them may be in flight while they are the latest."""

    requests: Sequence[R]
    concurrency: int


class ClosedLoop(Generic[R]):
    """A client that keeps a number of requests in flight; a new one follows each completion.

    Args:
        stages: one after the other; a stage ends when all its requests were handed out.
    """

    def __init__(self, stages: Sequence[Stage[R]]) -> None:
        self._pending = [(item, stage.concurrency) for stage in stages for item in stage.requests]
        self._num_taken = 0
        self._num_in_flight = 0

    @property
    def exhausted(self) -> bool:
        return self._num_taken >= len(self._pending)

    def take(self, max_requests: int) -> list[R]:
        """Up to `max_requests`, as far as the concurrency of each allows."""
        taken: list[R] = []
        while len(taken) < max_requests and not self.exhausted:
            item, concurrency = self._pending[self._num_taken]
            if self._num_in_flight >= concurrency:
                break
            taken.append(item)
            self._num_taken += 1
            self._num_in_flight += 1
        return taken

    def finish(self, num_requests: int) -> None:
        self._num_in_flight -= num_requests


def geometric_requests(
    num_requests: int,
    *,
    mean_prompt_tokens: float,
    mean_output_tokens: float,
    rng: np.random.Generator,
    spread: float = 0.5,
    longest_factor: float = 4.0,
) -> list[SimRequest]:
    """Prompts uniform within `spread` of their mean, outputs geometric, cut at `longest_factor`
    means (`exclusive_batching.md` A8).
    """
    longest = max(1, round(longest_factor * mean_output_tokens))
    low, high = (1 - spread) * mean_prompt_tokens, (1 + spread) * mean_prompt_tokens
    prompts = rng.integers(max(1, round(low)), max(2, round(high) + 1), num_requests)
    outputs = np.minimum(rng.geometric(1.0 / mean_output_tokens, num_requests), longest)
    return [
        SimRequest(int(prompt), int(output), longest)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
