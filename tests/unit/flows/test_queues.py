"""The way to the collector is bounded by weight: a block waits alone."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pytest

from flows.collector import QUEUE_ITEMS, FromWorker, Item, Note, item_weight
from flows.fleet.messages import Block, Rows, Steps
from flows.queues import Outbox, Stopped

BLOCK = FromWorker("", Block(0, np.arange(1), pa.table({"row_id": ["a"]})))
SMALL: list[Item] = [
    FromWorker("", Rows(())), FromWorker("", Steps(())), FromWorker("", ()), Note("moves", {}),
]  # fmt: skip


def outbox() -> Outbox[Item]:
    return Outbox(QUEUE_ITEMS, weigh=item_weight)


def putting(box: Outbox[Item], item: Item) -> threading.Thread:
    """A thread that puts an item, and has had the time to do it."""

    def body() -> None:
        try:
            box.put([item])
        except Stopped:
            stopped.append(True)

    stopped: list[bool] = []
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(0.05)
    return thread


@pytest.mark.parametrize("item", [BLOCK, *SMALL])
def test_nothing_follows_a_block_before_it_is_taken(item: Item) -> None:
    box = outbox()
    box.put([BLOCK])
    waiting = putting(box, item)
    assert waiting.is_alive()
    assert box.take(timeout_s=0) == [BLOCK]
    waiting.join(5)
    assert not waiting.is_alive()
    assert box.take(timeout_s=0) == [item]


def test_small_items_fill_the_queue_one_by_one() -> None:
    box = outbox()
    for n in range(QUEUE_ITEMS):
        box.put([SMALL[n % len(SMALL)]])
    waiting = putting(box, SMALL[0])
    assert waiting.is_alive()
    assert len(box.take(timeout_s=0)) == QUEUE_ITEMS
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_block_may_follow_small_items_but_no_other_block() -> None:
    box = outbox()
    box.put(SMALL[:1])
    box.put([BLOCK])  # room is looked for before an item, so one that is large always gets in
    waiting = putting(box, BLOCK)
    assert waiting.is_alive()
    assert box.take(timeout_s=0) == [SMALL[0], BLOCK]
    waiting.join(5)
    assert box.take(timeout_s=0) == [BLOCK]


def test_taking_gives_all_the_weight_back() -> None:
    box = outbox()
    for _ in range(5):
        box.put([BLOCK])
        box.take(timeout_s=0)
    assert not putting(box, BLOCK).is_alive()


def test_who_waits_for_room_is_let_go_when_the_run_ends() -> None:
    box = outbox()
    box.put([BLOCK])
    waiting = putting(box, BLOCK)
    assert waiting.is_alive()
    box.stop()
    waiting.join(5)
    assert not waiting.is_alive()
    assert len(box) == 1
    with pytest.raises(Stopped):
        box.put([BLOCK])
