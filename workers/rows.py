"""Rows in flight: which samples belong to which request, and what is still missing for its result.

Whose truth: the engine's. A row is open from its arrival to its one `Result`.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedulers.view import SeqId
from workers.request import Completion, Request, Result, RowError
from workers.sequence import Sequence


@dataclass(slots=True)
class Row:
    """A request on its way to its result.

    Attributes:
        sequences: one per sample, in order.
        completions: what has ended so far.
        siblings_started: samples 1.. wait for the prompt of sample 0, whose blocks they share.
    """

    request: Request
    sequences: list[Sequence]
    completions: list[Completion | None]
    siblings_started: bool

    def result(self, error: RowError | None, *, now_s: float) -> Result:
        """The row's answer: all completions, or the error."""
        first = self.sequences[0]
        started_s = now_s if first.started_s is None else first.started_s
        done = () if error else tuple(item for item in self.completions if item is not None)
        return Result(
            request_id=self.request.request_id,
            completions=done,
            error=error,
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=first.num_cached_tokens,
            num_suspensions=sum(seq.num_suspensions for seq in self.sequences),
            queue_s=started_s - first.arrived_s,
            run_s=now_s - started_s,
        )


class RowTable:
    """Owner of the open rows and of the results that have not been handed out."""

    def __init__(self) -> None:
        self._rows: dict[SeqId, Row] = {}
        self._results: list[Result] = []
        self.num_open = 0

    def __getitem__(self, seq: Sequence) -> Row:
        return self._rows[seq.seq_id]

    def open(self, request: Request, sequences: list[Sequence]) -> None:
        """Take in a request with its samples."""
        row = Row(request, sequences, [None] * len(sequences), len(sequences) == 1)
        for seq in sequences:
            self._rows[seq.seq_id] = row
        self.num_open += 1

    def refuse(self, request: Request, error: RowError) -> None:
        """Answer a request that cannot run, without opening it."""
        self._results.append(
            Result(
                request_id=request.request_id,
                error=error,
                num_prompt_tokens=len(request.prompt_token_ids),
            )
        )

    def complete(self, seq: Sequence, completion: Completion, *, now_s: float) -> None:
        """A sample has ended; the row ends with its last one."""
        row = self._rows[seq.seq_id]
        row.completions[seq.sample_index] = completion
        if all(item is not None for item in row.completions):
            self._close(row, None, now_s=now_s)

    def fail(self, seq: Sequence, error: RowError, *, now_s: float) -> None:
        """A whole row ends with an error."""
        self._close(self._rows[seq.seq_id], error, now_s=now_s)

    def _close(self, row: Row, error: RowError | None, *, now_s: float) -> None:
        for seq in row.sequences:
            del self._rows[seq.seq_id]
        self.num_open -= 1
        self._results.append(row.result(error, now_s=now_s))

    def open_rows(self) -> list[Row]:
        """In order of arrival."""
        return list({id(row): row for row in self._rows.values()}.values())

    def remove(self, row: Row) -> None:
        """A row is gone without a result: another engine has it."""
        for seq in row.sequences:
            del self._rows[seq.seq_id]
        self.num_open -= 1

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def drain(self) -> list[Result]:
        """Hand the results out, each once."""
        results, self._results = self._results, []
        return results

    def clear(self) -> list[Sequence]:
        """Drop all open rows without a result (the run was stopped); returns their samples."""
        dropped = {seq.seq_id: seq for row in self._rows.values() for seq in row.sequences}
        self._rows.clear()
        self.num_open = 0
        return list(dropped.values())
