"""A runner's process, started, asked, stopped, woken and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.common import ROOT
from tests.bench.peers.process import RunnerError, RunnerProcess
from tests.bench.peers.protocol import (
    Item,
    Settings,
    family,
    forget_peaks,
    peak_bytes,
    read_items,
    write_items,
)

ITEMS = (Item((5, 6, 7), 3), Item((8,), 1, 2, 1))


def start(folder: Path, **options: str) -> RunnerProcess:
    settings = Settings(model="none", dtype="none", threads=1, kv_bytes=0, options=options)
    command = [sys.executable, "-m", "tests.unit.bench.fake_runner", settings.as_argument()]
    return RunnerProcess("fake", command, log=folder / "fake.log", cwd=ROOT)


def state_of(pid: int) -> str:
    """R, S, T (stopped) or Z."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_state(pid: int, wanted: str) -> None:
    for _ in range(200):
        if state_of(pid) == wanted:
            return
        time.sleep(0.005)
    raise AssertionError(f"{pid} is in state {state_of(pid)}, not {wanted}")


def children() -> set[int]:
    return set(family(os.getpid())) - {os.getpid()}


def test_items_come_back_as_they_were_written(tmp_path: Path) -> None:
    write_items(tmp_path / "items", ITEMS)
    assert tuple(read_items(tmp_path / "items")) == ITEMS


def test_one_process_serves_many_workloads(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        ready_s = process.wait_until_ready()
        first = process.run(ITEMS, tmp_path / "workload")
        second = process.run(ITEMS[:1], tmp_path / "workload")
    assert first.token_ids == [[1, 1, 2], [1]]
    assert second.token_ids == [[2, 1, 2]]
    assert 0 < ready_s <= first.ended_at - process.started_at <= second.ended_at
    assert first.elapsed_s >= 0 and first.peak_bytes > 1 << 20


def test_it_is_stopped_whenever_it_has_no_turn(tmp_path: Path) -> None:
    before = children()
    with start(tmp_path) as process:
        process.wait_until_ready()
        (pid,) = children() - before
        wait_for_state(pid, "T")
        process.run(ITEMS, tmp_path / "workload")
        wait_for_state(pid, "T")
    assert children() == before


BENCH = """
import sys
from pathlib import Path
from tests.unit.bench.test_protocol import start

process = start(Path(sys.argv[1]))
process.wait_until_ready()
print(process._process.pid, flush=True)
sys.stdin.read()
"""


def test_stopped_processes_end_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCH, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as bench:
        assert bench.stdout is not None
        pid = int(bench.stdout.readline())
        wait_for_state(pid, "T")
        bench.kill()
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists() or state_of(pid) == "Z":
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the runner outlived its benchmark")


def test_what_libraries_print_goes_to_the_log(tmp_path: Path) -> None:
    with start(tmp_path, talk="yes") as process:
        process.wait_until_ready()
        assert process.run(ITEMS, tmp_path / "workload").token_ids[1] == [1]
    assert "chatter" in (tmp_path / "fake.log").read_text()


def test_a_runner_that_ends_says_why(tmp_path: Path) -> None:
    with start(tmp_path, crash="yes") as process:
        process.wait_until_ready()
        with pytest.raises(RunnerError, match="the engine burst"):
            process.run(ITEMS, tmp_path / "workload")


def test_answers_of_another_length_are_no_answers(tmp_path: Path) -> None:
    with start(tmp_path, shorter="yes") as process:
        process.wait_until_ready()
        with pytest.raises(RunnerError, match="1 of 2 answers have another length"):
            process.run(ITEMS, tmp_path / "workload")


def test_peaks_are_of_the_time_since_they_were_forgotten() -> None:
    block = bytearray(b"x") * (64 << 20)
    high = peak_bytes()
    del block
    forget_peaks()
    assert peak_bytes() < high - (32 << 20)
