"""Embedding jobs over partitioned data: one file a partition, every row once, whatever is killed.

With an encoder whose vectors are a function of the text alone, so that every result can be checked.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from flows.errors import JobFailed
from flows.fleet.messages import Assign
from flows.journal import Journal
from flows.prepare import prepare
from flows.runner import run_job
from flows.spec import JobSpec
from flows.superbatches import QUEUE_DEPTH
from flows.texts import TextMaker, Texts
from schedulers.superbatch import Thresholds, resident_bound
from storage.hive import NULL_FOLDER
from storage.status import read_status
from storage.writer import ShardWriter
from tests.e2e.cases import Crash, write_table
from tests.e2e.jobs import FAKE_WIDTH, WordTokenizer, fake_encoder_model, worker_model
from workers.backends.fake_encoder import FakeEncodeFaults, FakeEncoder
from workers.encoding import PackedTexts

pytestmark = pytest.mark.e2e


def write_keyed(path: Path, sizes: list[int], *, grouped: bool = True, seed: int = 0) -> str:
    """Rows `id`, `key`, `text`, `n`; partition k is `p000k`."""
    rng = random.Random(seed)
    keys = [f"p{index:05d}" for index, size in enumerate(sizes) for _ in range(size)]
    if not grouped:
        rng.shuffle(keys)
    words = ["red", "green", "blue", "stone", "river", "wheel", "mill", "water"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in keys]
    table = pa.table(
        {"id": [f"row-{i}" for i in range(len(keys))], "key": keys, "text": texts,
         "n": range(len(keys))}
    )  # fmt: skip
    pq.write_table(table, path, row_group_size=97)
    return str(path)


def embed_spec(folder: Path, source: str, **fields: Any) -> JobSpec:
    defaults: dict[str, Any] = {
        "input": source,
        "task": "embed",
        "prompt": {"column": "text"},
        "output": str(folder / "out"),
        "partition_by": ["key"],
        "id_column": "id",
        "keep_columns": ["n"],
        "encode": {"min_texts": 40, "max_texts": 120},
    }
    return JobSpec.model_validate({**defaults, **fields})


def read_all(spec: JobSpec) -> list[dict[str, Any]]:
    """Every result row, as a reader of the hive folders sees it."""
    keys = pads.partitioning(pa.schema([("key", pa.string())]), flavor="hive")
    root = Path(spec.output) / "results"
    return pads.dataset(root, format="parquet", partitioning=keys).to_table().to_pylist()


def vector_of(text: str) -> list[float]:
    """What the fake encoder gives for a text."""
    (ids,) = WordTokenizer().encode_batch([text], add_special_tokens=True)
    return FakeEncoder(FAKE_WIDTH).execute(PackedTexts.from_lists([ids]))[0].tolist()


def check(spec: JobSpec, source: str) -> None:
    """Every input row is there once, under its key, with its own vector; each key has one file."""
    rows = read_all(spec)
    inputs = {row["id"]: row for row in pq.read_table(source).to_pylist()}
    assert Counter(row["row_id"] for row in rows) == dict.fromkeys(inputs, 1)
    for row in rows:
        given = inputs[row["row_id"]]
        assert (row["key"], row["n"], row["status"]) == (given["key"], given["n"], "ok")
        assert row["embedding"] == vector_of(given["text"])
    files = sorted(Path(spec.output).glob("results/key=*/*.parquet"))
    assert len(files) == len({row["key"] for row in inputs.values()})
    for file in files:  # in the order of the input
        numbers = pq.read_table(file, partitioning=None)["n"].to_pylist()
        assert numbers == sorted(numbers)


def lognormal(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [1 + int(rng.lognormvariate(1.5, 1.2)) for _ in range(count)]


@pytest.mark.parametrize("grouped", [True, False])
def test_every_row_is_under_its_key(tmp_path, grouped) -> None:
    source = write_keyed(tmp_path / "in.parquet", lognormal(60), grouped=grouped)
    spec = embed_spec(tmp_path, source)
    summary = run_job(spec, model=fake_encoder_model())
    assert summary.complete
    check(spec, source)
    with duckdb.connect(str(Path(spec.output) / "job.duckdb"), read_only=True) as con:
        counts = con.sql("select count(*), count(distinct key) from results").fetchall()
        assert counts == [(summary.total_rows, 60)]
        calls, texts = con.sql("select count(*), sum(num_texts) from encodes").fetchall()[0]
        assert texts == summary.total_rows
        shards = con.sql("select count(*) from shards where committed").fetchall()[0][0]
        assert calls >= shards > 1
    assert read_status(spec.output).committed_rows == summary.total_rows


def test_superbatches_are_as_the_thresholds_say(tmp_path) -> None:
    sizes = [*lognormal(80, seed=3), 300, 5]
    source = write_keyed(tmp_path / "in.parquet", sizes)
    sent: list[int] = []
    spec = embed_spec(tmp_path, source)
    run_job(spec, model=fake_encoder_model(on_execute=lambda texts: sent.append(len(texts))))
    check(spec, source)
    with duckdb.connect(str(Path(spec.output) / "job.duckdb"), read_only=True) as con:
        calls = [n for (n,) in con.sql("select num_texts from encodes").fetchall()]
        oversize = con.sql(
            "select list(num_texts order by started_s) as texts from encodes group by shard"
        ).fetchall()
    assert max(calls) <= 120
    assert sum(n < 40 for n in calls) <= 3  # before a large one, and the last
    assert ([100, 100, 100],) in oversize  # 300 in equal slices


def test_rows_without_a_text_stay(tmp_path) -> None:
    texts = ["a good one", None, "", "   ", "another", "word " * 600]
    source = write_table(
        tmp_path / "in.parquet", id=list("abcdef"), key=["k"] * 6, n=range(6), text=texts
    )
    for on_too_long, last in (("error", ("error", "prompt_too_long")), (None, ("ok", None))):
        spec = embed_spec(
            tmp_path, source, on_too_long=on_too_long, output=str(tmp_path / f"{on_too_long}"),
            max_error_rate=1.0,
        )  # fmt: skip
        run_job(spec, model=fake_encoder_model(max_len=512))
        rows = {row["row_id"]: row for row in read_all(spec)}
        found = {name: (row["status"], row["error_type"]) for name, row in rows.items()}
        assert found == {
            "a": ("ok", None),
            "b": ("skipped", "null_prompt"),
            "c": ("error", "empty_prompt"),
            "d": ("error", "empty_prompt"),
            "e": ("ok", None),
            "f": last,
        }
        assert [name for name, row in rows.items() if row["embedding"] is None] == [
            name for name, (status, _) in found.items() if status != "ok"
        ]
        assert [row["truncated"] for row in rows.values()][-1] == (last[0] == "ok")
    assert rows["f"]["embedding"] == vector_of("word " * 512)


def test_bad_numbers_and_hopeless_texts_are_error_rows(tmp_path) -> None:
    nan, large = WordTokenizer().encode_batch(["poison", "huge"], add_special_tokens=True)
    faults = FakeEncodeFaults(nan_token_ids=frozenset(nan), oom_token_ids=frozenset(large))
    source = write_table(
        tmp_path / "in.parquet", id=list("abcd"), key=list("kkll"), n=range(4),
        text=["fine", "poison", "huge", "fine too"],
    )  # fmt: skip
    spec = embed_spec(tmp_path, source, max_error_rate=1.0)
    run_job(spec, model=fake_encoder_model(faults=faults))
    found = {row["row_id"]: (row["status"], row["error_type"]) for row in read_all(spec)}
    assert found == {
        "a": ("ok", None),
        "b": ("error", "numerical_error"),
        "c": ("error", "out_of_memory"),
        "d": ("ok", None),
    }
    again = spec.model_copy(update={"retry_errors": True})
    assert run_job(again, model=fake_encoder_model()).by_status == {"ok": 4}
    check(spec, source)


ODD_KEYS = [
    "plain", "with/slash", "per%cent", "sp ace", "ümläut", "日本", "", None, "a=b", "007", "7",
    "..", ".", "null", NULL_FOLDER, "tab\tline\n", "*?[x]", "'quote\"", "\U0001f600", "A", "a",
]  # fmt: skip


@pytest.mark.parametrize("grouped", [True, False])
def test_odd_keys_come_back_as_they_were(tmp_path, grouped) -> None:
    keys = [key for key in ODD_KEYS for _ in range(3)]
    if not grouped:
        random.Random(1).shuffle(keys)
    count = len(keys)
    source = write_table(
        tmp_path / "in.parquet",
        id=[f"r{n}" for n in range(count)], key=keys, n=range(count),
        text=[f"text number {n}" for n in range(count)],
    )  # fmt: skip
    spec = embed_spec(tmp_path, source)
    assert run_job(spec, model=fake_encoder_model()).by_status == {"ok": count}
    with duckdb.connect(str(Path(spec.output) / "job.duckdb"), read_only=True) as con:
        found = con.sql("select row_id, key from results").fetchall()
    assert dict(found) == {f"r{n}": key for n, key in enumerate(keys)}
    assert len(found) == count


def test_a_key_that_no_folder_can_hold_is_told_early(tmp_path) -> None:
    source = write_table(
        tmp_path / "in.parquet", id=["a"], key=["k" * 300], n=[0], text=["some text"]
    )

    def never() -> Any:
        raise AssertionError("the model was loaded")

    model = fake_encoder_model()
    object.__setattr__(model, "load_encoder", never)
    with pytest.raises(Exception, match="key") as told:
        run_job(embed_spec(tmp_path, source), model=model)
    assert "k" * 20 in str(told.value)


def test_one_partition_of_all_rows(tmp_path) -> None:
    source = write_keyed(tmp_path / "in.parquet", [700])
    spec = embed_spec(tmp_path, source)
    run_job(spec, model=fake_encoder_model())
    check(spec, source)


def test_without_partitions_shards_are_files(tmp_path) -> None:
    source = write_keyed(tmp_path / "in.parquet", [300])
    spec = embed_spec(tmp_path, source, partition_by=[], shard_tokens=300)
    run_job(spec, model=fake_encoder_model())
    files = sorted(Path(spec.output).glob("results/*.parquet"))
    assert len(files) > 2
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert [row["n"] for row in rows] == list(range(300))
    given = pq.read_table(source)["text"].to_pylist()
    assert [row["embedding"] for row in rows] == [vector_of(text) for text in given]


def test_half_precision_vectors(tmp_path) -> None:
    source = write_keyed(tmp_path / "in.parquet", [5, 5])
    spec = embed_spec(tmp_path, source, encode={"vector_dtype": "float16"})
    run_job(spec, model=fake_encoder_model())
    (file, *_) = Path(spec.output).glob("results/key=*/*.parquet")
    column = pq.read_schema(file).field("embedding").type
    assert (column.list_size, column.value_type) == (FAKE_WIDTH, pa.float16())
    texts = {row["id"]: row["text"] for row in pq.read_table(source).to_pylist()}
    for row in read_all(spec):
        wanted = np.array(vector_of(texts[row["row_id"]]), np.float16)
        assert np.array_equal(np.array(row["embedding"], np.float16), wanted)


OPEN = Journal.open.__func__


def steps_of(spec: JobSpec, monkeypatch) -> list[str]:
    """The steps of all commits of a job."""
    steps: list[str] = []
    crash_at(monkeypatch, None, steps)
    run_job(spec, model=fake_encoder_model())
    return steps


def crash_at(monkeypatch, number: int | None, steps: list[str]) -> None:
    """Break the run at its `number`th step of a commit."""

    def on_step(step: str) -> None:
        steps.append(step)
        if number is not None and len(steps) > number:
            raise Crash(step)

    def open_(cls: Any, *args: Any, **options: Any) -> Journal:
        return OPEN(cls, *args, **{**options, "on_step": on_step})

    monkeypatch.setattr(Journal, "open", classmethod(open_))


def test_a_crash_at_every_kind_of_step_and_every_boundary(tmp_path, monkeypatch) -> None:
    source = write_keyed(tmp_path / "in.parquet", [5, 50, 3, 4, 130, 60, 2])
    first = embed_spec(tmp_path, source, output=str(tmp_path / "whole"))
    steps = steps_of(first, monkeypatch)
    assert len(steps) > 20
    last = {step: number for number, step in enumerate(steps)}
    first_of = {step: steps.index(step) for step in steps}
    markers = [number for number, step in enumerate(steps) if step == "marker_written"]
    for number in sorted({*last.values(), *first_of.values(), *markers}):
        spec = embed_spec(tmp_path, source, output=str(tmp_path / f"out-{number}"))
        reached: list[str] = []
        crash_at(monkeypatch, number, reached)
        with pytest.raises(Crash):
            run_job(spec, model=fake_encoder_model())
        for file in Path(spec.output).glob("results/**/*.parquet"):
            pq.read_table(file, partitioning=None)  # whole, at any time
        seen: list[int] = []
        crash_at(monkeypatch, None, [])
        before = read_status(spec.output)
        run_job(spec, model=fake_encoder_model(on_execute=lambda t, s=seen: s.append(len(t))))
        check(spec, source)
        assert sum(seen) <= 254 - before.committed_rows  # committed rows are not encoded again


def test_a_failure_inside_a_superbatch_loses_no_other(tmp_path) -> None:
    source = write_keyed(tmp_path / "in.parquet", lognormal(60, seed=5))
    spec = embed_spec(tmp_path, source)
    for attempt in range(3):
        faults = FakeEncodeFaults(fail_at_call=2 + attempt)
        with pytest.raises((JobFailed, Exception), match=r"scripted|fail"):
            run_job(spec, model=fake_encoder_model(faults=faults))
    total = prepare(spec).dataset.num_rows
    done = read_status(spec.output).committed_rows
    assert 0 < done < total
    seen: list[int] = []
    run_job(spec, model=fake_encoder_model(on_execute=lambda texts: seen.append(len(texts))))
    assert sum(seen) == total - done
    check(spec, source)


def test_several_workers_share_the_superbatches(tmp_path, monkeypatch) -> None:
    source = write_keyed(tmp_path / "in.parquet", lognormal(150, seed=9))
    spec = embed_spec(tmp_path, source, engine={"workers": 2})
    summary = run_job(spec, find_model=worker_model)
    assert summary.complete
    check(spec, source)


class Residents:
    """Counts the rows in memory: from before they are read to their commit."""

    def __init__(self, monkeypatch) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()
        make, close = TextMaker.__call__, ShardWriter.close
        counted: Counter[int] = Counter()

        def make_counted(maker: TextMaker, part: Assign) -> Texts:
            with self._lock:
                counted[part.shard.index] += part.num_rows
                self._add(part.num_rows)
            return make(maker, part)

        def close_counted(writer: ShardWriter) -> Any:
            time.sleep(0.002)  # writing is the bottleneck: all queues are full
            summary = close(writer)
            with self._lock:
                self._add(-counted.pop(writer.shard.index))
            return summary

        monkeypatch.setattr(TextMaker, "__call__", make_counted)
        monkeypatch.setattr(ShardWriter, "close", close_counted)

    def _add(self, num_rows: int) -> None:
        self.now += num_rows
        self.most = max(self.most, self.now)


@pytest.mark.parametrize("seed", range(6))
def test_texts_in_memory_stay_within_the_bound(tmp_path, monkeypatch, seed) -> None:
    rng = random.Random(seed)
    sizes = [1 + int(rng.lognormvariate(rng.choice([0, 1, 2]), 1.0)) for _ in range(150)]
    min_texts = rng.randint(5, 60)
    max_texts = max(sizes) + min_texts + rng.randint(0, 40)  # nothing is sliced
    source = write_keyed(tmp_path / "in.parquet", sizes)
    spec = embed_spec(tmp_path, source, encode={"min_texts": min_texts, "max_texts": max_texts})
    residents = Residents(monkeypatch)
    run_job(spec, model=fake_encoder_model())
    assert residents.now == 0
    bound = resident_bound(Thresholds(min_texts, max_texts), max(sizes), QUEUE_DEPTH)
    assert residents.most <= bound
    assert residents.most > bound / 8  # it is no empty promise


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_many_partitions_of_one_row(tmp_path, count) -> None:
    keys = [f"{n:06d}" for n in range(count)]
    source = write_table(
        tmp_path / "in.parquet", id=keys, key=keys, n=range(count), text=["a word"] * count
    )
    spec = embed_spec(tmp_path, source, encode={})
    summary = run_job(spec, model=fake_encoder_model())
    assert summary.by_status == {"ok": count}
    folders = {path.parent.name for path in Path(spec.output).glob("results/key=*/*.parquet")}
    assert folders == {f"key={key}" for key in keys}
