"""Where a step's time goes: the parts are all there, and together they are the step."""

from __future__ import annotations

import itertools
import time

import pytest

from schedulers.policies import POLICIES
from tests.unit.workers.harness import Clock, check_idle, make_engine, request, workload
from tests.unit.workers.test_torch_backend import prompt_batch
from tests.unit.workers.tiny_models import make_tiny_model
from workers.backends.base import Batch, Executed
from workers.backends.fake import FakeBackend, FakeFaults
from workers.backends.torch_backend import TorchBackend
from workers.kernels import decoder as kernel
from workers.loading.files import resolve_model
from workers.models.native import NativeDecoder
from workers.request import StepRecord
from workers.times import ExecuteTimes, ModelTimes, Stopwatch

NATIVE = pytest.mark.skipif(
    not kernel.is_available(), reason="no AVX-512 with BF16, or no compiler"
)


class TickingClock(Clock):
    """A second passes at each reading."""

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_laps_lie_end_to_end() -> None:
    watch = Stopwatch(TickingClock())
    assert (watch.last_s, watch.lap(), watch.lap(), watch.last_s) == (1.0, 1.0, 1.0, 3.0)


def test_sums_and_differences() -> None:
    assert ModelTimes(3, 4, 5, 6).since(ModelTimes(1, 1, 2, 2)) == (2, 3, 3, 4)
    assert ExecuteTimes(1, device_s=2).plus(ExecuteTimes(1, 5)) == (2, 5, 0, 0, 0, 0, 2)


# -- the engine --


@pytest.mark.parametrize("policy", list(POLICIES))
def test_each_part_of_a_step_is_filled_and_they_leave_no_hole(policy: str) -> None:
    steps: list[StepRecord] = []
    engine = make_engine(policy, on_step=steps.append, clock=TickingClock())
    assert len(list(engine.run(workload(1, 40)))) == 40
    check_idle(engine)
    for step in steps:
        plan_apply_resume_account = step.engine[1:]
        assert min(plan_apply_resume_account) >= 1
        assert step.schedule_s == sum(plan_apply_resume_account)
        assert step.elapsed_s >= 1
    for before, after in itertools.pairwise(steps):
        gap_s = after.started_s - before.started_s - before.elapsed_s - before.schedule_s
        assert 0 <= after.engine.intake_s <= gap_s
    assert steps[0].engine.intake_s >= 1
    assert sum(step.engine.intake_s for step in steps) < steps[-1].started_s


@pytest.mark.parametrize("policy", list(POLICIES))
def test_time_in_the_backend_is_not_the_engines(policy: str) -> None:
    clock, steps = Clock(), list[StepRecord]()

    def pass_time(_: Batch) -> None:
        clock.now_s += 2.0

    backend = FakeBackend(on_execute=pass_time)
    list(
        make_engine(policy, backend=backend, on_step=steps.append, clock=clock).run(workload(2, 20))
    )
    assert {(step.elapsed_s, step.schedule_s, *step.engine) for step in steps} == {
        (2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    }
    assert {step.execute for step in steps} == {ExecuteTimes()}, "the fake knows no parts"


def test_a_batch_that_was_halved_has_the_parts_of_both_halves() -> None:
    class Timed(FakeBackend):
        def execute(self, batch: Batch) -> Executed:
            return super().execute(batch)._replace(times=ExecuteTimes(1, 2, 3, 4, 5, 6, 7))

    steps: list[StepRecord] = []
    backend = Timed(faults=FakeFaults(max_batch_tokens=4))
    list(make_engine(backend=backend, on_step=steps.append).run([request(0, [1] * 7)]))
    assert steps[0].num_prefill_tokens == 7
    assert steps[0].execute == (2, 4, 6, 8, 10, 12, 14)
    assert steps[0].row()["products_s"] == 4


# -- the torch backend --


@pytest.fixture(params=["torch", pytest.param("native", marks=NATIVE)])
def backend(request: pytest.FixtureRequest, tmp_path):
    folder = make_tiny_model("llama", tmp_path)
    dtype = "bfloat16" if request.param == "native" else "float32"
    made = TorchBackend.load(resolve_model(str(folder)), device="cpu", dtype=dtype)
    assert isinstance(made._model, NativeDecoder) == (request.param == "native")
    made.allocate(num_blocks=64, block_size=16)
    yield made
    made.close()


def test_each_part_is_filled_and_together_they_are_the_call(backend) -> None:
    """All but the tenth of a call, or half a millisecond, is in one of the parts."""
    missing: list[float] = []
    for _ in range(8):
        started_s = time.perf_counter()
        times = backend.execute(prompt_batch(200, 90, 1, 1)).times
        elapsed_s = time.perf_counter() - started_s
        assert min(times[:-1]) > 0, times
        assert times.device_s == 0
        assert sum(times) <= elapsed_s
        missing.append(elapsed_s - sum(times) - max(0.1 * elapsed_s, 5e-4))
    assert min(missing) <= 0


def test_what_is_not_sampled_takes_no_head_and_no_draw(backend) -> None:
    (segment,) = prompt_batch(50).segments
    times = backend.execute(Batch((segment._replace(sample=False),))).times
    assert min(times.layout_s, times.products_s, times.attention_s, times.rows_s) > 0
    assert times.sampling_s < times.products_s + times.rows_s


def test_a_device_that_works_by_itself_is_one_amount(backend, monkeypatch) -> None:
    monkeypatch.setattr(backend._model, "times", lambda: None)
    times = backend.execute(prompt_batch(50)).times
    assert times.layout_s > 0 and times.device_s > 0
    assert sum(times) == times.layout_s + times.device_s
