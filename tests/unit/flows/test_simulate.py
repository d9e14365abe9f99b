"""`flows simulate`: the figures are the simulator's; a recording gives lengths, sizes and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from flows.calibration import hardware_of, store_calibration
from flows.cli import main
from flows.errors import SpecError
from flows.recording import Pool, Sample, read_recording, samples_of
from flows.simulate import Simulation, recorded_sizes, run_simulation
from flows.simulate_options import SimulateOptions
from flows.simulate_tables import recording_lines, run_cells
from schedulers.calibration import calibrated
from schedulers.cost import StepCost, StepSample
from schedulers.estimate import Estimator
from schedulers.policies import POLICIES, make_policy
from schedulers.sim.arrivals import AllAtOnce, ClosedLoop, SimRequest, Stage, geometric_requests
from schedulers.sim.hardware import HARDWARE
from schedulers.sim.simulator import ScheduleCost, SimConfig, SimResult, SimStep, Simulator
from schedulers.view import Budget
from storage.errors import InputError
from storage.ledger import Ledger
from storage.record import JobRecord
from storage.results import ResultColumns, ResultRow
from storage.shards import TokenCost, cut_shards
from storage.source import open_dataset
from tests.report_jobs import sizing, write_record, write_results, write_table
from workers.models.device import pick_device, pick_dtype

COST = StepCost(
    alpha_p=0.01, beta_p=1e-4, alpha_d=0.01, beta_d=4e-4, alpha_mb=0.012, mix_a=1.1e-4, mix_b=4e-4,
    gamma=1e-6,
)  # fmt: skip
SCHEDULE = ScheduleCost(fixed_s=1e-3, per_seq_s=1e-5, per_request_s=2e-4)
BLOCKS, BLOCK_SIZE = 120, 16
MAX_SEQS, MAX_TOKENS, LONGEST = 24, 256, 60


def spec(policy: str = "exclusive", **engine: Any) -> dict[str, Any]:
    return {
        "model": "org/model",
        "sampling": {"max_tokens": LONGEST, "n": 1},
        "engine": {
            "policy": policy, "device": "cpu", "max_seqs": MAX_SEQS,
            "max_batch_tokens": MAX_TOKENS, **engine,
        },
    }  # fmt: skip


def made_up(num: int = 120, seed: int = 3) -> list[SimRequest]:
    rng = np.random.default_rng(seed)
    return geometric_requests(num, mean_prompt_tokens=40, mean_output_tokens=15, rng=rng)


def direct(
    policy: str,
    requests: Sequence[SimRequest],
    *,
    config: SimConfig,
    cost: StepCost,
    schedule: ScheduleCost | None = None,
    concurrency: int | None = None,
) -> tuple[SimResult, list[SimStep]]:
    steps: list[SimStep] = []
    simulator = Simulator(
        make_policy(policy, Estimator()), config, cost, schedule=schedule, on_step=steps.append
    )
    arrivals = (
        AllAtOnce(requests)
        if concurrency is None
        else ClosedLoop([Stage(requests, concurrency)])
    )  # fmt: skip
    return simulator.run(arrivals), steps


def recorded(folder: Path, policy: str, **engine: Any) -> tuple[Path, SimResult]:
    """A simulated job, written as if it had run."""
    requests = made_up()
    budget = Budget(max_batch_tokens=MAX_TOKENS, max_seqs=MAX_SEQS)
    config = SimConfig(num_blocks=BLOCKS, budget=budget, window=4 * MAX_SEQS)
    result, steps = direct(policy, requests, config=config, cost=COST, schedule=SCHEDULE)
    output = write_results(
        folder,
        (
            {
                "text": "t", "prompt_tokens": item.num_prompt_tokens,
                "completion_tokens": item.num_output_tokens,
                "finish_reason": "length" if item.num_output_tokens == LONGEST else "stop",
            }
            for item in requests
        ),
        spec=spec(policy, **engine),
    )  # fmt: skip
    write_table(output, "steps", "run-1", map(step_row, range(1, 1 + len(steps)), steps))
    told = sizing(1, 0.0, block_size=BLOCK_SIZE, num_blocks=BLOCKS)
    write_table(output, "memory_plan", "run-1", [told])
    return output, result


def step_row(number: int, step: SimStep) -> Mapping[str, Any]:
    o, num_seqs = step.outcome, len(step.plan.scheduled)
    return {
        "step": number, "started_s": 500 + step.started_s, "elapsed_s": o.elapsed_s,
        "schedule_s": SCHEDULE.fixed_s + SCHEDULE.per_seq_s * num_seqs, "phase": o.phase,
        "num_prefill_tokens": o.num_prefill_tokens, "num_decode_tokens": o.num_decode_tokens,
        "num_context_tokens": o.num_context_tokens, "num_seqs": num_seqs,
        "num_finished": len(o.finished),
    }  # fmt: skip


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *args])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return " ".join(said.split())


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *args])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


# -- synthetic --


@pytest.mark.parametrize("concurrency", [None, 16])
def test_figures_are_those_of_the_simulator(concurrency: int | None, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    options = SimulateOptions(
        synthetic="64:20", rows=150, policy="all", seed=5, max_seqs=32, max_batch_tokens=256,
        capacity_tokens=3000, concurrency=concurrency,
    )  # fmt: skip
    done = run_simulation(options)
    assert [run.policy for run in done.runs] == list(POLICIES)
    requests = geometric_requests(
        150, mean_prompt_tokens=64, mean_output_tokens=20, rng=np.random.default_rng(5)
    )
    budget = Budget(max_batch_tokens=256, max_seqs=32)
    config = SimConfig(num_blocks=187, budget=budget, window=128)
    cost = HARDWARE["h200"].cost
    for run in done.runs:
        expected, _ = direct(
            run.policy, requests, config=config, cost=cost, concurrency=concurrency
        )
        assert run.result == expected
    given = [] if concurrency is None else ["--concurrency", "16"]
    said = shown(
        capsys, "--synthetic", "64:20", "--rows", "150", "--policy", "all", "--seed", "5",
        "--max-seqs", "32", "--max-batch-tokens", "256", "--capacity-tokens", "3000", *given,
    )  # fmt: skip
    for run in done.runs:
        assert " ".join(run_cells(run)) in said
    assert "named hardware h200" in said
    assert "2,992 tokens" in said, "whole blocks"


@pytest.mark.parametrize("name", list(HARDWARE))
def test_named_hardware_brings_its_sizes_and_costs(name: str) -> None:
    done = run_simulation(SimulateOptions(synthetic="100:10", rows=20, hardware=name))
    hardware, config = HARDWARE[name], done.setup.config
    assert done.setup.costs.cost == hardware.cost
    assert config.num_blocks * config.block_size == hardware.capacity_tokens
    assert config.budget.max_batch_tokens == hardware.max_batch_tokens
    assert config.budget.max_seqs == hardware.max_seqs
    assert [run.policy for run in done.runs] == ["hybrid"]
    assert (done.measured_s, done.ratio, done.recorded_run) == (None, None, None)


def test_a_limit_moves_the_other_as_in_an_engine() -> None:
    def budget(**given: int) -> tuple[int, int]:
        done = run_simulation(SimulateOptions(synthetic="10:2", rows=3, **given))
        config = done.setup.config
        assert config.window == 4 * config.budget.max_seqs
        return config.budget.max_batch_tokens, config.budget.max_seqs

    assert budget(max_seqs=9000) == (9000, 9000)
    assert budget(max_batch_tokens=100) == (100, 100)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give OUTPUT, a job to replay, or --synthetic"),
        (["out", "--synthetic", "5:5"], "both given"),
        (["--synthetic", "512"], "--synthetic is '512'"),
        (["--synthetic", "0:5"], "at least 1"),
        (["--synthetic", "5:-5"], "such as 512:256"),
        (["--synthetic", "5:5", "--rows", "0"], "--rows is 0"),
        (["--synthetic", "5:5", "--concurrency", "-1"], "--concurrency is -1"),
        (["--synthetic", "5:5", "--seed", "-1"], "--seed is -1"),
        (["--synthetic", "5:5", "--policy", "best"], "hybrid, exclusive, mixed, all"),
        (["--synthetic", "5:5", "--hardware", "a100"], "job, calibration, h200"),
        (["--synthetic", "5:5", "--hardware", "job"], "--hardware job needs a job"),
        (["--synthetic", "5:5", "--hardware", "calibration"], "needs a job"),
        (["--synthetic", "5:5", "--max-seqs", "9", "--max-batch-tokens", "5"], "--max-seqs is 9"),
        (["--synthetic", "5:5", "--capacity-tokens", "7"], "at least 16"),
        (["--synthetic", "500:500", "--capacity-tokens", "64"], "raise --capacity-tokens"),
        (["out", "--rows", "5"], "--rows 5 is for --synthetic"),
        (["out", "--seed", "5"], "--seed 5 is for --synthetic"),
        (["nosuch-output"], "nosuch-output"),
    ],
)
def test_a_mistake_is_status_2_and_one_line(
    args: list[str], message: str, capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in fails(capsys, *args)


# -- a replay --


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_replay_repeats_the_recorded_job(policy: str, tmp_path) -> None:
    output, result = recorded(tmp_path, policy)
    done = run_simulation(SimulateOptions(output=str(output), policy="all"))
    assert done.runs[0].policy == policy
    assert {run.policy for run in done.runs} == set(POLICIES)
    assert done.measured_s == pytest.approx(result.job_s, rel=1e-3), "but for the last row's"
    assert done.ratio == pytest.approx(1.0, abs=0.01)
    assert done.recorded_run is not None
    assert done.recorded_run.result.num_steps == pytest.approx(result.num_steps, rel=0.02)
    assert done.setup.requests == [
        item._replace(max_output_tokens=LONGEST) for item in made_up()
    ], "in the order of the input"  # fmt: skip
    schedule = done.setup.costs.schedule
    assert schedule.per_seq_s == pytest.approx(SCHEDULE.per_seq_s, rel=0.05)
    assert schedule.per_request_s == pytest.approx(SCHEDULE.per_request_s, rel=0.05)


def test_a_replay_tells_the_recorded_time_beside_the_simulated(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output, result = recorded(tmp_path, "exclusive")
    said = shown(capsys, str(output))
    assert f"exclusive: measured {result.job_s:.4g} s" in said
    assert "ratio 1.0" in said
    assert "120 of 120 rows, policy exclusive" in said
    assert "no mixed step was recorded" in said
    assert "1,920 tokens, at most 24 sequences and 256 tokens a step" in said
    other = shown(capsys, str(output), "--policy", "mixed")
    assert f"exclusive: measured {result.job_s:.4g} s" in other
    assert "ratio" not in other


@pytest.mark.parametrize(
    "given",
    [{"hardware": "h200"}, {"concurrency": 4}, {"max_seqs": 8}, {"capacity_tokens": 1000}],
    ids=lambda given: next(iter(given)),
)
def test_what_was_not_recorded_is_not_compared(given: dict[str, Any], tmp_path) -> None:
    output, _ = recorded(tmp_path, "mixed")
    done = run_simulation(SimulateOptions(output=str(output), **given))
    assert done.ratio is None
    assert not any("measured" in line for line in recording_lines(done))
    config, hardware = done.setup.config, HARDWARE["h200"]
    if "hardware" in given:
        assert config.num_blocks * config.block_size == hardware.capacity_tokens
        assert done.setup.costs.cost == hardware.cost
        assert done.setup.costs.schedule == ScheduleCost()
    if "max_seqs" in given:
        assert (config.budget.max_batch_tokens, config.budget.max_seqs) == (MAX_TOKENS, 8)


def test_a_deterministic_job_is_simulated_as_one(tmp_path) -> None:
    output, _ = recorded(tmp_path, "mixed", deterministic=True, overflow_probability=0.2)
    setup = run_simulation(SimulateOptions(output=str(output))).setup
    assert setup.config.budget.reservation == "full"
    assert setup.config.budget.chunk_tokens == 256
    assert setup.learning.overflow_probability == 0.2


def test_several_runs_are_one_job(tmp_path) -> None:
    output, result = recorded(tmp_path, "mixed")
    steps = [
        {"step": n, "started_s": 7.0 + n, "elapsed_s": 1.0, "schedule_s": 0.0, "phase": "decode",
         "num_prefill_tokens": 0, "num_decode_tokens": 4, "num_context_tokens": 90, "num_seqs": 4,
         "num_finished": 0}
        for n in range(3)
    ]  # fmt: skip
    write_table(output, "steps", "run-2", steps)
    done = run_simulation(SimulateOptions(output=str(output)))
    assert done.measured_s == pytest.approx(result.job_s + 3.0, rel=1e-3)
    assert len(done.setup.requests) == 120


def test_an_output_anywhere(tmp_path) -> None:
    output, _ = recorded(tmp_path, "mixed")
    memory = fsspec.filesystem("memory")
    memory.put(str(output), "/replayed", recursive=True)
    try:
        there = run_simulation(SimulateOptions(output="memory://replayed"))
    finally:
        memory.rm("/replayed", recursive=True)
    assert there.runs == run_simulation(SimulateOptions(output=str(output))).runs


def test_checkpointed_rows_of_a_job_that_is_not_done_count(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["x"] * 5}), tmp_path / "in.parquet")
    dataset, output = open_dataset(str(tmp_path / "in.parquet")), tmp_path / "out"
    cost = TokenCost(columns=(), tokens_per_byte=0.0, tokens_per_row=1.0)
    record = JobRecord(
        job_id="j", created="2026-12-01", spec=spec(), generation={}, output={},
        columns=ResultColumns(samples=True),
        shards=cut_shards(dataset, cost=cost, target_tokens=2),
    )  # fmt: skip
    ledger = Ledger.open(
        str(output), dataset=dataset, generation={}, output={}, make_record=lambda _: record
    ).ledger
    samples = [
        {"text": "", "finish_reason": "stop", "completion_tokens": 3},
        {"text": "", "finish_reason": "length", "completion_tokens": LONGEST},
    ]
    try:
        for shard, ordinals in zip(ledger.pending(), ((0, 1), (0,), ()), strict=True):
            writer = ledger.writer(shard)
            for ordinal in ordinals:
                writer.add(
                    ResultRow(
                        ordinal=ordinal, row_id=f"{shard.index}-{ordinal}", status="ok", text="t",
                        finish_reason="stop", prompt_tokens=20 + shard.index, cached_tokens=16,
                        completion_tokens=3 + LONGEST, samples=samples,
                    )
                )  # fmt: skip
            if len(ordinals) == 2:
                ledger.note_committed(writer.close())
            else:
                writer.checkpoint()
    finally:
        ledger.release()
    found = read_recording(str(output))
    assert found.num_rows == 3
    assert found.samples[4:] == (Sample(21, 16, 3, LONGEST), Sample(21, 16, LONGEST, LONGEST))
    assert found.shared_context_tokens == 16
    assert found.requests[0] == SimRequest(4, 3, LONGEST)
    with pytest.raises(SpecError, match=r"how much KV memory.*--capacity-tokens"):
        run_simulation(SimulateOptions(output=str(output)))
    with pytest.raises(SpecError, match="no steps to fit"):
        run_simulation(SimulateOptions(output=str(output), capacity_tokens=4000))
    done = run_simulation(SimulateOptions(output=str(output), hardware="h200"))
    assert done.runs[0].result.num_requests == 6
    assert "rows without a completion" in " ".join(recording_lines(done))


def test_a_job_without_a_completion_is_told(tmp_path) -> None:
    output = write_results(tmp_path, [{"status": "error", "finish_reason": "error"}], spec=spec())
    with pytest.raises(SpecError, match="has a completion"):
        read_recording(str(output))
    with pytest.raises(SpecError, match="has a completion"):
        read_recording(str(write_record(tmp_path / "new", spec())))
    with pytest.raises(InputError, match=r"holds no job"):
        read_recording(str(tmp_path / "nothing"))


def test_a_policy_of_another_version_is_told(tmp_path) -> None:
    row = {"text": "t", "prompt_tokens": 3, "completion_tokens": 2}
    output = write_results(tmp_path, [row], spec=spec("adaptive"))
    with pytest.raises(SpecError, match="'adaptive'; this version has hybrid"):
        run_simulation(SimulateOptions(output=str(output)))


# -- lengths --


def row(prompt: int, output: int, reason: str = "stop", **more: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt, "cached_tokens": 0, "completion_tokens": output,
        "finish_reason": reason, **more,
    }  # fmt: skip


def test_the_longest_allowed_end_is_the_jobs_or_what_cut_the_row() -> None:
    rows = [row(10, 5), row(10, 90, "length"), row(10, 60, "length"), row(10, 99)]
    found = [item.max_output_tokens for item in samples_of(rows, spec(), None)]
    assert found == [60, 90, 60, 99]


def test_a_models_context_shows_in_rows_that_it_cut() -> None:
    rows = [row(70, 30, "length"), row(50, 5), row(20, 5)]
    found = [item.max_output_tokens for item in samples_of(rows, spec(), None)]
    assert found == [30, 50, 60], "the model takes 100 tokens"


def test_no_row_is_allowed_more_than_memory_held() -> None:
    (found,) = samples_of([row(30, 5)], spec(), Pool(16, 4))
    assert found.max_output_tokens == 34


def test_further_samples_find_the_prompts_full_blocks() -> None:
    ends = [{"completion_tokens": n, "finish_reason": "stop"} for n in (4, 6, 8)]
    rows = [row(33, 18, samples=ends)]
    found = list(samples_of(rows, spec(), Pool(16, 100)))
    assert [(item.num_cached_tokens, item.num_output_tokens) for item in found] == [
        (0, 4), (32, 6), (32, 8),
    ]  # fmt: skip
    alone = samples_of(rows, spec(deterministic=True), Pool(16, 100))
    assert [item.num_cached_tokens for item in alone] == [0, 0, 0]


@pytest.mark.parametrize(
    ("engine", "num_tokens", "expected"),
    [
        ({}, 256, (256, 24)),
        ({"max_seqs": None, "max_batch_tokens": None}, 256, (1024, 256)),
        ({"max_seqs": None, "max_batch_tokens": None, "device": "auto"}, 1024, (1024, 256)),
        ({"max_seqs": None, "max_batch_tokens": None, "device": "auto"}, 1025, (8192, 1024)),
        ({"max_seqs": None, "max_batch_tokens": None, "device": "cuda"}, 256, (8192, 1024)),
        ({"max_seqs": None, "max_batch_tokens": 100}, 100, (100, 100)),
        ({"max_seqs": 2000, "max_batch_tokens": None}, 100, (2000, 2000)),
    ],
)
def test_sizes_are_the_jobs_or_its_devices(
    engine: dict[str, Any], num_tokens: int, expected: tuple[int, int], tmp_path
) -> None:
    rows = [{"text": "t", "prompt_tokens": 3, "completion_tokens": 2}]
    output = write_results(tmp_path, rows, spec=spec(**engine))
    step = {
        "step": 1, "started_s": 0, "elapsed_s": 1, "num_prefill_tokens": num_tokens,
        "num_decode_tokens": 0, "num_context_tokens": 0, "num_seqs": 1, "num_finished": 0,
    }  # fmt: skip
    write_table(output, "steps", "run-1", [step])
    assert recorded_sizes(read_recording(str(output))) == expected


# -- a calibration --


def test_a_calibration_of_this_machine_and_the_jobs_model_is_used(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    output, _ = recorded(tmp_path, "hybrid")
    options = SimulateOptions(output=str(output), hardware="calibration")
    with pytest.raises(SpecError, match=r"no calibration of org/model.*flows calibrate --model"):
        run_simulation(options)
    device = pick_device("cpu")
    steps = [StepSample(n, 0, 0, COST.step_s(n, 0)) for n in (16, 32, 64, 256)]
    steps += [StepSample(0, n, 65 * n, COST.step_s(0, n, 65 * n)) for n in (1, 2, 4, 8, 24)]
    steps += [StepSample(100, n, 65 * n, COST.step_s(100, n, 65 * n)) for n in (4, 8, 24)]
    stored = calibrated(
        steps,
        hardware=hardware_of("cpu"),
        model_fingerprint="None",
        model="org/model",
        dtype=str(pick_dtype("auto", device)).removeprefix("torch."),
        created="2026-11-29",
        settings={"max_batch_tokens": 256, "max_seqs": 24, "block_size": 16},
    )
    store_calibration(stored)
    done: Simulation = run_simulation(options)
    assert done.setup.costs.cost == stored.cost
    assert done.setup.costs.calibration == stored.prior_samples
    assert done.setup.costs.schedule.fixed_s > 0, "of the job's own steps"
    assert done.ratio == pytest.approx(1.0, abs=0.2)
