"""A sequence is a coroutine: the whole life of a row, in one short function.

Theory of operation. `generate(seq)` runs until it needs something only a step of the engine can
give, and yields there. The engine resumes it when a step has computed tokens of it. In between the
sequence is plain state (token ids, sampling state, how much of it is in KV memory), so it can be
batched with others, suspended (its KV blocks given back) and resumed, here or elsewhere, without
the coroutine noticing: a suspended sequence simply waits through the chunks that compute its tokens
again.

Who writes what: the engine writes `num_computed_tokens`, `num_cached_tokens`, `sampled` and
`state`; the coroutine writes
`token_ids` and `finish_reason`. Token positions of a sequence, as half-open intervals:

    [0, num_cached_tokens)                      computed by others, shared blocks
    [num_cached_tokens, num_computed_tokens)    computed for this sequence, in its own blocks
    [num_computed_tokens, num_tokens)           known, not yet in KV memory
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from typing import Literal

from schedulers.view import SeqId
from workers.errors import InternalError
from workers.request import Completion, FinishReason, Matcher, Request, Resume, Sampled

State = Literal["open", "finished"]
FindStop = Callable[[list[int]], str | None]
"""Given the generated ids, the stop string that their text contains, if any."""


@types.coroutine
def _step() -> Generator[None, None, None]:
    """The only place where a sequence yields: until the engine has computed more of it."""
    yield


async def prefill(seq: Sequence) -> None:
    """Wait until all known tokens are in KV memory. Yields once per chunk; the last chunk also
    samples.
    """
    while seq.num_computed_tokens < seq.num_tokens:
        await _step()


async def next_token(seq: Sequence) -> Sampled:
    """Wait for the token that follows the known ones. Yields once, or more often when the sequence
    was suspended.
    """
    while seq.sampled is None:
        await _step()
    return seq.take_sampled()


async def generate(seq: Sequence) -> Completion:
    """The whole life of a sample."""
    await prefill(seq)
    while not seq.finished:
        seq.append(await next_token(seq))
    return seq.result()


class Sequence:
    """State of one sample of one request. Satisfies `schedulers.view.SequenceView`."""

    __slots__ = (
        "admission",
        "arrived_s",
        "coroutine",
        "eos_token_ids",
        "error",
        "find_stop",
        "finish_reason",
        "logprobs",
        "matcher",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_suspensions",
        "request",
        "sample_index",
        "sampled",
        "seq_id",
        "started_s",
        "state",
        "stop_ids",
        "stop_string",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: SeqId,
        request: Request,
        *,
        sample_index: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        find_stop: FindStop | None,
        arrived_s: float,
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.sample_index = sample_index
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = min(
            self.num_prompt_tokens + request.sampling.max_tokens, max_model_len
        )
        self.eos_token_ids = eos_token_ids
        own_stops = frozenset(request.sampling.stop_token_ids)
        self.stop_ids = own_stops if request.sampling.ignore_eos else own_stops | eos_token_ids
        self.find_stop = find_stop
        self.matcher: Matcher | None = request.grammar.matcher() if request.grammar else None
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.sampled: Sampled | None = None
        self.state: State = "open"
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None
        self.logprobs: list[Sampled] = []
        self.num_suspensions = 0
        self.admission = -1
        self.arrived_s = arrived_s
        self.started_s: float | None = None
        self.error: str | None = None
        self.coroutine: Coroutine[None, None, Completion] = generate(self)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def restore(self, resume: Resume) -> None:
        """Take the tokens that another engine has generated, before the coroutine starts."""
        for token_id in resume.output_token_ids:
            self.token_ids.append(token_id)
            if self.matcher is not None:
                self.matcher.accept(token_id)
        self.logprobs.extend(resume.logprobs)
        self.num_suspensions = resume.num_suspensions

    def take_sampled(self) -> Sampled:
        """Hand the sampled token over, once."""
        sampled = self.sampled
        if sampled is None:
            raise InternalError(f"sequence {self.seq_id}: no token has been sampled")
        self.sampled = None
        return sampled

    def append(self, sampled: Sampled) -> None:
        """Take a token as the next one, and notice whether it ends the sample."""
        if sampled.error is not None:
            self.error = sampled.error
            self.finish_reason = "error"
            return
        self.token_ids.append(sampled.token_id)
        if self.request.sampling.logprobs is not None:
            self.logprobs.append(sampled)
        if self.matcher is not None:
            self.matcher.accept(sampled.token_id)
        self.finish_reason = self._end(sampled.token_id)

    def _end(self, token_id: int) -> FinishReason | None:
        if self.num_output_tokens >= self.request.sampling.min_tokens:
            if token_id in self.stop_ids:
                return "stop"
            if self.matcher is not None and self.matcher.terminated:
                return "stop"
            if self.find_stop is not None:
                self.stop_string = self.find_stop(self.output_token_ids)
                if self.stop_string is not None:
                    return "stop"
        return "length" if self.num_tokens >= self.max_total_tokens else None

    def result(self) -> Completion:
        if self.finish_reason is None:
            raise InternalError(
                f"sequence {self.seq_id} has no result yet: {self.num_output_tokens} tokens so far"
            )
        return Completion(
            token_ids=tuple(self.output_token_ids),
            finish_reason=self.finish_reason,
            stop_string=self.stop_string,
            logprobs=tuple(self.logprobs),
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request.request_id!r}, {self.state}, "
            f"prompt={self.num_prompt_tokens}, computed={self.num_computed_tokens}, "
            f"tokens={self.num_tokens}, suspensions={self.num_suspensions})"
        )
