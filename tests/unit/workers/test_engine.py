"""The engine over the fake backend: every row ends in exactly one result, whatever happens on the
way.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schedulers.policies import POLICIES
from schedulers.view import Budget, Outcome, Plan, View
from tests.unit.workers.harness import (
    Clock,
    check_idle,
    make_engine,
    request,
    texts,
    workload,
)
from workers.backends.fake import FakeBackend, FakeFaults
from workers.errors import BackendError, InternalError
from workers.intake import IterableSource
from workers.request import Request

pytestmark = pytest.mark.parametrize("policy", list(POLICIES))


def constant(token_id: int):
    return lambda *_: token_id


def test_lengths_and_finish_reasons(policy: str) -> None:
    backend = FakeBackend(script=lambda row, _, position: 0 if position == int(row) else 5)
    engine = make_engine(policy, backend=backend)
    results = {r.request_id: r for r in engine.run([request(i, max_tokens=4) for i in range(8)])}
    for row in range(8):
        (completion,) = results[str(row)].completions
        assert completion.finish_reason == ("stop" if row < 4 else "length")
        assert len(completion.token_ids) == min(row + 1, 4)
    check_idle(engine)


def test_min_tokens_and_ignore_eos_and_stop_ids(policy: str) -> None:
    engine = make_engine(policy, backend=FakeBackend(script=constant(0)))
    rows = [
        request("plain"),
        request("min", min_tokens=3),
        request("ignore", ignore_eos=True),
        request("own", ignore_eos=True, stop_token_ids=(0,), min_tokens=2),
    ]
    lengths = {k: len(v[0]) for k, v in texts(engine.run(rows)).items()}
    assert lengths == {"plain": 1, "min": 3, "ignore": 8, "own": 2}


def test_a_completion_ends_at_the_models_length(policy: str) -> None:
    engine = make_engine(policy, backend=FakeBackend(script=constant(1), max_model_len=10))
    (result,) = engine.run([request(0, [1] * 7, max_tokens=50)])
    assert len(result.completions[0].token_ids) == 3
    assert result.completions[0].finish_reason == "length"


def test_c08_identical_rows_are_counted_by_id_not_by_content(policy: str) -> None:
    engine = make_engine(policy)
    results = list(engine.run([request(f"row{i}", [1, 2, 3]) for i in range(3)]))
    assert {r.request_id for r in results} == {"row0", "row1", "row2"}


def test_c15_over_long_rows_are_error_rows_and_the_rest_goes_on(policy: str) -> None:
    engine = make_engine(policy, backend=FakeBackend(max_model_len=30))
    rows = [request(i, [1] * (31 if i == 500 else 5), max_tokens=3) for i in range(1000)]
    results = list(engine.run(rows))
    assert len(results) == 1000
    (bad,) = [r for r in results if r.error]
    assert (bad.request_id, bad.error.type) == ("500", "prompt_too_long")
    assert "31 tokens" in bad.error.message
    assert "30" in bad.error.message


def test_c16_one_result_per_request_even_for_refused_ones(policy: str) -> None:
    engine = make_engine(policy, backend=FakeBackend(max_model_len=16), num_blocks=4)
    rows = workload(0, 100)
    results = list(engine.run(rows))
    assert sorted(r.request_id for r in results) == sorted(r.request_id for r in rows)
    assert {r.error.type for r in results if r.error} >= {"prompt_too_long"}


def test_a_row_that_can_never_fit_in_kv_memory_is_refused_at_once(policy: str) -> None:
    engine = make_engine(policy, num_blocks=4)
    results = {
        r.request_id: r for r in engine.run([request(0, [1] * 10, max_tokens=7), request(1)])
    }
    assert results["0"].error is not None
    assert results["0"].error.type == "exceeds_kv_memory"
    assert results["1"].error is None


def test_samples_of_a_row_share_its_prompt_blocks(policy: str) -> None:
    backend = FakeBackend(script=lambda _, sample, __: sample + 1)
    engine = make_engine(policy, backend=backend)
    (result,) = engine.run([request(0, range(1, 18), max_tokens=2, n=4)])
    assert [c.token_ids for c in result.completions] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    # 17 prompt tokens once, one each for the three others (16 are shared), one decode for each.
    assert backend.num_computed_tokens == 17 + 3 + 4
    check_idle(engine)


def test_equal_prefixes_are_computed_once(policy: str) -> None:
    backend = FakeBackend()
    engine = make_engine(policy, backend=backend, max_seqs=1)
    prefix = list(range(1, 17))
    results = list(engine.run([request(i, [*prefix, i], max_tokens=1) for i in range(1, 6)]))
    assert sum(r.num_cached_tokens for r in results) == 4 * 16
    assert backend.num_computed_tokens == 17 + 4


def test_c27_c28_no_more_is_taken_in_than_the_window(policy: str) -> None:
    taken = 0
    finished = 0

    def rows() -> Iterator[Request]:
        nonlocal taken
        for i in range(5000):
            taken += 1
            yield request(i, max_tokens=2)

    engine = make_engine(policy, window=10, max_seqs=4)
    peak = 0
    for _ in engine.run(rows()):
        finished += 1
        peak = max(peak, taken - finished)
    assert finished == 5000
    assert peak <= 10 + 4 + 4  # window, holders, and the results of one step


def test_c29_the_first_result_does_not_wait_for_the_input(policy: str) -> None:
    taken = 0

    def rows() -> Iterator[Request]:
        nonlocal taken
        for i in range(100_000):
            taken += 1
            yield request(i, max_tokens=1)

    engine = make_engine(policy, window=10)
    next(iter(engine.run(rows())))
    assert taken <= 10


def test_c30_no_batch_barrier(policy: str) -> None:
    """Until the input ends, the engine is kept full: no wait for the slowest of a batch."""
    steps = []
    engine = make_engine(policy, max_seqs=8, num_blocks=400, on_step=steps.append)
    rows = [request(i, max_tokens=40 if i % 8 == 0 else 4, ignore_eos=True) for i in range(200)]
    list(engine.run(rows))
    decodes = [step.num_decode_tokens for step in steps if step.num_decode_tokens]
    until = max(i for i, step in enumerate(steps) if step.num_waiting)
    busy = [s.num_decode_tokens for s in steps[:until] if s.num_decode_tokens]
    assert sum(busy) / len(busy) >= 0.8 * 8
    assert max(decodes) == 8


def test_c34_a_row_that_does_not_end_is_freed(policy: str) -> None:
    clock = Clock()

    def tick(_: object) -> None:
        clock.now_s += 1.0

    backend = FakeBackend(script=lambda row, *_: 5 if row == "endless" else 0, on_execute=tick)
    engine = make_engine(
        policy, backend=backend, clock=clock, row_timeout_s=50.0, num_blocks=400, max_seqs=4
    )
    rows = [request(i) for i in range(30)]
    rows.insert(3, request("endless", max_tokens=1000))
    results = {r.request_id: r for r in engine.run(rows)}
    assert len(results) == 31
    assert results["endless"].error is not None
    assert results["endless"].error.type == "timeout"
    assert "50 s" in results["endless"].error.message
    assert sum(r.error is not None for r in results.values()) == 1
    check_idle(engine)


def test_c35_fifty_runs_on_one_engine(policy: str) -> None:
    engine = make_engine(policy)
    for seed in range(50):
        results = list(engine.run(workload(seed, 10)))
        assert len(results) == 10
        check_idle(engine)


def test_out_of_memory_shrinks_the_batch_and_goes_on(policy: str) -> None:
    healthy = texts(make_engine(policy, max_batch_tokens=64, num_blocks=400).run(workload(1, 80)))
    backend = FakeBackend(faults=FakeFaults(max_batch_tokens=5))
    engine = make_engine(policy, backend=backend, max_batch_tokens=64, num_blocks=400)
    assert texts(engine.run(workload(1, 80))) == healthy
    check_idle(engine)


def test_a_row_that_never_fits_the_device_is_the_only_one_lost(policy: str) -> None:
    backend = FakeBackend(faults=FakeFaults(oom_request_ids=frozenset({"7"})))
    engine = make_engine(policy, backend=backend, num_blocks=400)
    results = {r.request_id: r for r in engine.run([request(i, n=2) for i in range(20)])}
    assert {k for k, r in results.items() if r.error} == {"7"}
    assert results["7"].error is not None
    assert results["7"].error.type == "out_of_memory"
    check_idle(engine)


def test_rows_with_broken_logits_are_error_rows(policy: str) -> None:
    backend = FakeBackend(faults=FakeFaults(nan_request_ids=frozenset({"3"})))
    engine = make_engine(policy, backend=backend)
    results = {r.request_id: r for r in engine.run([request(i, n=2) for i in range(6)])}
    assert {k: r.error.type for k, r in results.items() if r.error} == {"3": "numerical_error"}
    check_idle(engine)


def test_a_broken_device_ends_the_run(policy: str) -> None:
    engine = make_engine(policy, backend=FakeBackend(faults=FakeFaults(fail_at_step=3)))
    with pytest.raises(BackendError, match="step 3"):
        list(engine.run(workload(0, 50)))


def test_stop_gives_back_what_is_in_flight_and_the_engine_can_run_again(policy: str) -> None:
    engine = make_engine(policy)
    done = []
    for result in engine.run(workload(0, 100)):
        done.append(result)
        if len(done) == 5:
            engine.stop()
    assert 5 <= len(done) < 100
    check_idle(engine)
    assert len(list(engine.run(workload(0, 100)))) == 100


def test_sequences_take_memory_only_while_they_run(policy: str) -> None:
    backend = FakeBackend()
    engine = make_engine(policy, backend=backend)
    list(engine.run(request(i) for i in range(500)))
    assert backend.forgotten == 500


def test_step_records_add_up(policy: str) -> None:
    steps = []
    backend = FakeBackend()
    engine = make_engine(policy, backend=backend, on_step=steps.append)
    rows = workload(6, 50)
    results = list(engine.run(IterableSource(rows)))
    computed = sum(s.num_prefill_tokens + s.num_decode_tokens for s in steps)
    assert computed == backend.num_computed_tokens
    assert [s.step for s in steps] == list(range(1, len(steps) + 1))
    samples = sum(len(r.completions) for r in results)
    assert sum(s.num_finished for s in steps) == samples


@pytest.mark.parametrize("max_batch_tokens", [16, 64, 400])
def test_a_prefix_that_many_begin_with_is_computed_once(policy: str, max_batch_tokens: int) -> None:
    """All rows arrive at once: who needs what is being computed waits a step and shares it."""
    backend = FakeBackend()
    engine = make_engine(policy, backend=backend, num_blocks=400, max_batch_tokens=max_batch_tokens)
    prefixes = [range(group * 100, group * 100 + 40) for group in (1, 2)]
    rows = [request(i, [*prefixes[i % 2], 900 + i, 950 + i], max_tokens=3) for i in range(16)]
    results = list(engine.run(rows))
    assert sorted(result.num_cached_tokens for result in results) == [0] * 2 + [40] * 14
    decoded = sum(len(result.completions[0].token_ids) - 1 for result in results)
    assert backend.num_computed_tokens == 2 * 42 + 14 * 2 + decoded


class Lazy:
    """A policy with a bug: it plans nothing."""

    name = "lazy"

    def plan(self, view: View, budget: Budget) -> Plan:
        return Plan("idle", reason="tired")

    def observe(self, outcome: Outcome) -> None: ...


def test_a_policy_that_plans_nothing_is_named_with_the_story(policy: str) -> None:
    del policy
    with pytest.raises(
        InternalError, match=r"'lazy' planned nothing \('tired'\) with 0 running, 1"
    ):
        list(make_engine(Lazy()).run([request(0)]))
