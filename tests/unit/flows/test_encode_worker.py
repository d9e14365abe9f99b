"""A worker of encode calls, by itself: what it tells, in which order, and when it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.fleet.encode_worker import EncodeWorker
from flows.fleet.messages import (
    Assign,
    Began,
    Block,
    EncodeCall,
    Ended,
    Event,
    Failed,
    Finish,
    Give,
    Given,
    Steps,
    Stop,
    WorkerSetup,
)
from flows.model import Model, Vectors
from flows.prepare import prepare
from flows.spec import JobSpec
from storage.shards import Shard, Span
from tests.e2e.jobs import WordTokenizer, fake_encoder_model
from workers.backends.fake_encoder import FakeEncodeFaults
from workers.encoding import PackedTexts
from workers.errors import BackendError

NUM_ROWS = 40
SPAN = Shard(0, (Span(0, 0, 0, NUM_ROWS, 0),), 0)


def text_of(row: int) -> str | None:
    """Rows 10, 20 and 30 have none; the others 1 to 7 words, all different."""
    return None if row and row % 10 == 0 else " ".join(f"v0-{row}" for _ in range(1 + row % 7))


class Lone:
    """A worker and all that it has said."""

    def __init__(
        self,
        folder: Path,
        fake: Model,
        *,
        max_texts: int = 100,
        reports: bool = False,
        **fields: Any,
    ) -> None:
        source = folder / "in.parquet"
        pq.write_table(pa.table({"text": [text_of(row) for row in range(NUM_ROWS)]}), source)
        spec = JobSpec.model_validate(
            {"input": str(source), "task": "embed", "prompt": {"column": "text"},
             "output": str(folder / "out"), "engine": {"max_batch_tokens": 16}, **fields}
        )  # fmt: skip
        job = prepare(spec)
        self.said: list[Event] = []
        setup = WorkerSetup(
            spec=spec, dataset=job.dataset, open_model=lambda _: fake, max_texts=max_texts,
            reports=reports,
        )  # fmt: skip
        self.worker = EncodeWorker(setup, self.said.append, model=fake)
        self.worker.load()

    def assign(self, rows: Sequence[int]) -> None:
        self.worker.handle(Assign(SPAN, np.array(rows, dtype=np.int64)))

    def run(self) -> None:
        thread = threading.Thread(target=self.worker.run)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.said if isinstance(event, kind)]

    def calls(self) -> list[EncodeCall]:
        records = [record for steps in self.of(Steps) for record in steps.records]
        return [record for record in records if isinstance(record, EncodeCall)]


def told(lone: Lone) -> dict[int, tuple[str, bool]]:
    """Of each row that was told: its status, and whether it has a vector. None is told twice."""
    found: dict[int, tuple[str, bool]] = {}
    for block in lone.of(Block):
        rows = block.table.to_pylist()
        assert [row["row_id"] for row in rows] == [f"in.parquet:{n}" for n in block.ordinals]
        for number, row in zip(block.ordinals.tolist(), rows, strict=True):
            assert number not in found
            found[number] = row["status"], row["embedding"] is not None
    return found


def finished(rows: Sequence[int]) -> dict[int, tuple[str, bool]]:
    return {n: ("ok", True) if text_of(n) else ("skipped", False) for n in rows}


@pytest.mark.parametrize("reports", [False, True])
def test_each_part_is_a_call_and_a_block(tmp_path: Path, reports: bool) -> None:
    lone = Lone(tmp_path, fake_encoder_model(), reports=reports)
    lone.assign(range(25))
    lone.assign(range(30, 40, 2))
    lone.worker.handle(Finish())
    lone.run()
    assert [block.ordinals.tolist() for block in lone.of(Block)] == [
        list(range(25)), list(range(30, 40, 2))
    ]  # fmt: skip
    assert told(lone) == finished([*range(25), *range(30, 40, 2)])
    assert [call.num_texts for call in lone.calls()] == [23, 4]
    began = [event.ordinals.tolist() for event in lone.of(Began)]
    assert began == ([list(range(25)), list(range(30, 40, 2))] if reports else [])
    kinds = [type(event) for event in lone.said if isinstance(event, Began | Block)]
    assert kinds == ([Began, Block] * 2 if reports else [Block] * 2)
    assert isinstance(lone.said[-1], Ended)


@pytest.mark.parametrize(("max_texts", "sizes"), [(10, [8, 9, 8]), (25, [25]), (12, [8, 8, 9])])
def test_a_part_above_the_threshold_is_encoded_in_slices(
    tmp_path: Path, max_texts: int, sizes: list[int]
) -> None:
    lone = Lone(tmp_path, fake_encoder_model(), max_texts=max_texts)
    lone.assign(range(25))
    lone.worker.handle(Finish())
    lone.run()
    found = [len(block.ordinals) for block in lone.of(Block)]
    assert sorted(found) == sorted(sizes)
    assert max(found) <= max_texts
    assert told(lone) == finished(range(25))


@pytest.mark.parametrize("stop_at", range(1, 9))
def test_of_a_call_that_is_stopped_only_finished_rows_are_told(
    tmp_path: Path, stop_at: int
) -> None:
    computed: list[int] = []

    def on_execute(texts: PackedTexts) -> None:
        if len(calls) + 1 == stop_at:
            lone.worker.handle(Stop())
        calls.append(len(texts))
        computed.extend(ids[0] for ids in np.split(texts.token_ids_T, texts.ends_N)[:-1])

    calls: list[int] = []
    lone = Lone(tmp_path, fake_encoder_model(on_execute=on_execute))
    lone.assign(range(NUM_ROWS))
    lone.run()
    ids = {n: WordTokenizer().encode_batch([f"v0-{n}"], add_special_tokens=True)[0][0]
           for n in range(NUM_ROWS)}  # fmt: skip
    assert len(set(ids.values())) == NUM_ROWS
    done = [n for n in range(NUM_ROWS) if text_of(n) is None or ids[n] in computed]
    assert len(calls) == stop_at  # the micro-batch under way ends, and none follows
    assert 3 < len(done) < NUM_ROWS
    assert told(lone) == finished(done)
    assert isinstance(lone.said[-1], Ended)


def test_choices_that_are_half_done_are_not_told(tmp_path: Path) -> None:
    executed: list[PackedTexts] = []

    def on_execute(texts: PackedTexts) -> None:
        executed.append(texts)
        lone.worker.handle(Stop())

    model = replace(
        fake_encoder_model(task="score", on_execute=on_execute), vectors=Vectors(3, ("a", "b", "c"))
    )
    lone = Lone(
        tmp_path, model, task="classify", model="m", encode={"choices": ["a", "b", "c"]},
        engine={"max_batch_tokens": 40},
    )  # fmt: skip
    lone.assign(range(9))
    lone.run()
    (texts,) = executed
    (block,) = lone.of(Block)
    assert len(texts) % 3  # some row has one or two of its three texts
    assert 0 < len(block.ordinals) == len(texts) // 3
    assert block.table["scores"].null_count == 0


def test_a_worker_that_is_stopped_before_its_first_part_tells_nothing(tmp_path: Path) -> None:
    lone = Lone(tmp_path, fake_encoder_model())
    lone.worker.handle(Stop())
    lone.run()
    assert lone.said == [Ended()]


def test_a_device_that_fails_is_told_and_its_call_is_not(tmp_path: Path) -> None:
    lone = Lone(
        tmp_path, fake_encoder_model(faults=FakeEncodeFaults(fail_at_call=3)), max_texts=100
    )
    lone.assign(range(5))
    lone.assign(range(5, NUM_ROWS))
    lone.run()
    (failed,) = lone.of(Failed)
    assert isinstance(failed.fault, BackendError)
    assert set(told(lone)) <= set(range(5))
    assert lone.said[-1] is failed


# -- rows that move --


def blocked(folder: Path) -> tuple[Lone, threading.Event, threading.Thread, Callable[[], None]]:
    """A worker that waits inside its second call, with two parts behind that one."""
    free, inside, seen = threading.Event(), threading.Event(), list[int]()

    def on_execute(texts: PackedTexts) -> None:
        seen.append(len(texts))
        if len(seen) > 1:
            inside.set()
            assert free.wait(20)

    lone = Lone(folder, fake_encoder_model(on_execute=on_execute), engine={}, reports=True)
    for start in (1, 11, 21, 31):
        lone.assign(range(start, start + 9))
    thread = threading.Thread(target=lone.worker.run)
    thread.start()

    def end() -> None:
        lone.worker.handle(Finish())
        free.set()
        thread.join(20)
        assert not thread.is_alive()

    return lone, inside, thread, end


def test_unread_rows_are_given_away_once(tmp_path: Path) -> None:
    lone, inside, _, end = blocked(tmp_path)
    assert inside.wait(20)
    lone.worker.handle(Give(1e6, 0.0))
    lone.worker.handle(Give(1e6, 0.0))
    end()
    given = [part for event in lone.of(Given) for part in event.unread]
    away = [n for part in given for n in part.ordinals.tolist()]
    # The second call is under way; the third may have been read ahead.
    assert set(range(31, 40)) <= set(away) <= set(range(21, 40))
    assert len(set(away)) == len(away)
    here = {n for start in (1, 11, 21, 31) for n in range(start, start + 9)} - set(away)
    assert told(lone) == finished(sorted(here))


def test_before_its_pace_is_known_a_worker_keeps_its_rows(tmp_path: Path) -> None:
    lone = Lone(tmp_path, fake_encoder_model())
    lone.assign(range(9))
    lone.worker.handle(Give(1e6, 0.0))
    assert lone.said == [Given()]
    lone.worker.handle(Finish())
    lone.run()
    assert told(lone) == finished(range(9))
