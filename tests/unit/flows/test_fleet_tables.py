"""The coordinator's tables: who has which row, and which rows are to blame."""

from __future__ import annotations

import random

import numpy as np
import pytest

from flows.errors import SpecError
from flows.fleet.health import MAX_FAILURES, Failures, Suspects
from flows.fleet.messages import Assign
from flows.fleet.ownership import ANSWERED, NOBODY, RowOwners
from flows.fleet.places import places
from storage.shards import Shard, Span


def shard(index: int, num_rows: int) -> Shard:
    return Shard(index, (Span(0, 0, 0, num_rows, 0),), 10 * num_rows)


@pytest.mark.parametrize("seed", range(20))
def test_rows_have_one_owner_at_a_time(seed: int) -> None:
    """Against a dictionary."""
    rng = random.Random(seed)
    owners, model = RowOwners(), {}
    for index in range(4):
        num_rows = rng.randint(1, 30)
        missing = sorted(rng.sample(range(num_rows), rng.randint(0, num_rows)))
        part = owners.open(shard(index, num_rows), np.array(missing, dtype=np.int64))
        assert part.num_rows == len(missing)
        model |= {(index, ordinal): NOBODY for ordinal in missing}
    while model:
        keys = sorted(rng.sample(sorted(model), rng.randint(1, len(model))))
        if rng.random() < 0.5:
            worker = rng.choice([NOBODY, 0, 1, 2])
            for part in owners.parts(keys):
                owners.give(part, worker)
            model |= dict.fromkeys(keys, worker)
        else:
            for part in owners.parts(keys) if rng.random() < 0.5 else ():
                index, ordinals = part.shard.index, part.ordinals
                for worker in range(3):
                    own = [model[index, n] == worker for n in ordinals.tolist()]
                    assert owners.owned(index, ordinals, worker).tolist() == own
                owners.answer_all(index, ordinals)
            for key in keys:
                if owners.owner(key) != ANSWERED:
                    owners.answer(key)
                del model[key]
                assert owners.owner(key) == ANSWERED
        owners.check_integrity(3)
        for worker in range(3):
            held = [(p.shard.index, n) for p in owners.rows_of(worker) for n in p.ordinals.tolist()]
            assert held == sorted(key for key, owner in model.items() if owner == worker)
            assert owners.num_rows(worker) == len(held)
        assert all(owners.owner(key) == owner for key, owner in model.items())
    assert len(owners) == 0


def test_an_answered_row_is_neither_given_nor_answered_again() -> None:
    owners = RowOwners()
    whole = owners.open(shard(0, 2), np.arange(2))
    owners.answer((0, 0))
    with pytest.raises(ValueError, match="1 rows of shard-00000 are answered already"):
        owners.give(whole, 1)
    with pytest.raises(ValueError, match="row 0 of shard-00000 is answered already"):
        owners.answer((0, 0))
    owners.give(Assign(whole.shard, np.array([1])), 1)
    assert owners.num_rows(1) == 1


@pytest.mark.parametrize("seed", range(30))
def test_rows_that_kill_are_found_and_no_others(seed: int) -> None:
    """A worker that dies whenever it computes a killer; what it has finished before stays done."""
    rng = random.Random(seed)
    rows = [(rng.randrange(3), n) for n in range(rng.randint(1, 120))]
    killers = set(rng.sample(rows, min(len(rows), rng.randint(1, 3))))
    suspects, open_rows, condemned, deaths = Suspects(), set(rows), set(), 0

    def run(batch: list) -> list | None:
        """What is left of it when the worker dies; None when all is done."""
        rng.shuffle(batch)
        for at, row in enumerate(batch):
            if row in killers and row not in condemned:
                return batch[at:]
            open_rows.discard(row)
            suspects.note_answers({row})
        return None

    waiting = list(rows)
    while open_rows:
        assert deaths < 8 * len(killers) + 2 * len(killers)
        if suspects.cells:
            left = run(list(suspects.cells.popleft()))
            if left is not None:
                deaths += 1
                culprit = suspects.note_cell_death(tuple(left))
                if culprit is not None:
                    condemned.add(culprit)
                    open_rows.discard(culprit)
            continue
        left = run(waiting)
        waiting = []
        if left is not None:
            deaths += 1
            waiting = suspects.note_death(left)
    assert condemned == killers


def test_a_worker_comes_back_later_and_later_and_then_not() -> None:
    failures = Failures()
    delays = [failures.note_death() for _ in range(MAX_FAILURES)]
    assert delays == [1.0, 2.0, 4.0, 8.0, None]
    failures.note_progress()
    assert failures.note_death() == 1.0


def test_places_share_the_machine_out(monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-b,7")
    found = places(3, "auto")
    assert [place.cores for place in found] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [place.environ["OMP_NUM_THREADS"] for place in found] == ["2", "3", "3"]
    assert [place.environ["CUDA_VISIBLE_DEVICES"] for place in found] == ["4", "GPU-b", "7"]
    assert "CUDA_VISIBLE_DEVICES" not in places(1, "cpu")[0].environ
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert places(1, "cpu")[0].environ["OMP_NUM_THREADS"] == "1"


def test_c31_more_workers_than_devices_is_refused_and_than_cores_is_said(
    monkeypatch, caplog
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SpecError, match="workers is 3, but there are 2 GPUs here"):
        places(3, "auto")
    assert places(20, "cpu")[0].cores is None
    assert "20 workers share 8 cores" in caplog.text
