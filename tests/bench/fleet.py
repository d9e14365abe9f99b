"""The processes of a benchmark: each side's is started once, and stopped while others run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.bench.common import Item, Workload
from tests.bench.figures import Run
from tests.bench.peers.process import Answer, RunnerProcess
from tests.bench.sides import Side, Variant
from workers.loading.files import ModelFiles

FIRST_TOKEN = (Item(tuple(range(100, 164)), 1),)
"""What every process is asked first: 64 tokens, one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A side's process that has given its first token. Times are since its start."""

    process: RunnerProcess
    ready_s: float
    first_token_s: float


class Fleet:
    """A context manager: leaving it ends all processes.

    Args:
        files: the model.
        folder: where workloads are put for the runners to read.
        warm_up: a few items that a process does before it is measured; first calls build caches
            and start threads.
    """

    def __init__(self, files: ModelFiles, folder: Path, warm_up: tuple[Item, ...]) -> None:
        self._files = files
        self._file = folder / "workload.json"
        self._warm_up = warm_up
        self._members: dict[tuple[str, Variant], Member] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.keep_only(())

    def keep_only(self, wanted: Collection[tuple[str, Variant]]) -> None:
        """End the processes of all other sides and variants: they hold memory."""
        for key in [key for key in self._members if key not in wanted]:
            self._members.pop(key).process.close()

    def run(self, side: Side, variant: Variant, workload: Workload) -> tuple[Run, Answer]:
        """One run in the side's process, which is started if it is not there.

        Raises:
            RunnerError: the process failed; it is gone then.
        """
        key = (side.label, variant)
        try:
            if key not in self._members:
                self._members[key] = self._start(side, variant)
                self._members[key].process.run(self._warm_up, self._file)
            member = self._members[key]
            answer = member.process.run(workload.items, self._file)
        except BaseException:
            if key in self._members:
                self._members.pop(key).process.close()
            raise
        return _record(side, workload, member, answer, member.ready_s + answer.elapsed_s), answer

    def run_fresh(self, side: Side, variant: Variant, workload: Workload) -> tuple[Run, Answer]:
        """One run in a process of its own, timed from its start.

        Raises:
            RunnerError: the process failed.
        """
        member = self._start(side, variant)
        with member.process:
            answer = member.process.run(workload.items, self._file)
        job_s = answer.ended_at - member.process.started_at
        return _record(side, workload, member, answer, job_s), answer

    def _start(self, side: Side, variant: Variant) -> Member:
        process = side.start(variant, self._files)
        try:
            ready_s = process.wait_until_ready()
            answer = process.run(FIRST_TOKEN, self._file)
        except BaseException:
            process.close()
            raise
        first_token_s = answer.ended_at - process.started_at
        return Member(process=process, ready_s=ready_s, first_token_s=first_token_s)


def _record(side: Side, workload: Workload, member: Member, answer: Answer, job_s: float) -> Run:
    return Run(
        workload=workload.name,
        side=side.label,
        engine=side.kind_name,
        dtype=side.dtype,
        round=0,
        num_rows=len(workload.items),
        num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=workload.num_output_tokens,
        elapsed_s=answer.elapsed_s,
        ready_s=member.ready_s,
        first_token_s=member.first_token_s,
        job_s=job_s,
        peak_bytes=answer.peak_bytes,
    )
