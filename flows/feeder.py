"""From rows to requests: the thread that reads, renders and tokenises ahead of the engine.

It keeps a bounded number of requests ready, so that the engine never waits for Parquet and a
million rows never lie in memory. A row that cannot become a request is settled at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from flows.busy import Meter
from flows.cutting import shorten_prompt
from flows.errors import JobFailed
from flows.fleet.messages import Assign
from flows.fleet.part_queue import PartQueue
from flows.prompts import PromptRenderer, Rendered
from flows.queues import Outbox, RequestQueue, RowRef, Stopped
from storage.rows import Row
from workers.request import Grammar, Request, RequestId, RowError, SamplingParams

OnTooLong = Literal["error", "truncate_left", "truncate_right", "fail"]


class Settled(NamedTuple):
    """A row that needs no engine: it was skipped, or cannot become a prompt."""

    ref: RowRef
    status: Literal["skipped", "error"]
    error: RowError


class Encoder(Protocol):
    """The part of a tokenizer that the feeder needs."""

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]: ...


class PromptTooLong(JobFailed):
    """A prompt exceeds the model's length and the job says `on_too_long: fail`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """What a prompt may be.

    Attributes:
        max_model_len: tokens of prompt and completion together.
        max_tokens: tokens of the completion.
        on_too_long: what happens to a prompt that leaves no room for a completion; truncation
            leaves
            room for `max_tokens`.
    """

    max_model_len: int
    max_tokens: int
    on_too_long: OnTooLong

    @property
    def truncated_tokens(self) -> int:
        return max(1, self.max_model_len - self.max_tokens)


class Feeder:
    """Turns rows of shards into requests. `run` is the body of a thread.

    Args:
        read: rows of a shard, in batches.
        renderer: row values to text (the chat template applied) or an error.
        encoder: text to token ids.
        limits: what to do about long prompts.
        sampling: of every request.
        requests: where requests go.
        outbox: where settled rows go.
        in_flight: request id to row, read by whoever receives the results.
        grammar: constrains every output, if given.
        meter: of the thread.
    """

    def __init__(
        self,
        *,
        read: Callable[[Assign], Iterator[list[Row]]],
        renderer: PromptRenderer,
        encoder: Encoder,
        limits: PromptLimits,
        sampling: SamplingParams,
        requests: RequestQueue,
        outbox: Outbox[Any],
        in_flight: dict[str, RowRef],
        grammar: Grammar | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._meter = meter or Meter("feeder")
        self._read = read
        self._renderer = renderer
        self._encoder = encoder
        self._limits = limits
        self._sampling = sampling
        self._requests = requests
        self._outbox = outbox
        self._in_flight = in_flight
        self._grammar = grammar
        self._parts = PartQueue()

    def submit(self, part: Assign) -> None:
        """Queue rows behind the earlier ones."""
        self._parts.submit(part)

    def take_back(self, max_rows: int) -> list[Assign]:
        """Rows, of the last that were submitted, that nobody has begun to read: they are not this
        feeder's any more.
        """
        return self._parts.take_back(max_rows)

    def close(self) -> None:
        """Nothing will follow."""
        self._parts.close()

    def run(self) -> None:
        """Feed all rows that were submitted, in order, until `close`; ends early when the run
        stops.
        """
        try:
            while (part := self._parts.take()) is not None:
                batches = self._read(part)
                while (rows := self._next(batches)) is not None:
                    self._feed(part.shard.index, rows)
        except Stopped:
            return
        finally:
            self._requests.close()

    def _next(self, batches: Iterator[list[Row]]) -> list[Row] | None:
        with self._meter("reading"):
            return next(batches, None)

    def _feed(self, shard_index: int, rows: list[Row]) -> None:
        settled: list[Settled] = []
        refs: list[RowRef] = []
        prompts: list[Rendered] = []
        with self._meter("templating"):
            for row in rows:
                ref = RowRef(shard_index, row.ordinal, row.row_id)
                rendered = self._renderer.render(row.values)
                if rendered.error is not None:
                    status = "skipped" if rendered.error.type == "null_prompt" else "error"
                    settled.append(Settled(ref, status, rendered.error))
                else:
                    refs.append(ref)
                    prompts.append(rendered)
        with self._meter("tokenising"):
            requests = self._encode(refs, prompts, settled)
        if settled:
            self._outbox.put(settled)
        self._requests.put(requests)

    def _encode(
        self, refs: list[RowRef], prompts: list[Rendered], settled: list[Settled]
    ) -> list[Request]:
        encoded = self._encoder.encode_batch(
            [prompt.text for prompt in prompts],
            add_special_tokens=self._renderer.add_special_tokens,
        )
        requests: list[Request] = []
        for ref, prompt, token_ids in zip(refs, prompts, encoded, strict=True):
            fitted = self._fit(ref, prompt, token_ids)
            if isinstance(fitted, RowError):
                settled.append(Settled(ref, "error", fitted))
                continue
            self._in_flight[ref.row_id] = ref
            requests.append(
                Request(
                    request_id=RequestId(ref.row_id),
                    prompt_token_ids=fitted,
                    sampling=self._sampling,
                    grammar=self._grammar,
                )
            )
        return requests

    def _fit(self, ref: RowRef, prompt: Rendered, token_ids: list[int]) -> list[int] | RowError:
        """The prompt's tokens, cut if the job says so, or why the row has none."""
        if not token_ids:
            return RowError("empty_prompt", "the prompt has no tokens")
        longest = self._limits.max_model_len
        if len(token_ids) < longest:
            return token_ids
        message = (
            f"the prompt has {len(token_ids)} tokens; the model takes {longest}, "
            "completion included (see --on-too-long)"
        )
        if self._limits.on_too_long == "fail":
            raise PromptTooLong(f"row {ref.row_id}: {message}")
        if self._limits.on_too_long == "error":
            return RowError("prompt_too_long", message)
        return self._truncate(prompt, token_ids)

    def _truncate(self, prompt: Rendered, token_ids: list[int]) -> list[int] | RowError:
        """Cut the row's own text, not the template around it, until prompt and completion fit."""
        limit = self._limits.truncated_tokens
        side = "left" if self._limits.on_too_long == "truncate_left" else "right"
        return shorten_prompt(
            self._renderer, self._encoder, prompt, token_ids, limit=limit, side=side
        )
