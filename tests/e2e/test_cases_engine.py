"""Memory, hangs and the tail: the cases of section C, on whole jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.progress import Progress
from flows.runner import JobRunner, run_job
from storage.status import read_status
from tests.bench.memory import run_job_apart, write_rows
from tests.e2e.cases import Witness, make_spec, results, within
from tests.e2e.jobs import WordTokenizer, comparable, fake_model, write_dataset
from workers.backends.fake import FakeBackend
from workers.errors import BackendError

pytestmark = pytest.mark.e2e


def steps_of(output: Path) -> list[dict[str, Any]]:
    files = sorted((output / "telemetry" / "steps").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


@pytest.mark.slow
def test_c27_memory_is_flat_in_the_number_of_rows(tmp_path: Path) -> None:
    """Peak of the whole process, 10 k and 60 k rows, within 10 %."""
    peaks = {}
    for num_rows in (10_000, 60_000):
        source = tmp_path / f"{num_rows}.parquet"
        write_rows(source, num_rows)
        peaks[num_rows] = run_job_apart(source, tmp_path / f"out-{num_rows}", num_rows).peak_bytes
    print({size: f"{peak / 2**20:.0f} MiB" for size, peak in peaks.items()})
    assert peaks[60_000] <= 1.1 * peaks[10_000]


class CountingTokenizer(WordTokenizer):
    """Counts the prompts it has encoded, without those of the estimate before the start."""

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        self.num_encoded += len(texts)
        return super().encode_batch(texts, add_special_tokens=add_special_tokens)


def run_counted(spec: Any) -> tuple[int, int]:
    """Prompts tokenised when the first step is taken, and the most that were without a result."""
    tokenizer, progress = CountingTokenizer(), Progress()
    ahead: list[int] = []

    def on_execute(batch: object) -> None:
        ahead.append(tokenizer.num_encoded - progress.snapshot().done_rows)

    model = fake_model(on_execute=on_execute, check_slots=False)
    run_job(spec, model=replace(model, load_tokenizer=lambda: tokenizer), progress=progress)
    return ahead[0], max(ahead)


def test_c28_c29_rows_in_flight_and_the_start_do_not_grow_with_the_rows(tmp_path: Path) -> None:
    """What is tokenised and has no result yet: the ready queue, the engine's window (4 x max_seqs),
    a batch of the feeder and what waits for the collector; not the rows of the input.
    """
    found = {}
    for num_rows in (4000, 20_000):
        spec = make_spec(
            tmp_path, num_rows, output=str(tmp_path / f"out-{num_rows}"),
            sampling={"max_tokens": 2}, engine={"max_seqs": 64},
        )  # fmt: skip
        found[num_rows] = run_counted(spec)
    print(found)
    first, most = found[20_000]
    assert first <= 2000
    assert most <= 4000


def test_c29_time_to_the_first_step_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    waits_s = {}
    for num_rows in (500, 500, 40_000):
        witness = Witness(break_at_token=100)
        spec = make_spec(tmp_path, num_rows, output=str(tmp_path / f"out-{num_rows}"))
        started_s = time.monotonic()
        with JobRunner(spec, model=fake_model(on_execute=witness, check_slots=False)) as runner:
            runner.submit(runner.pending[0])
            while witness.first_step_s is None:
                time.sleep(0.001)
            runner.stop("seen enough")
        waits_s[num_rows] = witness.first_step_s - started_s
    print(waits_s)
    assert waits_s[40_000] < 2 * waits_s[500] + 0.5


def test_c30_many_small_shards_keep_the_engine_as_full_as_one(tmp_path: Path) -> None:
    """400 rows in some 100 shards of 4: the same steps, and full until the last rows."""
    occupancy = {}
    for name, shard_tokens in (("one", 1_000_000), ("many", 100)):
        spec = make_spec(
            tmp_path, 400, output=str(tmp_path / name), shard_tokens=shard_tokens,
            engine={"max_seqs": 32, "policy": "mixed"},
        )  # fmt: skip
        run_job(spec, model=fake_model(on_execute=Witness(delay_s=0.01)))
        steps = steps_of(tmp_path / name)
        busy = [step for step in steps if step["num_waiting"] + step["num_running"] >= 32]
        mean = sum(step["num_seqs"] for step in busy) / len(busy)
        occupancy[name] = (len(steps), mean)
    assert read_status(str(tmp_path / "many")).total_shards > 80
    (steps_one, mean_one), (steps_many, mean_many) = occupancy["one"], occupancy["many"]
    print(occupancy)
    assert steps_many <= 1.15 * steps_one
    assert mean_many >= 0.9 * mean_one
    assert mean_many >= 0.8 * 32


def endless(request_ids: frozenset[str]) -> Any:
    """A model in which these rows never end, and 2 ms pass in each step."""

    def script(request_id: str, sample_index: int, position: int) -> int:
        return 7 if request_id in request_ids or position < 3 else 0

    return replace(
        fake_model(),
        load_backend=lambda: FakeBackend(script=script, on_execute=lambda _: time.sleep(0.002)),
    )


def test_c34_row_that_never_ends_is_given_up_and_the_run_ends(tmp_path: Path) -> None:
    spec = make_spec(
        tmp_path, 60, sampling={"max_tokens": 4000}, row_timeout_s=0.6, engine={"max_seqs": 16}
    )
    with within(30):
        summary = run_job(spec, model=endless(frozenset({"in-60.parquet:30"})))
    assert summary.by_status == {"ok": 59, "error": 1}
    row = results(spec)[30]
    assert (row["status"], row["error_type"]) == ("error", "timeout")


class Hanging:
    """A backend whose `execute` does not come back after some steps, until it is let go."""

    def __init__(self, after_steps: int) -> None:
        self.hangs = threading.Event()
        self.let_go = threading.Event()
        self._left = after_steps

    def __call__(self, batch: object) -> None:
        self._left -= 1
        if self._left < 0:
            self.hangs.set()
            self.let_go.wait(60)


def test_c34_device_that_hangs_ends_the_run_and_keeps_the_finished_rows(tmp_path: Path) -> None:
    hanging = Hanging(after_steps=30)
    spec = make_spec(tmp_path, 200, checkpoint_s=60.0, engine={"max_seqs": 16})
    model = fake_model(on_execute=hanging)
    told = r"not come back from a step for .* s \(\d+ tokens of \d+ sequences; \d+ rows in flight"
    with within(20), pytest.raises(BackendError, match=told):  # noqa: SIM117
        with JobRunner(spec, model=model, step_timeout_s=0.5) as runner:
            runner.submit(runner.pending[0]).result()
    kept = read_status(spec.output).done_rows
    assert 0 < kept < 200
    assert read_status(spec.output).lease is None
    hanging.let_go.set()

    rest = Witness()
    assert run_job(spec, model=fake_model(on_execute=rest)).by_status == {"ok": 200}
    assert len(rest.prompts) == 200 - kept


def test_c34_stop_does_not_wait_for_a_device_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.fleet.life.STOP_GRACE_S", 0.5)
    hanging = Hanging(after_steps=30)
    spec = make_spec(tmp_path, 200, engine={"max_seqs": 16})
    with within(20), JobRunner(spec, model=fake_model(on_execute=hanging)) as runner:
        runner.submit(runner.pending[0])
        assert hanging.hangs.wait(10)
        runner.stop("SIGTERM")
        summary = runner.finish()
    hanging.let_go.set()
    assert (summary.stopped, summary.complete) == ("SIGTERM", False)
    assert 0 < summary.by_status["ok"] < 200


def test_c35_fifty_shards_on_one_engine(tmp_path: Path) -> None:
    loaded: list[FakeBackend] = []

    def load_backend() -> FakeBackend:
        loaded.append(FakeBackend())
        return loaded[-1]

    spec = make_spec(tmp_path, 1000, shard_tokens=480)
    summary = run_job(spec, model=replace(fake_model(), load_backend=load_backend))
    assert read_status(spec.output).total_shards >= 50
    assert summary.by_status == {"ok": 1000}
    assert len(loaded) == 1
    assert loaded[0].closed


def test_c52_other_shards_and_batches_give_the_same_rows(tmp_path: Path) -> None:
    write_dataset(tmp_path / "in-300.parquet", 300)
    found = []
    for name, fields in {
        "one": {"engine": {"max_seqs": 64}},
        "two": {"engine": {"max_seqs": 3, "policy": "mixed"}, "shard_tokens": 300},
        "three": {"engine": {"max_seqs": 16, "max_batch_tokens": 40}, "shard_tokens": 2000},
    }.items():
        spec = make_spec(tmp_path, 300, output=str(tmp_path / name), **fields)
        run_job(spec, model=fake_model())
        found.append(comparable(results(spec)))
    assert found[0] == found[1] == found[2]
