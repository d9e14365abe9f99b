"""Rows that have not been read: each goes to the reader or back, once, in order."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flows.fleet.messages import Assign
from flows.fleet.part_queue import AllBut, PartQueue
from storage.shards import Shard


def part(index: int, ordinals: list[int]) -> Assign:
    return Assign(Shard(index, (), 0), np.array(ordinals, dtype=np.int64))


def rows(parts: list[Assign]) -> list[tuple[int, int]]:
    return [(item.shard.index, n) for item in parts for n in item.ordinals.tolist()]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 6)),
        st.tuples(st.just("take"), st.one_of(st.none(), st.integers(1, 4))),
        st.tuples(st.just("back"), st.integers(0, 9)),
    ),
    max_size=25,
)


@given(STEPS)
def test_it_does_as_a_plain_list_of_rows(steps) -> None:
    queue, model, num_shards = PartQueue(), list[tuple[int, int]](), 0
    for kind, size in steps:
        if kind == "submit":
            queue.submit(part(num_shards, list(range(0, 2 * size, 2))))
            model += [(num_shards, n) for n in range(0, 2 * size, 2)]
            num_shards += 1
        elif kind == "take" and model:
            taken = queue.take() if size is None else queue.take(lambda _, n=size: n)
            assert taken is not None
            assert taken.num_rows > 0
            of_first = [row for row in model if row[0] == model[0][0]][:size]
            assert rows([taken]) == of_first
            del model[: len(of_first)]
        elif kind == "back":
            given_back = queue.take_back(size)
            assert all(item.num_rows for item in given_back)
            wanted = model[len(model) - min(size, len(model)) :]
            assert sorted(rows(given_back)) == wanted
            del model[len(model) - len(wanted) :]
    queue.close()
    left: list[Assign] = []
    while (item := queue.take()) is not None:
        left.append(item)
    assert rows(left) == model


def test_drop_forgets_what_is_queued_and_lets_the_reader_go() -> None:
    queue = PartQueue()
    queue.submit(part(0, [1, 2]))
    queue.drop()
    assert queue.take() is None
    assert queue.take_back(5) == []


def test_a_reader_waits_for_a_part() -> None:
    queue, seen = PartQueue(), list[Assign | None]()
    reader = threading.Thread(target=lambda: seen.extend([queue.take(), queue.take()]))
    reader.start()
    reader.join(0.05)
    assert reader.is_alive()
    queue.submit(part(3, [8]))
    queue.close()
    reader.join(5)
    assert not reader.is_alive()
    assert rows([item for item in seen if item]) == [(3, 8)]
    assert seen[1] is None


def test_all_but_some() -> None:
    skip = AllBut(np.array([2, 5], dtype=np.int64))
    assert [n for n in range(8) if n not in skip] == [2, 5]
