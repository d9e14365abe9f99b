"""Runs that are empty, broken or cut short at odd places end, with the right error and no hang."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flows.runner import JobRunner, run_job
from storage.errors import OutputError
from storage.objects import ObjectStore
from storage.parts import Parts
from storage.status import read_status
from tests.e2e.cases import Crash, Witness, make_spec, results, run_threads, within, write_table
from tests.e2e.jobs import WordTokenizer, comparable, fake_model
from workers.backends.fake import FakeFaults
from workers.errors import BackendError

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def ends_and_leaves_no_thread(tmp_path: Path):
    """Each test ends in 30 s, its threads are gone and its output was given back."""
    with within(30):
        yield
    deadline_s = time.monotonic() + 5
    while run_threads() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert run_threads() == []
    assert not (tmp_path / "out" / "_lease.json").exists()


def test_no_rows_at_all(tmp_path: Path) -> None:
    source = write_table(tmp_path / "in.parquet", text=pa.array([], pa.string()))
    spec = make_spec(tmp_path, input=source)
    for _ in range(2):
        summary = run_job(spec, model=fake_model())
        assert (summary.complete, summary.by_status, summary.total_rows) == (True, {}, 0)
        assert summary.exit_code(0.0) == 0
    assert results(spec) == []


def test_limit_above_the_rows_there_are(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 30, limit=1000)
    summary = run_job(spec, model=fake_model())
    assert (summary.by_status, summary.total_rows, summary.complete) == ({"ok": 30}, 30, True)


def test_limit_cuts_a_row_group(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 600, limit=501)
    assert run_job(spec, model=fake_model()).by_status == {"ok": 501}
    assert [row["row_id"] for row in results(spec)][-1] == "in-600.parquet:500"


def test_all_rows_skipped(tmp_path: Path) -> None:
    source = write_table(tmp_path / "in.parquet", text=pa.nulls(50, pa.string()))
    witness = Witness()
    spec = make_spec(tmp_path, input=source, shard_tokens=100)
    summary = run_job(spec, model=fake_model(on_execute=witness))
    assert (summary.by_status, summary.complete) == ({"skipped": 50}, True)
    assert (summary.exit_code(0.0), witness.num_steps) == (0, 0)


class FullDisk:
    """Lets so many parts, results and markers through, then there is no space left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
        self.allowed = allowed
        real = ObjectStore._local_writer

        def writer(store: ObjectStore, name: str, on_written: Any) -> Any:
            if name.startswith(("_checkpoints", "results", "_markers", "telemetry")):
                self.allowed -= 1
                if self.allowed < 0:
                    raise OSError(28, "No space left on device", name)
            return real(store, name, on_written)

        monkeypatch.setattr(ObjectStore, "_local_writer", writer)


@pytest.mark.parametrize("allowed", [0, 1, 4])
def test_full_disk_fails_the_run_with_that_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """9,000 rows: the feeder, the engine and its outbox are all full when the collector dies."""
    spec = make_spec(
        tmp_path, 9000, shard_tokens=6000, checkpoint_s=0.1, sampling={"max_tokens": 2}
    )
    with monkeypatch.context() as patch:
        FullDisk(patch, allowed)
        with pytest.raises(OutputError, match="No space left"):
            run_job(spec, model=fake_model(check_slots=False))
    assert not (tmp_path / "out" / "_lease.json").exists()
    summary = run_job(spec, model=fake_model(check_slots=False))
    assert (summary.by_status, summary.complete) == ({"ok": 9000}, True)


class BrokenTokenizer(WordTokenizer):
    """Fails after some batches."""

    def __init__(self, after: int) -> None:
        self._left = after

    def encode_batch(self, texts: Any, *, add_special_tokens: bool) -> list[list[int]]:
        self._left -= len(texts)
        if self._left < 0:
            raise Crash("the tokenizer broke")
        return super().encode_batch(texts, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("after", [256, 900])
def test_feeder_that_breaks_fails_the_run_with_its_error(tmp_path: Path, after: int) -> None:
    """Of the rows before, those in the estimate's sample included, what is finished stays."""
    spec = make_spec(tmp_path, 3000, checkpoint_s=0.1)
    broken = BrokenTokenizer(after)
    with pytest.raises(Crash, match="the tokenizer broke"):
        run_job(spec, model=replace(fake_model(), load_tokenizer=lambda: broken))
    assert run_job(spec, model=fake_model()).by_status == {"ok": 3000}


def test_engine_that_breaks_keeps_what_was_finished(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 300, checkpoint_s=3600, engine={"max_seqs": 8})
    with pytest.raises(BackendError, match="lost at step 200"):
        run_job(spec, model=fake_model(faults=FakeFaults(fail_at_step=200)))
    kept = read_status(spec.output).done_rows
    assert 0 < kept < 300
    rest = Witness()
    assert run_job(spec, model=fake_model(on_execute=rest)).complete
    assert len(rest.prompts) == 300 - kept


def test_interrupt_while_the_model_loads(tmp_path: Path) -> None:
    def load_backend() -> Any:
        raise KeyboardInterrupt

    spec = make_spec(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_job(spec, model=replace(fake_model(), load_backend=load_backend))
    assert not (tmp_path / "out" / "_lease.json").exists()
    assert run_job(spec, model=fake_model()).complete


def test_interrupt_in_the_callers_thread_ends_the_run(tmp_path: Path) -> None:
    def on_start(runner: JobRunner) -> None:
        raise KeyboardInterrupt

    spec = make_spec(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_job(spec, model=fake_model(), on_start=on_start)
    assert run_job(spec, model=fake_model()).complete


def test_stop_before_the_start_loads_nothing(tmp_path: Path) -> None:
    def load_backend() -> Any:
        raise AssertionError("the model was loaded")

    spec = make_spec(tmp_path)
    runner = JobRunner(spec, model=replace(fake_model(), load_backend=load_backend))
    runner.stop("too early")
    with runner:
        futures = [runner.submit(shard) for shard in runner.pending]
        summary = runner.finish()
    assert all(future.done() for future in futures)
    assert (summary.stopped, summary.complete, summary.by_status) == ("too early", False, {})
    assert summary.exit_code(1.0) == 1


def test_stop_while_the_model_loads(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    runner: list[JobRunner] = []
    model = fake_model()

    def load_backend() -> Any:
        runner[0].stop("changed my mind")
        return model.load_backend()

    runner.append(JobRunner(spec, model=replace(model, load_backend=load_backend)))
    with runner[0] as entered:
        future = entered.submit(entered.pending[0])
        summary = entered.finish()
    assert future.done()
    assert (summary.stopped, summary.complete) == ("changed my mind", False)


def test_stop_at_once_after_the_start(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 3000, shard_tokens=3000)
    stop = lambda runner: runner.stop("at once")  # noqa: E731
    summary = run_job(spec, model=fake_model(), on_start=stop)
    assert (summary.stopped, summary.complete) == ("at once", False)
    assert run_job(spec, model=fake_model()).by_status == {"ok": 3000}


def test_stop_in_the_middle_keeps_the_finished_rows_and_counts_them(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 500, shard_tokens=4000, checkpoint_s=3600, engine={"max_seqs": 8})
    runner: list[JobRunner] = []
    witness = Witness()

    def on_execute(batch: Any) -> None:
        witness(batch)
        if runner and witness.num_tokens > 4000:
            runner[0].stop("seen enough")

    summary = run_job(spec, model=fake_model(on_execute=on_execute), on_start=runner.append)
    status = read_status(spec.output)
    assert (summary.stopped, summary.complete) == ("seen enough", False)
    assert 0 < status.done_rows < 500
    assert summary.by_status == {"ok": status.done_rows}
    assert summary.by_finish_reason == status.by_finish_reason
    assert summary.completion_tokens == status.completion_tokens
    rest = Witness()
    assert run_job(spec, model=fake_model(on_execute=rest)).complete
    assert len(rest.prompts) == 500 - status.done_rows


@pytest.mark.parametrize("retry", [False, True])
def test_shards_that_are_checkpointed_and_not_committed_are_only_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry: bool
) -> None:
    """Died between the last part and the result file: nothing is computed, but error rows that are
    to be retried.
    """
    bad = frozenset(f"in-200.parquet:{index}" for index in range(0, 200, 9))
    fields = {"shard_tokens": 1000, "keep_columns": ["n"]}
    whole = make_spec(tmp_path, output=str(tmp_path / "whole"), **fields)
    run_job(whole, model=fake_model(faults=FakeFaults(nan_request_ids=bad)))

    spec = make_spec(tmp_path, retry_errors=False, **fields)
    with monkeypatch.context() as patch:
        patch.setattr(Parts, "delete", lambda _: None)
        run_job(spec, model=fake_model(faults=FakeFaults(nan_request_ids=bad)))
    shutil.rmtree(tmp_path / "out" / "_markers")
    shutil.rmtree(tmp_path / "out" / "results")
    assert read_status(spec.output).checkpointed_rows == 200

    witness = Witness()
    again = make_spec(tmp_path, retry_errors=retry, **fields)
    assert run_job(again, model=fake_model(on_execute=witness)).complete
    if retry:
        assert witness.prompts.keys() == bad
        assert run_job(again, model=fake_model()).by_status == {"ok": 200}
    else:
        assert witness.num_steps == 0
        assert comparable(results(spec)) == comparable(results(whole))


def test_first_error_is_the_one_that_is_raised(tmp_path: Path, monkeypatch: Any) -> None:
    """The device is lost, and then the disk is full too."""
    spec = make_spec(tmp_path, 300, checkpoint_s=3600, engine={"max_seqs": 8})
    FullDisk(monkeypatch, 0)
    with pytest.raises(BackendError, match="lost at step 50"):
        run_job(spec, model=fake_model(faults=FakeFaults(fail_at_step=50)))
    monkeypatch.undo()
    assert threading.active_count() < 10
