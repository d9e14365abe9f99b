"""Cutting shards: every row once, about the target, the same after a trip through JSON."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.shards import Shard, TokenCost, cut_shards, shards_at
from storage.source import Dataset, InputFile, RowGroup

GROUPS = st.builds(
    lambda rows, per_row: RowGroup(rows, {"x": rows * per_row, "y": 10**9}),
    st.integers(0, 60),
    st.integers(0, 500),
)
FILES = st.lists(st.lists(GROUPS, max_size=4), max_size=4)
COST = st.builds(
    TokenCost,
    columns=st.just(("x", "not there")),
    tokens_per_byte=st.floats(0, 1),
    tokens_per_row=st.floats(0, 40),
)


def dataset_of(files: list[list[RowGroup]]) -> Dataset:
    made = tuple(
        InputFile(
            f"/{index}", str(index), sum(group.num_rows for group in groups), tuple(groups), {}, ""
        )
        for index, groups in enumerate(files)
    )
    return Dataset(made, pa.schema([]), sum(file.num_rows for file in made), "")


def rows_of(shard: Shard) -> Iterator[tuple[int, int, int, int]]:
    for span in shard.spans:
        for row in range(span.start, span.stop):
            yield span.file_index, span.row_group, row, span.first_row + row


def all_rows(dataset: Dataset) -> Iterator[tuple[int, int, int, int]]:
    for file_index, file in enumerate(dataset.files):
        in_file = 0
        for number, group in enumerate(file.row_groups):
            for row in range(group.num_rows):
                yield file_index, number, row, in_file
                in_file += 1


@given(files=FILES, cost=COST, target=st.integers(1, 5000), limit=st.none() | st.integers(0, 300))
def test_every_row_is_in_one_shard_in_input_order(
    files: list[list[RowGroup]], cost: TokenCost, target: int, limit: int | None
) -> None:
    dataset = dataset_of(files)
    shards = cut_shards(dataset, cost=cost, target_tokens=target, limit=limit)
    cut = [row for shard in shards for row in rows_of(shard)]
    assert cut == list(all_rows(dataset))[:limit]
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert all(span.start < span.stop for shard in shards for span in shard.spans)


@given(files=FILES, cost=COST, target=st.integers(1, 5000))
def test_shards_are_near_the_target(
    files: list[list[RowGroup]], cost: TokenCost, target: int
) -> None:
    """None is above it unless it is one row; each but the last would be, with the next row."""
    dataset = dataset_of(files)
    shards = cut_shards(dataset, cost=cost, target_tokens=target)

    def tokens(file: int, group: int) -> float:
        return cost.of(dataset.files[file].row_groups[group])

    for shard, following in zip(shards, [*shards[1:], None], strict=False):
        total = sum(tokens(file, group) for file, group, _, _ in rows_of(shard))
        assert shard.est_tokens == pytest.approx(total, abs=1, rel=1e-6)
        assert shard.num_rows == 1 or total <= target * (1 + 1e-9)
        if following is not None:
            file, group, _, _ = next(rows_of(following))
            assert total + tokens(file, group) > target * (1 - 1e-9)


@given(files=FILES, cost=COST, target=st.integers(1, 5000))
def test_c10_a_plan_survives_json(
    files: list[list[RowGroup]], cost: TokenCost, target: int
) -> None:
    shards = cut_shards(dataset_of(files), cost=cost, target_tokens=target)
    data = orjson.dumps([shard.to_json() for shard in shards])
    assert tuple(Shard.from_json(item) for item in orjson.loads(data)) == shards


def test_c06_one_row_group_is_cut_inside() -> None:
    dataset = dataset_of([[RowGroup(10, {"x": 1000})]])
    cost = TokenCost(columns=("x",), tokens_per_byte=0.25, tokens_per_row=5)
    shards = cut_shards(dataset, cost=cost, target_tokens=100)  # 30 tokens a row
    assert [(s.spans[0].start, s.spans[0].stop) for s in shards] == [
        (0, 3),
        (3, 6),
        (6, 9),
        (9, 10),
    ]
    assert [s.est_tokens for s in shards] == [90, 90, 90, 30]
    assert [s.name for s in shards][:2] == ["shard-00000", "shard-00001"]


def test_a_row_above_the_target_has_its_own_shard() -> None:
    dataset = dataset_of(
        [[RowGroup(1, {"x": 10}), RowGroup(1, {"x": 9999}), RowGroup(1, {"x": 1})]]
    )
    cost = TokenCost(columns=("x",), tokens_per_byte=1, tokens_per_row=0)
    shards = cut_shards(dataset, cost=cost, target_tokens=100)
    assert [s.est_tokens for s in shards] == [10, 9999, 1]


def test_rows_that_cost_next_to_nothing_are_one_shard() -> None:
    """The target divided by their cost is more than a float holds."""
    cost = TokenCost(columns=(), tokens_per_byte=0, tokens_per_row=5e-324)
    shards = cut_shards(dataset_of([[RowGroup(10, {})]]), cost=cost, target_tokens=10**6)
    assert [shard.num_rows for shard in shards] == [10]


@pytest.mark.parametrize("least", [0.0, 5e-324])
def test_a_row_above_the_target_is_alone_even_before_rows_that_cost_nothing(least: float) -> None:
    cost = TokenCost(columns=("x",), tokens_per_byte=1, tokens_per_row=least)
    dataset = dataset_of([[RowGroup(1, {"x": 99}), RowGroup(3, {"x": 0})]])
    shards = cut_shards(dataset, cost=cost, target_tokens=10)
    assert [shard.num_rows for shard in shards] == [1, 3]


def test_a_dataset_without_rows_has_no_shards() -> None:
    cost = TokenCost(columns=(), tokens_per_byte=0, tokens_per_row=1)
    assert cut_shards(dataset_of([[], [RowGroup(0, {})]]), cost=cost, target_tokens=10) == ()


@given(files=FILES, cost=COST, data=st.data())
def test_shards_end_where_they_are_told(
    files: list[list[RowGroup]], cost: TokenCost, data: st.DataObject
) -> None:
    dataset = dataset_of(files)
    rows = list(all_rows(dataset))
    stops = sorted(data.draw(st.sets(st.integers(1, max(1, len(rows))), max_size=5)))
    if not rows:
        stops = []
    shards = shards_at(dataset, stops, cost=cost)
    assert [shard.index for shard in shards] == list(range(len(stops)))
    for shard, start, stop in zip(shards, [0, *stops], stops, strict=False):
        assert list(rows_of(shard)) == rows[start:stop]


def test_shards_that_cannot_end_there_are_named() -> None:
    dataset = dataset_of([[RowGroup(3, {"x": 3})]])
    cost = TokenCost(columns=(), tokens_per_byte=0.0, tokens_per_row=1.0)
    with pytest.raises(ValueError, match="shard 1 would end at row 2, and start at 2"):
        shards_at(dataset, [2, 2], cost=cost)
    with pytest.raises(ValueError, match="2 rows less"):
        shards_at(dataset, [1, 5], cost=cost)
