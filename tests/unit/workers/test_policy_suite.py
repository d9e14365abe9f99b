"""One suite over all policies: nothing starves, no block leaks, the budget is kept, all rows
finish, same seed same plan.
"""

from __future__ import annotations

import pytest

from schedulers.estimate import Estimator
from schedulers.policies import POLICIES, make_policy
from schedulers.policies.hybrid import Hybrid
from tests.unit.workers.harness import Suspending, check_idle, make_engine, texts, workload
from workers.backends.fake import FakeBackend, hashed_script

SIZES = [
    {"num_blocks": 12, "max_seqs": 4, "max_batch_tokens": 8},
    {"num_blocks": 24, "max_seqs": 16, "max_batch_tokens": 32},
    {"num_blocks": 400, "max_seqs": 16, "max_batch_tokens": 7},
    {"num_blocks": 400, "max_seqs": 1, "max_batch_tokens": 64},
]


def expected(seed: int, num_rows: int) -> dict[str, list[tuple[int, ...]]]:
    """Brute force: each sample alone, straight from the script."""
    script = hashed_script()
    answers: dict[str, list[tuple[int, ...]]] = {}
    for req in workload(seed, num_rows):
        samples: list[tuple[int, ...]] = []
        for index in range(req.sampling.n):
            tokens: list[int] = []
            while len(tokens) < req.sampling.max_tokens and 0 not in tokens:
                tokens.append(script(req.request_id, index, len(tokens)))
            samples.append(tuple(tokens))
        answers[req.request_id] = samples
    return answers


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("chance", [0.0, 0.15])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_every_row_finishes_with_its_own_tokens_and_no_block_leaks(
    name: str, chance: float, sizes: dict[str, int], seed: int
) -> None:
    policy = Suspending(make_policy(name), seed=seed, chance=chance)
    engine = make_engine(policy, **sizes)  # type: ignore[arg-type]
    results = list(engine.run(workload(seed, 60)))
    assert len(results) == 60
    assert texts(results) == expected(seed, 60)
    check_idle(engine)
    if chance and sizes["max_seqs"] > 1:
        assert policy.num_injected >= 1
        assert sum(result.num_suspensions for result in results) >= policy.num_injected


class Restless(Hybrid):
    """Changes its mode at every evaluation, and evaluates all the time."""

    def __init__(self) -> None:
        super().__init__(Estimator(min_samples=2, update_every=3), cooldown=0, probe_every=2)
        self.num_changes = 0

    def _decide(self, found: object) -> str:
        self.mode = self._other
        self.num_changes += 1
        return "changes: restless"


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_changes_of_mode_at_any_moment_lose_and_recompute_nothing(
    sizes: dict[str, int], seed: int
) -> None:
    """Modes change and probes run between suspensions; every row has its own tokens, and without
    suspensions each token is computed once.
    """
    for chance in (0.0, 0.15):
        restless, backend = Restless(), FakeBackend()
        policy = Suspending(restless, seed=seed, chance=chance)
        engine = make_engine(policy, backend=backend, share_prefixes=False, **sizes)  # type: ignore[arg-type]
        results = list(engine.run(workload(seed, 60)))
        assert restless.num_changes >= 10
        assert texts(results) == expected(seed, 60)
        check_idle(engine)
        if not any(result.num_suspensions for result in results):
            once = sum(
                result.num_prompt_tokens + len(completion.token_ids) - 1
                for result in results
                for completion in result.completions
            )
            assert backend.num_computed_tokens == once


@pytest.mark.parametrize("name", POLICIES)
def test_same_seed_same_plan(name: str) -> None:
    def plans() -> list[object]:
        policy = Suspending(make_policy(name), seed=4, chance=0.1)
        list(make_engine(policy, num_blocks=30).run(workload(9, 50)))
        return list(policy.plans)

    assert plans() == plans()


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_starves(name: str) -> None:
    """A long row among many short ones is done before a few windows have passed it."""
    from tests.unit.workers.harness import request

    engine = make_engine(name, num_blocks=16, window=10, max_seqs=4)
    rows = [request(i, [1, 2], max_tokens=2) for i in range(300)]
    rows[7] = request("long", [3] * 30, max_tokens=30)
    order = [result.request_id for result in engine.run(rows)]
    assert len(order) == 300
    assert order.index("long") < 60


@pytest.mark.parametrize("name", POLICIES)
def test_full_reservation_never_suspends(name: str) -> None:
    steps = []
    engine = make_engine(
        name, num_blocks=20, reservation="full", share_prefixes=False, on_step=steps.append
    )
    results = list(engine.run(workload(2, 60)))
    assert len(results) == 60
    assert sum(step.num_suspended for step in steps) == 0
    check_idle(engine)


@pytest.mark.parametrize("name", POLICIES)
def test_expected_reservation_uses_memory_that_full_reservation_leaves_idle(name: str) -> None:
    """The point of suspending: more holders at once when most rows end long before their limit."""

    def peak(reservation: str) -> int:
        steps = []
        engine = make_engine(
            name,
            num_blocks=40,
            max_seqs=64,
            window=64,
            reservation=reservation,
            on_step=steps.append,
        )
        rows = workload(3, 400, longest_prompt=4, longest=4)
        rows = [r for r in rows if r.sampling.n == 1]
        from dataclasses import replace

        rows = [replace(r, sampling=replace(r.sampling, max_tokens=60)) for r in rows]
        list(engine.run(rows))
        return max(step.num_running for step in steps)

    assert peak("expected") > 1.5 * peak("full")


@pytest.mark.parametrize("name", POLICIES)
def test_fixed_chunks_do_not_depend_on_the_rest_of_the_batch(name: str) -> None:
    cuts: dict[str, set[tuple[int, int]]] = {}

    def note(batch) -> None:
        for segment in batch.segments:
            if segment.start < segment.seq.num_prompt_tokens:
                key = f"{segment.seq.request.request_id}/{segment.seq.sample_index}"
                cuts.setdefault(key, set()).add((segment.start, segment.num_tokens))

    backend = FakeBackend(on_execute=note)
    engine = make_engine(
        name, backend=backend, chunk_tokens=8, share_prefixes=False, reservation="full"
    )
    rows = workload(5, 60)
    list(engine.run(rows))
    for req in rows:
        length = len(req.prompt_token_ids)
        want = {(start, min(8, length - start)) for start in range(0, length, 8)}
        for index in range(req.sampling.n):
            assert cuts[f"{req.request_id}/{index}"] == want
