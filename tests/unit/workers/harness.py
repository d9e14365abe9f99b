"""A small engine over the fake backend, random workloads, and a policy wrapper that misbehaves on
purpose.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from schedulers.filling import PlanBuilder
from schedulers.policies import make_policy
from schedulers.view import Budget, Outcome, Plan, Policy, View
from workers.backends.base import Backend
from workers.backends.fake import FakeBackend
from workers.engine import Engine, EngineConfig
from workers.request import Request, RequestId, Result, SamplingParams, StepRecord


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Suspending:
    """Another policy, with suspensions injected at random, and every plan checked against the
    budget.
    """

    def __init__(self, inner: Policy, *, seed: int, chance: float) -> None:
        self.name = inner.name
        self.plans: list[Plan] = []
        self.num_injected = 0
        self._inner = inner
        self._rng = random.Random(seed)
        self._chance = chance

    def plan(self, view: View, budget: Budget) -> Plan:
        plan = self._injected(view, budget) or self._inner.plan(view, budget)
        self._check(plan, view, budget)
        self.plans.append(plan)
        return plan

    def _injected(self, view: View, budget: Budget) -> Plan | None:
        if len(view.running) < 2 or self._rng.random() >= self._chance:
            return None
        builder = PlanBuilder(view, budget)
        builder.suspend(self._rng.choice(list(view.running)[1:]))
        builder.decode(view.running[0]) or builder.chunk(view.running[0])
        self.num_injected += bool(builder.num_scheduled)
        return builder.build("injected suspension") if builder.num_scheduled else None

    def _check(self, plan: Plan, view: View, budget: Budget) -> None:
        assert plan.num_scheduled_tokens <= budget.max_batch_tokens
        holders = {seq.seq_id for seq in view.running} - set(plan.suspended) | set(plan.admitted)
        assert len(holders) <= budget.max_seqs
        scheduled = [item.seq_id for item in plan.scheduled]
        assert len(set(scheduled)) == len(scheduled)
        assert set(scheduled) <= holders
        assert all(item.num_tokens >= 1 for item in plan.scheduled)
        if self.name == "exclusive":
            assert plan.phase in ("prefill", "decode")

    def observe(self, outcome: Outcome) -> None:
        self._inner.observe(outcome)


def make_engine(
    policy: str | Policy = "exclusive",
    *,
    backend: Backend | None = None,
    num_blocks: int = 64,
    block_size: int = 4,
    max_batch_tokens: int = 32,
    max_seqs: int = 16,
    window: int = 20,
    share_prefixes: bool = True,
    row_timeout_s: float | None = None,
    reservation: str = "expected",
    chunk_tokens: int | None = None,
    on_step: Callable[[StepRecord], None] = lambda _: None,
    clock: Callable[[], float] | None = None,
) -> Engine:
    return Engine(
        backend or FakeBackend(),
        make_policy(policy) if isinstance(policy, str) else policy,
        EngineConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            budget=Budget(
                max_batch_tokens=max_batch_tokens,
                max_seqs=max_seqs,
                reservation=reservation,  # type: ignore[arg-type]
                chunk_tokens=chunk_tokens,
            ),
            window=window,
            share_prefixes=share_prefixes,
            row_timeout_s=row_timeout_s,
        ),
        clock=clock or Clock(),
        on_step=on_step,
    )


def request(row: object, prompt: Iterable[int] = (1, 2, 3), **sampling: object) -> Request:
    return Request(
        request_id=RequestId(str(row)),
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),  # type: ignore[arg-type]
    )


def workload(
    seed: int, num_rows: int, *, longest_prompt: int = 20, longest: int = 24
) -> list[Request]:
    """Random rows; few distinct tokens, so that prefixes are shared now and then; some with
    samples.
    """
    rng = random.Random(seed)
    return [
        request(
            row,
            [rng.randrange(1, 4) for _ in range(rng.randint(1, longest_prompt))],
            max_tokens=rng.randint(1, longest),
            n=rng.choice([1, 1, 1, 3]),
        )
        for row in range(num_rows)
    ]


def texts(results: Iterable[Result]) -> dict[str, list[tuple[int, ...]]]:
    """Token ids by row, which must not depend on how the rows were batched."""
    return {r.request_id: [c.token_ids for c in r.completions] for r in results}


def check_idle(engine: Engine) -> None:
    """Nothing is held, nothing is lost: the law at the end of every run."""
    engine.blocks.check_integrity()
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
    assert not engine.blocks.tables()
    assert engine.num_in_flight == 0
