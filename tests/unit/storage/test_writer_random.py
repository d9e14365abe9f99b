"""Random lives of a shard of vectors, against a model of what is in the buffer and what durable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.ledger import Ledger
from storage.results import ResultRow
from storage.rows import Row, RowReader
from storage.status import read_status
from storage.writer import ShardWriter
from tests.unit.storage.outputs import Crash, write_input
from tests.unit.storage.partitioned import VectorJob, vector_of

NUM_ROWS = 12
OPS = st.lists(
    st.tuples(
        st.sampled_from(["block", "block", "errors", "checkpoint", "kill", "close"]),
        st.sets(st.integers(0, NUM_ROWS - 1), min_size=1),
        st.booleans(),
    ),
    max_size=12,
)


@dataclass
class Life:
    """A shard's writer beside what it should hold: status by ordinal."""

    job: VectorJob
    ledger: Ledger = field(init=False)
    writer: ShardWriter = field(init=False)
    rows: list[Row] = field(init=False)
    buffered: dict[int, str] = field(default_factory=dict)
    durable: dict[int, str] = field(default_factory=dict)
    committed: bool = False

    def __post_init__(self) -> None:
        self.begin()
        reader = RowReader(self.ledger.dataset, ("text",))
        self.rows = [row for batch in reader.rows(self.ledger.shards[0]) for row in batch]

    def begin(self) -> None:
        self.ledger = self.job.open()
        self.writer = self.ledger.writer(self.ledger.shards[0])

    @property
    def known(self) -> dict[int, str]:
        return self.durable | self.buffered

    def block(self, ordinals: list[int]) -> None:
        self.job.add(self.writer, [self.rows[ordinal] for ordinal in ordinals])
        self.buffered |= dict.fromkeys(ordinals, "ok")

    def errors(self, ordinals: list[int]) -> None:
        for ordinal in ordinals:
            row_id = self.rows[ordinal].row_id
            self.writer.add(
                ResultRow(ordinal=ordinal, row_id=row_id, status="error", error_type="too_long")
            )
        self.buffered |= dict.fromkeys(ordinals, "error")

    def checkpoint(self) -> None:
        self.writer.checkpoint()
        self.durable, self.buffered = self.known, {}

    def kill(self) -> None:
        self.ledger.release()
        self.buffered = {}
        self.begin()

    def close(self) -> None:
        rest = [n for n in range(NUM_ROWS) if n not in self.known]
        if rest:
            self.block(rest)
        self.ledger.note_committed(self.writer.close())
        self.durable, self.buffered, self.committed = self.known, {}, True

    def check(self) -> None:
        assert self.writer.num_buffered == len(self.buffered)
        assert self.writer.done == set(self.known)
        assert self.writer.num_missing == NUM_ROWS - len(self.known)
        assert self.writer.missing.tolist() == sorted(set(range(NUM_ROWS)) - set(self.known))
        counts = {status: n for status in ("ok", "error") if (n := self.count(status))}
        assert read_status(str(self.job.output)).by_status == counts

    def count(self, status: str) -> int:
        return list(self.durable.values()).count(status)

    def check_results(self) -> None:
        found = self.job.results()
        assert list(found) == ["key=a", "key=b", "key=c"]
        rows = [row for held in found.values() for row in held]
        assert [row["row_id"] for row in rows] == [f"in.parquet:{n}" for n in range(NUM_ROWS)]
        for ordinal, row in enumerate(rows):
            good = self.durable[ordinal] == "ok"
            assert row["status"] == self.durable[ordinal]
            assert row["embedding"] == (vector_of(f"t{ordinal}") if good else None)


@pytest.fixture
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    def begin() -> Life:
        folder: Path = tmp_path_factory.mktemp("life")
        rows = {
            "key": ["a"] * 5 + ["b"] + ["c"] * 6,
            "text": [f"t{n}" for n in range(NUM_ROWS)],
        }
        file = write_input(folder / "in.parquet", rows, row_group_size=5)
        return Life(VectorJob(file, folder / "out", batch_rows=NUM_ROWS))

    return begin


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
@given(ops=OPS)
def test_a_shard_holds_what_the_model_holds(ops: list[Any], lives: Any) -> None:
    life: Life = lives()
    try:
        for name, ordinals, turned in ops:
            if name in ("block", "errors"):
                wanted = sorted(set(ordinals) - set(life.known), reverse=turned)
                if wanted:
                    getattr(life, name)(wanted)
            elif name == "close":
                break
            else:
                getattr(life, name)()
            life.check()
        life.close()
        life.check_results()
        assert read_status(str(life.job.output)).complete
    finally:
        life.ledger.release()


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30
)
@given(ops=OPS, at=st.integers(0, 20))
def test_a_close_that_fails_may_be_repeated(ops: list[Any], at: int, lives: Any) -> None:
    """The same writer: an error on the way out leaves it as it was."""
    life: Life = lives()
    try:
        for name, ordinals, _ in ops:
            wanted = sorted(set(ordinals) - set(life.known))
            if name in ("block", "errors") and wanted:
                getattr(life, name)(wanted)
            elif name == "checkpoint":
                life.checkpoint()
        rest = [n for n in range(NUM_ROWS) if n not in life.known]
        if rest:
            life.block(rest)
        left = [at]

        def failing(step: str) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Crash(step)

        life.writer._on_step = failing
        try:
            life.close()
        except Crash:
            life.close()
        life.check_results()
        assert np.all(life.writer.missing == [])
    finally:
        life.ledger.release()
