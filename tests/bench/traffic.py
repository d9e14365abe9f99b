"""Requests of given lengths for a real engine: prompts of real text, outputs that end when the
workload says so and not when the policy could have known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from schedulers.sim.arrivals import ClosedLoop, SimRequest, Stage
from schedulers.view import SeqId
from workers.backends.base import Backend, Batch, Executed, ModelInfo
from workers.request import Request, RequestId, Sampled, SamplingParams


class ForcedLengths:
    """A backend whose answers end at given lengths: it computes all that the inner one does, and
    only replaces the end-of-sequence token, which comes when it is due and never before.

    Args:
        inner: computes.
        num_output_tokens: by request id.
    """

    def __init__(self, inner: Backend, num_output_tokens: Mapping[str, int]) -> None:
        self._inner = inner
        self._num_output_tokens = num_output_tokens
        self._eos = min(inner.info.eos_token_ids)
        self._other = next(
            token for token in range(inner.info.vocab_size) if token not in inner.info.eos_token_ids
        )

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def allocate(self, *, num_blocks: int, block_size: int) -> None:
        self._inner.allocate(num_blocks=num_blocks, block_size=block_size)

    def execute(self, batch: Batch) -> Executed:
        done = self._inner.execute(batch)
        sequences = [segment.seq for segment in batch.segments if segment.sample]
        forced = tuple(
            self._forced(token, seq.request.request_id, seq.num_output_tokens + 1)
            for token, seq in zip(done.sampled, sequences, strict=True)
        )
        return done._replace(sampled=forced)

    def _forced(self, sampled: Sampled, request_id: str, position: int) -> Sampled:
        if position >= self._num_output_tokens[request_id]:
            return sampled._replace(token_id=self._eos)
        if sampled.token_id in self.info.eos_token_ids:
            return sampled._replace(token_id=self._other)
        return sampled

    def forget(self, seq_id: SeqId) -> None:
        self._inner.forget(seq_id)

    def close(self) -> None:
        self._inner.close()


class Traffic(NamedTuple):
    """Requests with their stages: how many of them may be in flight.

    Attributes:
        name: of the setting.
        stages: lengths, in order.
    """

    name: str
    stages: Sequence[Stage[SimRequest]]

    def requests(self, text_token_ids: Sequence[int]) -> Iterator[tuple[SimRequest, Request, int]]:
        """Lengths, request and concurrency, in order; prompts are stretches of the text."""
        rng = np.random.default_rng(11)
        items = [(item, stage.concurrency) for stage in self.stages for item in stage.requests]
        for index, (lengths, concurrency) in enumerate(items):
            start = int(rng.integers(0, len(text_token_ids) - lengths.num_prompt_tokens))
            prompt = text_token_ids[start : start + lengths.num_prompt_tokens]
            sampling = SamplingParams(max_tokens=lengths.max_output_tokens)
            yield (
                lengths,
                Request(
                    request_id=RequestId(str(index)), prompt_token_ids=prompt, sampling=sampling
                ),
                concurrency,
            )


class ClosedSource:
    """A `RequestSource` that keeps a number of requests in flight; told of completions by whoever
    takes the results.
    """

    def __init__(self, stages: Sequence[Stage[Request]]) -> None:
        self._loop = ClosedLoop(stages)

    @property
    def exhausted(self) -> bool:
        return self._loop.exhausted

    def take(self, max_requests: int, *, wait: bool) -> list[Request]:
        return self._loop.take(max_requests)

    def finish(self, num_requests: int) -> None:
        self._loop.finish(num_requests)
