"""How the engine answers a device that has no memory for a batch."""

from __future__ import annotations

from schedulers.view import Budget
from tests.unit.workers.harness import make_engine, request
from workers.backends.fake import FakeBackend, FakeFaults
from workers.pressure import MemoryPressure

FULL = Budget(max_batch_tokens=64, max_seqs=8, chunk_tokens=32)


def test_the_budget_falls_to_what_fitted_and_doubles_back_after_a_healthy_while() -> None:
    pressure = MemoryPressure(FULL, recover_after=3)
    budget = pressure.after_step(FULL, 64, 16)
    assert (budget.max_batch_tokens, budget.chunk_tokens) == (16, 16)
    sizes = []
    for _ in range(9):
        budget = pressure.after_step(budget, budget.max_batch_tokens, budget.max_batch_tokens)
        sizes.append(budget.max_batch_tokens)
    assert sizes == [16, 16, 32, 32, 32, 64, 64, 64, 64]
    assert budget is FULL


def test_another_failure_starts_the_wait_anew() -> None:
    pressure = MemoryPressure(FULL, recover_after=3)
    budget = pressure.after_step(FULL, 64, 16)
    for _ in range(2):
        budget = pressure.after_step(budget, 16, 16)
    budget = pressure.after_step(budget, 16, 8)
    for _ in range(2):
        budget = pressure.after_step(budget, 8, 8)
    assert budget.max_batch_tokens == 8


def test_batches_that_failed_once_are_not_planned_again_at_once() -> None:
    sizes: list[int] = []
    backend = FakeBackend(
        faults=FakeFaults(max_batch_tokens=16),
        on_execute=lambda batch: sizes.append(batch.num_tokens),
    )
    engine = make_engine(backend=backend, max_batch_tokens=64, num_blocks=400)
    list(engine.run([request(i, range(60 * i, 60 * i + 59), max_tokens=2) for i in range(20)]))
    assert sizes[0] == 64
    assert sum(size > 16 for size in sizes) <= 4  # 64, and its parts 59, 29 and 30
