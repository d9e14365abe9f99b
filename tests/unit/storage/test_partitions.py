"""Finding partitions and planning shards of them, against brute force."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import InputError, LedgerError
from storage.objects import ObjectStore
from storage.partitions import PartitionPlan, find_partitions, plan_partitions
from storage.rows import RowReader
from storage.shards import TokenCost
from storage.source import Dataset, open_dataset
from tests.unit.storage.outputs import write_input

COST = TokenCost(columns=(), tokens_per_byte=0.0, tokens_per_row=1.0)
KEYS = st.lists(
    st.tuples(st.sampled_from(["a", "b", None, ""]), st.sampled_from([0.0, -0.0, None, 2.5])),
    min_size=1,
    max_size=25,
)


def dataset_of(folder: Path, rows: list[tuple[Any, ...]], group: int) -> Dataset:
    """Two files of row groups of this size."""
    half = len(rows) // 2
    for number, held in enumerate([rows[:half], rows[half:]]):
        table = pa.table(
            {
                "s": pa.array([row[0] for row in held], pa.string()),
                "f": pa.array([row[1] for row in held], pa.float64()),
                "n": np.arange(len(held)) + number * half,
            }
        )
        write_input(folder / f"{number}.parquet", table, row_group_size=group)
    return open_dataset(str(folder))


def runs_of(rows: list[tuple[Any, ...]]) -> list[tuple[Any, int]]:
    return [(key, len(list(held))) for key, held in groupby(rows)]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
@given(rows=KEYS, group=st.integers(1, 9), limit=st.none() | st.integers(1, 30))
def test_runs_of_keys_are_found_and_whether_they_are_grouped(
    rows: list[tuple[Any, ...]],
    group: int,
    limit: int | None,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("storage.partitions.READ_ROWS", 4)
    dataset = dataset_of(tmp_path_factory.mktemp("in"), rows, group)
    expected = runs_of(rows[:limit])
    found = find_partitions(dataset, ["s", "f"], limit=limit)
    assert found.grouped == (len({key for key, _ in expected}) == len(expected))
    if found.grouped:
        keys = zip(*(found.keys.column(name).to_pylist() for name in ("s", "f")), strict=True)
        assert list(zip(keys, found.num_rows.tolist(), strict=True)) == expected
        assert len(set(found.folders.to_pylist())) == len(found) == len(expected)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(data=st.data(), group=st.integers(1, 9))
def test_shards_of_partitions_have_their_rows(
    data: Any, group: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    rows = [(f"k{n}", None) for n, size in enumerate(sizes) for _ in range(size)]
    dataset = dataset_of(tmp_path_factory.mktemp("in"), rows, group)
    found = find_partitions(dataset, ["s"])
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1)))) if len(sizes) > 1 else []
    bounds = list(zip([0, *cuts], [*cuts, len(sizes)], strict=True))
    planned = plan_partitions(dataset, found, bounds, cost=COST)
    store = ObjectStore(str(tmp_path_factory.mktemp("out")))
    planned.partitions.write(store)
    plan = PartitionPlan.read(store)
    plan.check(planned.shards)
    reader = RowReader(dataset, ("s", "n"))
    position = 0
    for shard, (first, stop) in zip(planned.shards, bounds, strict=True):
        mine = plan.of(shard.index)
        assert mine.folders == [f"s=k{n}" for n in range(first, stop)]
        assert mine.num_rows.tolist() == sizes[first:stop]
        assert mine.files("results")[0] == f"results/s=k{first}/part-00000.parquet"
        held = [row.values["n"] for batch in reader.rows(shard) for row in batch]
        assert held == list(range(position, position + sum(sizes[first:stop])))
        assert shard.est_tokens == len(held)
        position += len(held)
    assert position == len(rows)


def test_bounds_that_leave_partitions_out_are_refused(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [("a", None), ("b", None), ("c", None)], 5)
    found = find_partitions(dataset, ["s"])
    for bounds in ([(0, 2)], [(0, 1), (2, 3)], [(0, 2), (1, 3)], []):
        with pytest.raises(ValueError, match="3 partitions once"):
            plan_partitions(dataset, found, bounds, cost=COST)


def test_a_plan_that_is_not_of_the_shards_is_named(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [("a", None), ("b", None), ("b", None)], 5)
    found = find_partitions(dataset, ["s"])
    planned = plan_partitions(dataset, found, [(0, 1), (1, 2)], cost=COST)
    shards = plan_partitions(dataset, found, [(0, 2)], cost=COST).shards
    with pytest.raises(LedgerError, match="partitions of shard-00000 have 3 rows, and it has 1"):
        plan_partitions(dataset, found, [(0, 2)], cost=COST).partitions.check(planned.shards[:1])
    planned.partitions.check(planned.shards)
    assert len(shards) == 1


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [("a", None), ("b", None)], 5)
    with pytest.raises(InputError, match="by 'gone', but it has s, f, n"):
        find_partitions(dataset, ["gone"])


def test_keys_may_be_the_folders_of_the_input(tmp_path: Path) -> None:
    for key in ("k=a%2Fb", "k=__HIVE_DEFAULT_PARTITION__", "k=z"):
        write_input(tmp_path / key / "0.parquet", {"n": [1, 2]})
        write_input(tmp_path / key / "1.parquet", {"n": [3]})
    found = find_partitions(open_dataset(str(tmp_path)), ["k"])
    assert found.grouped and found.num_rows.tolist() == [3, 3, 3]
    assert sorted(found.folders.to_pylist()) == [
        "k=__HIVE_DEFAULT_PARTITION__", "k=a%2Fb", "k=z",
    ]  # fmt: skip
