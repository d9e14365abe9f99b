"""Measuring step costs: the fit finds what made the times, limits hold, nothing is left behind."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from schedulers.blocks import BlockManager
from schedulers.calibration import fit_steps, switch_s
from schedulers.cost import StepCost, StepSample
from schedulers.memory import NotEnoughMemory
from tests.unit.workers.tiny_models import make_tiny_model
from workers import calibrate
from workers.backends.base import Batch
from workers.backends.fake import FakeBackend, FakeFaults
from workers.backends.torch_backend import TorchBackend
from workers.calibrate import measure_steps
from workers.calibration_points import Limits, packed, plan_layout
from workers.errors import BackendError
from workers.loading.files import resolve_model

TRUE = StepCost(
    alpha_p=1e-2, beta_p=4.5e-4, alpha_d=1.5e-2, beta_d=6e-4,
    alpha_mb=1.7e-2, mix_a=4.5e-4, mix_b=1e-4, mix_c=2e-4, gamma=2e-6,
)  # fmt: skip
SWITCH_S = 0.004


class Machine:
    """A fake backend on a clock that its steps move by what they cost."""

    def __init__(
        self, *, noise: float = 0.0, switch_s: float = 0.0, slower: float = 1.0, **backend
    ) -> None:
        self.now_s = 0.0
        self.steps: list[StepSample] = []
        self.batches: list[Batch] = []
        self.backend = FakeBackend(on_execute=self._execute, **backend)
        self._noise = noise
        self._slower = slower
        self._switch_s = switch_s
        self._rng = Random(7)

    def _execute(self, batch: Batch) -> None:
        decodes = [
            s for s in batch.segments if s.num_tokens == 1 and s.start >= s.seq.num_prompt_tokens
        ]
        context = sum(s.start + 1 for s in decodes)
        counts = batch.num_tokens - len(decodes), len(decodes), context
        step = StepSample(*counts, TRUE.step_s(*counts))
        elapsed_s = step.elapsed_s * (1 + self._rng.gauss(0, self._noise))
        if self._noise and self._rng.random() < 0.03:
            elapsed_s *= 3
        if self.steps and self.steps[-1].kind != step.kind:
            elapsed_s += self._switch_s
        self.now_s += elapsed_s * self._slower
        self.steps.append(step)
        self.batches.append(batch)

    def measure(self, **changes) -> list[StepSample]:
        sizes = {"block_size": 16, "num_blocks": 6000, "max_batch_tokens": 512, "max_seqs": 64}
        return measure_steps(self.backend, clock=lambda: self.now_s, **(sizes | changes))


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    """All block managers of a test; none of their blocks is held when it ends."""
    made: list[BlockManager] = []

    class Watched(BlockManager):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(calibrate, "BlockManager", Watched)
    yield made
    for table in made:
        table.check_integrity()
        assert table.num_free_blocks == table.num_blocks


def sizes_of(samples: list[StepSample]) -> Counter:
    return Counter((*sample[:3], sample.switched) for sample in samples)


def test_the_fit_recovers_the_coefficients() -> None:
    cost = fit_steps(Machine(noise=0.01).measure(budget_s=120.0))
    for name in ("beta_p", "beta_d", "gamma"):
        assert getattr(cost, name) == pytest.approx(getattr(TRUE, name), rel=0.04), name
    for name in ("alpha_p", "alpha_d", "alpha_mb"):
        assert getattr(cost, name) == pytest.approx(getattr(TRUE, name), rel=0.15), name
    for share in (0.1, 0.5, 0.9):
        assert cost.mixed_marginal_s(share) == pytest.approx(TRUE.mixed_marginal_s(share), rel=0.04)


def test_without_noise_unseen_steps_are_predicted() -> None:
    cost = fit_steps(Machine().measure(budget_s=20.0))
    for size in ((300, 0, 0), (0, 40, 8000), (200, 50, 5000), (700, 100, 20_000)):
        assert cost.step_s(*size) == pytest.approx(TRUE.step_s(*size), rel=0.01), size


def test_the_switch_is_measured_apart_from_the_steady_steps() -> None:
    samples = Machine(switch_s=SWITCH_S).measure(budget_s=60.0)
    assert switch_s(samples) == pytest.approx(2 * SWITCH_S, rel=1e-6)
    assert fit_steps(samples).alpha_switch == pytest.approx(2 * SWITCH_S, rel=1e-6)
    assert fit_steps(samples).alpha_d == pytest.approx(TRUE.alpha_d, rel=1e-3)
    kinds = Counter(sample.kind for sample in samples if sample.switched)
    assert min(kinds["prefill"], kinds["decode"]) >= 4
    sizes = sizes_of(samples)
    assert all((*size[:3], False) in sizes for size in sizes if size[3])


def test_the_grid_covers_sizes_contexts_and_shares() -> None:
    samples = [sample for sample in Machine().measure(budget_s=60.0) if not sample.switched]
    prefill = {sample.num_prefill_tokens for sample in samples if sample.kind == "prefill"}
    assert prefill == {16, 32, 64, 128, 256, 512}
    decode = [sample for sample in samples if sample.kind == "decode"]
    contexts = {sample.num_context_tokens / sample.num_decode_tokens for sample in decode}
    assert contexts == {33, 513}
    assert {1, 2, 4, 8, 16, 32, 64} == {sample.num_decode_tokens for sample in decode}
    shares = {
        round(s.num_decode_tokens / (s.num_decode_tokens + s.num_prefill_tokens), 1)
        for s in samples
        if s.kind == "mixed"
    }
    assert shares >= {0.1, 0.3, 0.5, 0.7, 0.9}


def test_prefill_steps_hold_one_prompt_or_several() -> None:
    machine = Machine()
    machine.measure(budget_s=30.0)
    pairs = zip(machine.steps, machine.batches, strict=True)
    prompts = {len(batch.segments) for step, batch in pairs if step[:2] == (512, 0)}
    assert prompts >= {1, 3}


@pytest.mark.parametrize("limits", [(512, 64), (300, 17), (64, 1), (16, 16), (1, 1), (2, 2)])
def test_no_step_exceeds_the_limits(limits) -> None:
    max_batch_tokens, max_seqs = limits
    machine = Machine()
    samples = machine.measure(
        max_batch_tokens=max_batch_tokens, max_seqs=max_seqs, num_blocks=400, budget_s=5.0
    )
    assert {"prefill", "decode"} <= {sample.kind for sample in samples}
    assert max(batch.num_tokens for batch in machine.batches) <= max_batch_tokens
    assert max(len(batch.segments) for batch in machine.batches) <= max_seqs


@pytest.mark.parametrize("budget_s", [0.001, 15.0, 25.0])
def test_the_budget_ends_repetitions_but_every_step_is_measured_twice(budget_s: float) -> None:
    machine = Machine()
    sizes = sizes_of(machine.measure(budget_s=budget_s, max_seqs=16))
    assert min(sizes.values()) >= 2
    longest_s = max(step.elapsed_s for step in machine.steps)
    if budget_s > 10:
        assert budget_s <= machine.now_s <= budget_s + longest_s


def test_there_is_an_end_to_repetitions_on_a_fast_machine() -> None:
    sizes = sizes_of(Machine().measure(budget_s=1e6, max_batch_tokens=64, max_seqs=8))
    steady = [count for size, count in sizes.items() if not size[3]]
    assert max(steady) == 20


@pytest.mark.parametrize("num_blocks", [4, 5, 12, 40, 90])
def test_little_memory_is_enough(num_blocks: int, tables) -> None:
    samples = Machine().measure(num_blocks=num_blocks, budget_s=30.0)
    assert {"prefill", "decode"} <= {sample.kind for sample in samples}
    fit_steps(samples)
    assert tables[0].num_blocks == num_blocks


def test_two_contexts_are_told_apart_in_little_memory() -> None:
    cost = fit_steps(Machine().measure(num_blocks=120, budget_s=60.0))
    assert cost.gamma == pytest.approx(TRUE.gamma, rel=0.05)


def test_too_little_memory_is_said_before_any_is_taken() -> None:
    machine = Machine()
    with pytest.raises(NotEnoughMemory, match="--memory"):
        machine.measure(num_blocks=3)
    assert machine.steps == []


def test_contexts_and_prompts_fit_a_short_model() -> None:
    machine = Machine(max_model_len=100)
    assert machine.measure(budget_s=20.0)
    segments = [segment for batch in machine.batches for segment in batch.segments]
    assert max(segment.start + segment.num_tokens for segment in segments) < 100


def test_a_slow_machine_fills_less() -> None:
    limits = Limits(16, 6000, 512, 64, 4096)
    assert plan_layout(limits, fill_tokens=10**6)[1:] == (64, 32, 64, 512)
    slow = plan_layout(limits, fill_tokens=3000)
    assert 32 * slow.num_short + 512 * slow.num_long <= 3000
    assert slow.num_long >= 2


def test_a_slow_machine_leaves_the_biggest_steps_out() -> None:
    machine = Machine(slower=30.0)
    samples = machine.measure(budget_s=60.0)
    assert machine.now_s < 150.0
    assert {sample.kind for sample in samples} == {"prefill", "decode", "mixed"}
    assert max(s.num_prefill_tokens + s.num_decode_tokens for s in samples) < 512


def test_packed_prompts_make_the_step() -> None:
    limits = Limits(16, 6000, 8192, 64, 4096)
    for size in (1, 100, 512, 1000, 8192):
        lengths = packed(limits, size)
        assert sum(lengths) == size
        assert all(128 <= length <= 256 for length in lengths[:-1])


def test_the_order_is_a_function_of_the_seed() -> None:
    runs = [Machine(), Machine(), Machine()]
    for machine, seed in zip(runs, (0, 0, 1), strict=True):
        machine.measure(seed=seed, budget_s=20.0)
    first, second, third = (machine.steps for machine in runs)
    assert first == second
    assert first != third


def test_every_sequence_is_forgotten(tables) -> None:
    machine = Machine()
    machine.measure(budget_s=20.0)
    seq_ids = {s.seq.seq_id for batch in machine.batches for s in batch.segments}
    assert machine.backend.forgotten == len(seq_ids)
    assert len(tables) == 1


def test_a_failing_device_leaves_nothing_behind(tables) -> None:
    machine = Machine(faults=FakeFaults(fail_at_step=60))
    with pytest.raises(BackendError, match="step 60"):
        machine.measure(budget_s=20.0)
    assert tables[0].tables() == {}


def test_progress_is_told_in_order() -> None:
    told: list[tuple[str, float]] = []
    Machine().measure(budget_s=20.0, on_progress=lambda *item: told.append(item))
    names = list(dict.fromkeys(what for what, _ in told))
    assert names[:4] == [
        "warming up", "filling KV memory", "first time", "round 1",
    ]  # fmt: skip
    assert [elapsed_s for _, elapsed_s in told] == sorted(elapsed_s for _, elapsed_s in told)


def test_a_real_model_is_measured(tmp_path) -> None:
    files = resolve_model(str(make_tiny_model("llama", tmp_path)))
    backend = TorchBackend.load(files, device="cpu", dtype="float32")
    ticks = iter(range(10**9))
    samples = measure_steps(
        backend,
        block_size=16,
        num_blocks=80,
        max_batch_tokens=128,
        max_seqs=8,
        clock=lambda: float(next(ticks)),
        budget_s=1.0,
    )
    backend.close()
    assert {"prefill", "decode"} <= {sample.kind for sample in samples}
    assert min(sizes_of(samples).values()) >= 2
