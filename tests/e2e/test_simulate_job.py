"""A real job on a real clock, and its replay: the simulated time is the measured one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flows.runner import run_job
from flows.simulate import Simulation, run_simulation
from flows.simulate_options import SimulateOptions
from flows.spec import JobSpec
from schedulers.policies import POLICIES
from tests.e2e.jobs import fake_model, write_dataset
from workers.backends.base import Batch

pytestmark = pytest.mark.e2e

STEP_S, TOKEN_S = 2e-3, 20e-6
NUM_ROWS = 150
TOLERANCE, BUSY_TOLERANCE = 0.10, 0.35
TRIES = 2
"""The machine may be busy with something else for a while. Then a hybrid sees other costs than a
replay, and decides otherwise."""
QUIET = 0.05
"""Share by which the steps of a recording may be slower than their fit, to tell of other jobs."""


def take_time(batch: Batch) -> None:
    time.sleep(STEP_S + TOKEN_S * batch.num_tokens)


def record(folder: Path, policy: str) -> str:
    """Run a job of known step costs."""
    folder.mkdir()
    spec = JobSpec.model_validate(
        {
            "input": str(write_dataset(folder / "in.parquet", NUM_ROWS)),
            "output": str(folder / "out"),
            "prompt": {"column": "text"},
            "id_column": "id",
            "sampling": {"max_tokens": 90},
            "engine": {"policy": policy, "max_seqs": 24, "max_batch_tokens": 128},
        }
    )
    model = fake_model(on_execute=take_time, mean_output_tokens=30, check_slots=False)
    assert run_job(spec, model=model).complete
    return str(folder / "out")


def is_quiet(done: Simulation) -> bool:
    return abs(done.setup.costs.scale - 1) <= QUIET


def replayed(folder: Path, policy: str) -> Simulation:
    """A recording's replay; of a second recording if the first was disturbed."""
    for attempt in range(TRIES):
        output = record(folder / f"{policy}-{attempt}", policy)
        done = run_simulation(SimulateOptions(output=output, policy="all"))
        if is_quiet(done) and done.ratio == pytest.approx(1.0, abs=TOLERANCE):
            break
    return done


def test_a_replay_takes_the_time_of_the_job(tmp_path) -> None:
    found = {policy: replayed(tmp_path, policy) for policy in POLICIES}
    for policy, done in found.items():
        tolerance = TOLERANCE if is_quiet(done) else BUSY_TOLERANCE
        assert done.ratio == pytest.approx(1.0, abs=tolerance), policy
        assert done.recorded_run is not None
        assert done.recorded_run.result.num_requests == NUM_ROWS
        assert done.recording is not None
        num_steps = done.recorded_run.result.num_steps
        assert num_steps == pytest.approx(len(done.recording.steps), rel=tolerance), policy
    quiet = {policy: done for policy, done in found.items() if is_quiet(done)}
    for policy, done in quiet.items():
        for run in done.runs:
            if run.policy in quiet:
                measured_s = quiet[run.policy].measured_s
                told = f"{run.policy} predicted from {policy}"
                assert run.result.job_s == pytest.approx(measured_s, rel=2 * TOLERANCE), told
