"""Rows that go from one engine to another, in whatever state: each ends once, with the tokens that
it would have had at home.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from schedulers.policies import POLICIES, make_policy
from tests.unit.workers.harness import Suspending, check_idle, make_engine, request, texts, workload
from tests.unit.workers.tiny_models import make_tiny_model
from workers.backends.fake import FakeBackend
from workers.backends.torch_backend import TorchBackend
from workers.engine import Engine
from workers.errors import BackendError
from workers.loading.files import resolve_model
from workers.request import (
    KVState,
    Request,
    RequestId,
    Result,
    Resume,
    SamplingParams,
    StepRecord,
)


def hand_over(
    first: Engine, second: Engine, rows: list[Request], *, seed: int, kv: float
) -> tuple[dict[str, list], int]:
    """Give random rows away again and again while the first engine runs; the second does them.

    Returns the tokens by row, and how many rows came with keys and values.
    """
    rng = random.Random(seed)
    results: list[Result] = []
    given: list[Request] = []
    source = iter(rows)
    while True:
        results.extend(_run_a_while(first, source, rng.randint(1, 12)))
        open_ids = [seq.request.request_id for seq in first.open_sequences()]
        if not open_ids:
            break
        chosen = rng.sample(open_ids, rng.randint(1, len(open_ids)))
        given += first.take_out(chosen, with_kv=lambda _: rng.random() < kv)
        first.blocks.check_integrity()
    check_idle(first)
    results.extend(second.run(given))
    check_idle(second)
    assert len(results) == len(rows)
    with_kv = sum(row.resume is not None and row.resume.kv is not None for row in given)
    return texts(results), with_kv


def _run_a_while(engine: Engine, source, num_steps: int) -> list[Result]:
    """Some steps, by hand, so that the rows that are open afterwards stay open."""
    for row in source:
        engine._arrive(row)
    for _ in range(num_steps):
        if engine._loop.has_work:
            engine.step()
    return engine._rows.drain()


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("kv", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_rows_end_once_with_their_own_tokens(policy: str, kv: float, seed: int) -> None:
    rows = workload(seed, 60)
    want = texts(make_engine(policy).run(rows))
    first = make_engine(Suspending(make_policy(policy), seed=seed, chance=0.2))
    got, with_kv = hand_over(first, make_engine(policy), rows, seed=seed, kv=kv)
    assert got == want
    assert (with_kv > 0) == (kv > 0)


def test_without_room_keys_and_values_are_left_and_computed_again() -> None:
    rows = [request(i, [1 + i, 2, 3] * 4, max_tokens=20) for i in range(12)]
    want = texts(make_engine().run(rows))
    got, with_kv = hand_over(
        make_engine(), make_engine(max_seqs=2, num_blocks=18), rows, seed=1, kv=1.0
    )
    assert got == want
    assert with_kv > 2


def test_where_memory_is_reserved_to_the_end_keys_do_not_come_past_the_policy() -> None:
    """They would take blocks that others have been promised."""
    rows = [request(i, [1 + i, 2, 3] * 4, max_tokens=20) for i in range(12)]
    want = texts(make_engine().run(rows))
    steps: list[StepRecord] = []
    full = make_engine(reservation="full", max_seqs=8, num_blocks=24, on_step=steps.append)
    got, with_kv = hand_over(make_engine(), full, rows, seed=1, kv=1.0)
    assert got == want
    assert with_kv > 2
    assert sum(step.num_suspended for step in steps) == 0


def test_several_samples_begin_anew_and_cannot_be_resumed() -> None:
    rows = [request(i, max_tokens=6, n=3) for i in range(4)]
    want = texts(make_engine().run(rows))
    got, with_kv = hand_over(make_engine(), make_engine(), rows, seed=2, kv=1.0)
    assert got == want
    assert not with_kv
    with pytest.raises(ValueError, match="has 3 samples; only one can be resumed"):
        replace(rows[0], resume=Resume((1,)))


def test_ids_that_are_not_open_are_left_out() -> None:
    engine = make_engine()
    assert engine.take_out([RequestId("nobody")], with_kv=lambda _: True) == []


# -- a real model --


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("handover"), vocab_size=320)


def real_engine(folder, dtype: str) -> Engine:
    backend = TorchBackend.load(resolve_model(str(folder)), device="cpu", dtype=dtype)
    return make_engine(
        backend=backend, block_size=16, num_blocks=120, max_batch_tokens=64, max_seqs=8
    )


def real_rows(**sampling) -> list[Request]:
    rng = random.Random(0)
    return [
        Request(
            request_id=RequestId(str(index)),
            prompt_token_ids=[rng.randrange(3, 300) for _ in range(rng.randint(3, 60))],
            sampling=SamplingParams(max_tokens=rng.randint(4, 24), ignore_eos=True, **sampling),
        )
        for index in range(12)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}],
    ids=["greedy", "drawn", "penalties"],
)
def test_a_real_model_goes_on_where_another_engine_stopped(folder, dtype, sampling) -> None:
    rows = real_rows(**sampling)
    want = texts(real_engine(folder, dtype).run(rows))
    got, with_kv = hand_over(
        real_engine(folder, dtype), real_engine(folder, dtype), rows, seed=5, kv=1.0
    )
    assert got == want
    assert with_kv


def test_log_probabilities_travel(folder) -> None:
    rows = real_rows(logprobs=2)
    alone = {r.request_id: r.completions for r in real_engine(folder, "float32").run(rows)}
    first, second = real_engine(folder, "float32"), real_engine(folder, "float32")
    for row in rows:
        first._arrive(row)
    for _ in range(6):
        first.step()
    early = first._rows.drain()
    ids = [seq.request.request_id for seq in first.open_sequences()]
    given = first.take_out(ids, with_kv=lambda _: True)
    for result in [*early, *second.run(given)]:
        (completion,), (want,) = result.completions, alone[result.request_id]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert [item.token_id for item in completion.logprobs] == list(want.token_ids)
        pairs = zip(completion.logprobs, want.logprobs, strict=True)
        assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


def test_keys_of_another_model_are_refused(folder, tmp_path) -> None:
    other = make_tiny_model("qwen3", tmp_path, vocab_size=320, head_dim=64)
    data = real_engine(other, "float32").backend.read_kv([0])
    with pytest.raises(BackendError, match="of another model"):
        real_engine(folder, "float32").backend.write_kv([0], data)


def test_a_shared_prefix_is_not_written_twice() -> None:
    """What the receiver knows already stays as it is; the rest comes with the row."""
    prompt = [5] * 12
    first, second = make_engine(), make_engine()
    list(second.run([request("known", prompt, max_tokens=2)]))
    first._arrive(request("row", prompt, max_tokens=10))
    for _ in range(4):
        first.step()
    (given,) = first.take_out([RequestId("row")], with_kv=lambda _: True)
    assert given.resume is not None
    assert isinstance(given.resume.kv, KVState)
    second._arrive(given)
    (seq,) = second.open_sequences()
    assert seq.num_computed_tokens == given.resume.kv.num_tokens
    second.blocks.check_integrity()
    assert isinstance(second.backend, FakeBackend)
    assert texts(second.run([])) == texts(
        make_engine().run([request("row", prompt, max_tokens=10)])
    )
