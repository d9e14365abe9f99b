"""Embedding jobs that are killed, at any moment, again and again, end as one that was left alone.

The bound on texts: one pass, plus per kill and worker what can be encoded and not yet committed:
the call under way, and three whose block waits for the coordinator, waits for the collector or is
being written (`flows.superbatches.QUEUE_DEPTH`, less the call that is only tokenised).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from flows.fleet import health
from flows.runner import run_job
from flows.spec import JobSpec
from flows.superbatches import QUEUE_DEPTH
from schedulers.superbatch import Thresholds, call_bound
from storage.status import read_status
from tests.e2e.cases import write_table
from tests.e2e.jobs import Behaviour, TokenLog, worker_model
from tests.e2e.test_embed import check, embed_spec, lognormal, read_all, vector_of, write_keyed
from tests.e2e.test_kill import Reader
from tests.e2e.test_workers import processes_of, query

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
LEAST, MOST = 40, 120


class PartitionReader(Reader):
    """Reads an output's files, in their folders, over and over."""

    def read_once(self) -> None:
        for file in self.output.glob("results/*/*"):
            self._try(file, lambda path: pq.ParquetFile(path).read())
        self._try(self.output / "job.json", lambda path: json.loads(path.read_bytes()))
        self.num_reads += 1


class Runs:
    """Runs of one job, each in a process and session of its own; their texts are counted."""

    def __init__(self, folder: Path, spec: JobSpec, **behaviour: Any) -> None:
        self.spec = spec
        self.log = TokenLog(folder / "texts.log")
        self._said = folder / "said.txt"
        self._file = folder / "job.json"
        self._file.write_text(json.dumps(spec.model_dump(mode="json")))
        self._behaviour = Behaviour(log=str(self.log.path), **behaviour)

    def start(self) -> subprocess.Popen[bytes]:
        delay = ["--log", str(self.log.path), "--delay-s", str(self._behaviour.delay_s)]
        with self._said.open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.jobs", str(self._file), *delay],
                cwd=ROOT,
                env={**os.environ, **self._behaviour.environ()},
                stderr=said,
                start_new_session=True,
            )

    def said(self) -> str:
        """By all runs together."""
        return self._said.read_text()

    def wait_for_texts(self, job: subprocess.Popen[bytes], more_than: int) -> bool:
        """Whether the runs together have come so far while this one goes on."""
        while self.log.total() <= more_than and job.poll() is None:
            time.sleep(0.01)
        return job.poll() is None

    def finish(self) -> None:
        with self.start() as job:
            assert job.wait(90) == 0


def in_flight(sizes: list[int]) -> int:
    """Texts that a worker may have encoded and lose."""
    return QUEUE_DEPTH * call_bound(Thresholds(LEAST, MOST), max(sizes))


def check_bound(runs: Runs, sizes: list[int], deaths: int) -> None:
    """Args: deaths: of workers."""
    spent, total, lost = runs.log.total(), sum(sizes), in_flight(sizes)
    print(f"{total} texts, encoded {spent} over {deaths} deaths; at most {lost} for each")
    assert total <= spent <= total + deaths * lost


def test_a_process_that_is_killed_again_and_again(tmp_path: Path) -> None:
    sizes = [*lognormal(300, seed=2), 260, *lognormal(60, seed=4)]
    source = write_keyed(tmp_path / "in.parquet", sizes)
    spec = embed_spec(tmp_path, source, checkpoint_s=0.2)
    runs, rng, kills = Runs(tmp_path, spec, delay_s=0.08), random.Random(6), 0
    with PartitionReader(Path(spec.output)).reading():
        for _ in range(5):
            before = runs.log.total()
            with runs.start() as job:
                runs.wait_for_texts(job, before)
                time.sleep(rng.uniform(0.0, 0.5))
                kills += job.poll() is None
                job.kill()
        assert not read_status(spec.output).complete
        runs.finish()
    assert kills == 5
    check(spec, source)
    check_bound(runs, sizes, kills)
    counts = query(spec, "select count(*), count(distinct row_id) from results")
    assert counts == [(sum(sizes), sum(sizes))]


def workers_of(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        children = psutil.Process(job.pid).children(recursive=True)
        return [child for child in children if "flows.fleet.process" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []


def test_workers_and_their_coordinator_are_killed_until_it_is_done(tmp_path: Path) -> None:
    sizes = [*lognormal(400, seed=7), 260, *lognormal(60, seed=8)]
    source = write_keyed(tmp_path / "in.parquet", sizes)
    spec = embed_spec(tmp_path, source, checkpoint_s=0.2, engine={"workers": 2})
    runs, rng, deaths = Runs(tmp_path, spec, delay_s=0.12), random.Random(1), 0
    with PartitionReader(Path(spec.output)).reading():
        for target in ("worker", "coordinator", "worker"):  # and then the coordinator, each time
            before = runs.log.total()
            with runs.start() as job:
                alive = runs.wait_for_texts(job, before)
                time.sleep(rng.uniform(0.0, 0.4))
                if target == "worker" and alive:
                    workers_of(job)[rng.randrange(2)].kill()
                    deaths += 1
                    alive = runs.wait_for_texts(job, runs.log.total() + 100)
                assert alive
                deaths += 2
                job.kill()
            deadline = time.monotonic() + 10
            while processes_of(job.pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert processes_of(job.pid) == []
        assert not read_status(spec.output).complete
        runs.finish()
    check(spec, source)
    check_bound(runs, sizes, deaths)
    assert runs.said().count("died: killed by SIGKILL") == 2


@pytest.mark.parametrize("partitioned", [True, False])
def test_a_row_that_kills_its_worker_is_an_error_row_and_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitioned: bool
) -> None:
    monkeypatch.setattr(health, "FIRST_DELAY_S", 0.05)
    for name, value in Behaviour(killers=("deadly",), delay_s=0.02).environ().items():
        monkeypatch.setenv(name, value)
    keys = [f"k{n // 7:02d}" for n in range(200)]
    texts = [f"text {n} of many" for n in range(200)]
    texts[101] = "a deadly text"
    source = write_table(
        tmp_path / "in.parquet",
        id=[f"r{n}" for n in range(200)],
        key=keys,
        n=range(200),
        text=texts,
    )
    fields: dict[str, Any] = {} if partitioned else {"partition_by": [], "shard_tokens": 250}
    spec = embed_spec(
        tmp_path, source, engine={"workers": 2}, max_error_rate=0.1,
        encode={"min_texts": 25, "max_texts": 50}, **fields,
    )  # fmt: skip
    summary = run_job(spec, find_model=worker_model)
    assert summary.by_status == {"ok": 199, "error": 1}
    if partitioned:
        rows = read_all(spec)
        (own,) = Path(spec.output).glob("results/key=k14/*.parquet")
        held = pq.read_table(own, partitioning=None).to_pylist()
        assert [row["n"] for row in held] == list(range(98, 105))
    else:
        files = Path(spec.output).glob("results/*.parquet")
        held = rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    (bad,) = [row for row in held if row["status"] == "error"]
    assert Counter(row["row_id"] for row in rows) == {f"r{n}": 1 for n in range(200)}
    assert (bad["row_id"], bad["n"], bad["error_type"]) == ("r101", 101, "worker_died")
    assert bad["embedding"] is None
    assert "killed by SIGKILL" in bad["error_message"]
    for row in rows:
        if row["row_id"] != "r101":
            assert row["embedding"] == vector_of(texts[row["n"]])
    if partitioned:
        assert {row["n"]: row["key"] for row in rows} == dict(enumerate(keys))


def test_a_process_that_is_killed_while_it_sorts_and_after(tmp_path: Path) -> None:
    """The input is not grouped: its sorted form is made first, and is whole or not there."""
    sizes = lognormal(1500, seed=3)
    source = write_keyed(tmp_path / "in.parquet", sizes, grouped=False)
    fields = {"encode": {"min_texts": 1500, "max_texts": 6000}}
    spec = embed_spec(tmp_path, source, **fields)
    output, runs, kills = Path(spec.output), Runs(tmp_path, spec, delay_s=0.05), 0
    signs = ("_input", "job.json", "results")  # of sorting, of the plan, of a first commit
    with PartitionReader(output).reading():
        for sign in signs:
            with runs.start() as job:
                while not any(output.glob(f"{sign}*")) and job.poll() is None:
                    time.sleep(0.002)
                kills += job.poll() is None
                job.kill()
        runs.finish()
    assert kills == len(signs)
    check(spec, source)
    assert runs.log.total() <= sum(sizes) + kills * QUEUE_DEPTH * (1500 + max(sizes))


def test_several_rows_that_kill_are_each_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in one superbatch, one of them in an oversize partition's slice beside another."""
    monkeypatch.setattr(health, "FIRST_DELAY_S", 0.02)
    for name, value in Behaviour(killers=("deadly",), delay_s=0.01).environ().items():
        monkeypatch.setenv(name, value)
    keys = [f"k{min(n // 5, 20):02d}" for n in range(160)]  # the last has 60 rows
    deadly = {12, 13, 110, 150}
    texts = ["a deadly text" if n in deadly else f"text {n} of many" for n in range(160)]
    ids = [f"r{n}" for n in range(160)]
    source = write_table(tmp_path / "in.parquet", id=ids, key=keys, n=range(160), text=texts)
    spec = embed_spec(
        tmp_path, source, engine={"workers": 2}, max_error_rate=0.1,
        encode={"min_texts": 20, "max_texts": 40},
    )  # fmt: skip
    summary = run_job(spec, find_model=worker_model)
    assert summary.by_status == {"ok": 156, "error": 4}
    rows = read_all(spec)
    assert Counter(row["n"] for row in rows) == dict.fromkeys(range(160), 1)
    assert {row["n"] for row in rows if row["error_type"] == "worker_died"} == deadly
    for row in rows:
        assert row["key"] == keys[row["n"]]
        wanted = None if row["n"] in deadly else vector_of(texts[row["n"]])
        assert row["embedding"] == wanted
