"""Results to result rows: detokenising, stop strings, output checks; a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from flows.feeder import Settled
from flows.queues import RowRef
from storage.results import ResultRow
from workers.request import Completion, Result, Sampled


class Answered(NamedTuple):
    """A row that came back from the engine."""

    ref: RowRef
    result: Result


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]: ...
    def text(self, ids: Sequence[int], *, stop_string: str | None = None) -> str:
        """A completion's text, cut before the stop string that its last token completed."""
        ...


class RowMaker:
    """Makes result rows.

    Args:
        decoder: token ids to text.
        check_output: says what is wrong with a text that should follow a schema; None: no schema.
    """

    def __init__(
        self, decoder: Decoder, *, check_output: Callable[[str], str | None] | None = None
    ) -> None:
        self._decoder = decoder
        self._check_output = check_output

    def __call__(self, items: Sequence[Answered | Settled]) -> list[tuple[RowRef, ResultRow]]:
        completions = [
            completion
            for item in items
            if isinstance(item, Answered)
            for completion in item.result.completions
        ]
        texts = self._texts(completions)
        return [
            (
                item.ref,
                _settled_row(item)
                if isinstance(item, Settled)
                else self._answered_row(item.ref, item.result, texts),
            )
            for item in items
        ]

    def _texts(self, completions: Sequence[Completion]) -> Iterator[str]:
        """Texts in order, cut before the stop string that ended them."""
        decoded = self._decoder.decode_batch([c.token_ids for c in completions])
        for completion, text in zip(completions, decoded, strict=True):
            stop = completion.stop_string
            yield (
                text if stop is None else self._decoder.text(completion.token_ids, stop_string=stop)
            )

    def _answered_row(self, ref: RowRef, result: Result, texts: Iterator[str]) -> ResultRow:
        row = ResultRow(
            ordinal=ref.ordinal,
            row_id=ref.row_id,
            status="ok",
            prompt_tokens=result.num_prompt_tokens,
            cached_tokens=result.num_cached_tokens,
            queue_s=result.queue_s,
            run_s=result.run_s,
        )
        if result.error is not None:
            row.status, row.finish_reason = "error", "error"
            row.error_type, row.error_message = result.error
            return row
        samples = [(completion, next(texts)) for completion in result.completions]
        completion, row.text = samples[0]
        row.finish_reason = completion.finish_reason
        row.completion_tokens = sum(len(c.token_ids) for c, _ in samples)
        row.cumulative_logprob = completion.cumulative_logprob
        row.logprobs = [_logprob(item) for item in completion.logprobs] or None
        if len(samples) > 1:
            row.samples = [_sample(c, text) for c, text in samples]
        self._check(row)
        return row

    def _check(self, row: ResultRow) -> None:
        """Text that should follow a schema and does not is kept, and said to be invalid."""
        if self._check_output is None:
            return
        fault = self._check_output(row.text or "")
        if fault is None and row.finish_reason == "length":
            fault = "the output was cut at max_tokens"
        if fault is not None:
            row.status, row.error_type, row.error_message = (
                "invalid_output",
                "invalid_output",
                fault,
            )


def _settled_row(item: Settled) -> ResultRow:
    return ResultRow(
        ordinal=item.ref.ordinal,
        row_id=item.ref.row_id,
        status=item.status,
        finish_reason="error" if item.status == "error" else None,
        error_type=item.error.type,
        error_message=item.error.message,
    )


def _logprob(item: Sampled) -> dict[str, object]:
    return {
        "token_id": item.token_id,
        "logprob": item.logprob,
        "top": [{"token_id": top.token_id, "logprob": top.logprob} for top in item.top],
    }


def _sample(completion: Completion, text: str) -> dict[str, object]:
    return {
        "text": text,
        "finish_reason": completion.finish_reason,
        "completion_tokens": len(completion.token_ids),
    }
