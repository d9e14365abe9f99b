"""Packing and the executor: every text gets its own vector, whatever is cut, halved or stopped."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.backends.fake_encoder import FakeEncodeFaults, FakeEncoder
from workers.encoding import RECOVER_AFTER, Encoder, EncodeStep, PackedTexts
from workers.errors import BackendError

texts_lists = st.lists(st.lists(st.integers(0, 99), max_size=12), max_size=20)


def ticking():
    """A clock that counts its readings."""
    readings = iter(range(10**9))
    return lambda: float(next(readings))


def encoder(backend: FakeEncoder, most: int = 16, **options) -> Encoder:
    return Encoder(backend, max_batch_tokens=most, clock=ticking(), **options)


def lists_of(texts: PackedTexts) -> list[list[int]]:
    return [run.tolist() for run in np.split(texts.token_ids_T, texts.ends_N[:-1])][: len(texts)]


@given(texts_lists, st.data())
def test_packing_taking_and_slicing(lists, data) -> None:
    first = [data.draw(st.integers(0, 5)) for _ in lists]
    texts = PackedTexts.from_lists(lists, first=first)
    assert texts.token_ids_T.dtype == np.int32 and texts.ends_N.dtype == np.int64
    assert lists_of(texts) == lists and len(texts) == len(lists)
    assert texts.lengths_N.tolist() == [len(ids) for ids in lists]
    assert texts.num_tokens == sum(map(len, lists))
    want = [max(0, len(ids) - max(1, start)) for ids, start in zip(lists, first, strict=True)]
    assert texts.num_scored_N.tolist() == want
    chosen = data.draw(st.lists(st.integers(0, len(lists) - 1))) if lists else []
    taken = texts.take(np.array(chosen, dtype=np.int64))
    assert lists_of(taken) == [lists[index] for index in chosen]
    assert taken.first_N is not None
    assert taken.first_N.tolist() == [first[index] for index in chosen]
    start = data.draw(st.integers(0, len(lists)))
    stop = data.draw(st.integers(start, len(lists)))
    assert lists_of(texts.slice(start, stop)) == lists[start:stop]
    parts = [texts.slice(0, start), texts.slice(start, stop), texts.slice(stop, len(lists))]
    assert lists_of(PackedTexts.concatenate(parts)) == lists


def test_nothing_packed() -> None:
    assert len(PackedTexts.concatenate([])) == 0
    assert PackedTexts.from_lists([]).num_tokens == 0
    encoded = encoder(FakeEncoder(3)).encode(PackedTexts.from_lists([]))
    assert encoded.vectors.shape == (0, 3)


@given(texts_lists, st.integers(1, 30), st.integers(1, 30))
def test_every_text_gets_its_vector(lists, most, device_most) -> None:
    backend = FakeEncoder(4, faults=FakeEncodeFaults(max_batch_tokens=device_most))
    steps: list[EncodeStep] = []
    encoded = encoder(backend, most, on_step=steps.append).encode(PackedTexts.from_lists(lists))
    assert encoded.done.all()
    assert encoded.vectors.dtype == np.float32 and encoded.vectors.flags.c_contiguous
    for index, ids in enumerate(lists):
        if not ids:
            assert encoded.faults[index] == "empty"
        elif len(ids) > device_most:
            assert encoded.faults[index] == "out_of_memory"
        else:
            assert index not in encoded.faults
            want = backend.vector(np.array(ids))
            np.testing.assert_array_equal(encoded.vectors[index], want)
    assert all(np.isnan(encoded.vectors[index]).all() for index in encoded.faults)
    assert sum(step.num_texts for step in steps) == len(lists) - len(encoded.faults)
    assert all(step.num_tokens <= most or step.num_texts == 1 for step in steps)
    assert all(step.elapsed_s > 0 for step in steps)


def test_micro_batches_are_long_texts_first_and_as_full_as_can_be() -> None:
    seen: list[list[int]] = []
    backend = FakeEncoder(2, on_execute=lambda texts: seen.append(texts.lengths_N.tolist()))
    lengths = [3, 9, 4, 4, 1, 12, 2, 30]
    encoder(backend, 12).encode(PackedTexts.from_lists([[7] * length for length in lengths]))
    assert seen == [[30], [12], [9], [4, 4, 3], [2, 1]]


def test_memory_that_does_not_suffice_lowers_the_limit_for_a_while() -> None:
    backend = FakeEncoder(2, faults=FakeEncodeFaults(max_batch_tokens=5))
    runner = encoder(backend, 16)
    runner.encode(PackedTexts.from_lists([[1, 2]] * 40))
    assert runner.limit_tokens <= 5
    backend._faults = FakeEncodeFaults()
    runner.encode(PackedTexts.from_lists([[1, 2]] * 8 * RECOVER_AFTER))
    assert runner.limit_tokens == 16


def test_a_text_that_never_fits_leaves_the_others_alone() -> None:
    backend = FakeEncoder(2, faults=FakeEncodeFaults(oom_token_ids=frozenset({13})))
    lists = [[1, 2, 3]] * 5 + [[4, 13, 6]] + [[7, 8]] * 5
    encoded = encoder(backend, 100).encode(PackedTexts.from_lists(lists))
    assert dict(encoded.faults) == {5: "out_of_memory"}


def test_a_vector_that_is_not_finite_is_reported() -> None:
    backend = FakeEncoder(2, faults=FakeEncodeFaults(nan_token_ids=frozenset({13})))
    encoded = encoder(backend).encode(PackedTexts.from_lists([[1], [13], [2]]))
    assert dict(encoded.faults) == {1: "not_finite"} and encoded.done.all()
    assert np.isnan(encoded.vectors[1]).all() and np.isfinite(encoded.vectors[[0, 2]]).all()


def test_the_score_of_nothing_is_nothing() -> None:
    encoded = encoder(FakeEncoder(1, task="score")).encode(PackedTexts.from_lists([[], [4]]))
    assert encoded.vectors[0, 0] == 0 and not encoded.faults


def test_a_call_that_is_stopped_says_what_it_did() -> None:
    backend = FakeEncoder(2)
    runner = encoder(backend, 4, should_stop=lambda: backend.num_calls == 3)
    encoded = runner.encode(PackedTexts.from_lists([[1, 2, 3, 4]] * 10))
    assert encoded.done.sum() == 3 and backend.num_texts == 3
    assert np.isnan(encoded.vectors[~encoded.done]).all()


def test_a_broken_device_ends_the_call() -> None:
    backend = FakeEncoder(2, faults=FakeEncodeFaults(fail_at_call=2))
    with pytest.raises(BackendError, match="call 2"):
        encoder(backend, 4).encode(PackedTexts.from_lists([[1, 2, 3, 4]] * 3))


def test_scripted_speed() -> None:
    slept: list[float] = []
    backend = FakeEncoder(2, call_s=1.0, text_s=0.1, token_s=0.01, sleep=slept.append)
    backend.execute(PackedTexts.from_lists([[1, 2], [3]]))
    assert slept == [pytest.approx(1.23)]


def test_fake_vectors_depend_on_the_ids_alone() -> None:
    rng = random.Random(0)
    lists = [[rng.randrange(50) for _ in range(rng.randrange(1, 9))] for _ in range(30)]
    vectors = FakeEncoder(3, task="classify").execute(PackedTexts.from_lists(lists))
    np.testing.assert_allclose(vectors.sum(axis=1), 1, rtol=1e-6)
    other = FakeEncoder(3, task="classify").execute(PackedTexts.from_lists(lists[::-1]))
    np.testing.assert_array_equal(vectors, other[::-1])
    assert len({row.tobytes() for row in vectors}) == len({tuple(ids) for ids in lists})


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens is 0"):
        encoder(FakeEncoder(1), 0)
