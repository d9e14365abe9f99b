"""The workloads of the throughput benchmark keep what their names promise."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import quantiles
from typing import Any

import pytest

from tests.bench.common import Item, mixed_items
from tests.bench.workloads import NAMES, SHARED, Source, make_workload, tail_lengths


class WordTokenizer:
    """A token per word, numbered in order of appearance."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        assert not add_special_tokens
        return [
            [self._ids.setdefault(word, len(self._ids)) for word in text.split()] for text in texts
        ]

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        return " ".join(["<system>", *(message["content"] for message in messages), "<answer>"])


def source(**how: Any) -> Source:
    return Source.of_sample(WordTokenizer(), **how)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def items_by_name() -> dict[str, tuple[Item, ...]]:
    return {name: make_workload(name, source()).items for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_workload(name: str, items_by_name: dict[str, tuple[Item, ...]]) -> None:
    assert make_workload(name, source()).items == items_by_name[name]
    if name != "tiny":  # the demo's rows are what they are
        assert make_workload(name, source(seed=1)).items != items_by_name[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_workload_is_smaller_but_tiny_is_not(
    name: str, items_by_name: dict[str, tuple[Item, ...]]
) -> None:
    quick = make_workload(name, source(quick=True)).items
    assert (len(quick) < len(items_by_name[name])) == (name != "tiny")


def test_mixed_is_the_workload_of_earlier_figures(
    items_by_name: dict[str, tuple[Item, ...]],
) -> None:
    made = source()
    assert items_by_name["mixed"] == tuple(mixed_items(made.stream, made.rng(), 200))


@pytest.mark.parametrize(
    ("name", "lengths"), [("decode_heavy", (64, 256)), ("prefill_heavy", (448, 16))]
)
def test_fixed_lengths(
    name: str, lengths: tuple[int, int], items_by_name: dict[str, tuple[Item, ...]]
) -> None:
    found = {(len(item.prompt_token_ids), item.num_output_tokens) for item in items_by_name[name]}
    assert found == {lengths}


@pytest.mark.parametrize("count", [400, 5000])
def test_the_tail_is_four_times_as_long_at_p99_as_at_p95(count: int) -> None:
    lengths = tail_lengths(count, 100_000)
    at_95, at_99 = lengths[int(0.95 * count)], lengths[int(0.99 * count)]
    assert 3 < at_99 / at_95 < 5
    assert lengths == sorted(lengths)
    assert min(lengths) >= 1


def test_a_few_rows_are_much_of_a_long_tail(items_by_name: dict[str, tuple[Item, ...]]) -> None:
    lengths = sorted(item.num_output_tokens for item in items_by_name["long_tail"])
    percentiles = quantiles(lengths, n=100)
    assert 3.5 < percentiles[98] / percentiles[94] < 4.5
    assert sum(lengths[-5:]) > sum(lengths) / 2
    assert lengths[len(lengths) // 2] < 12


def test_groups_share_their_prefix_and_nothing_more(
    items_by_name: dict[str, tuple[Item, ...]],
) -> None:
    items = items_by_name[SHARED]
    prefixes = {item.group: item.prompt_token_ids[: item.num_prefix_tokens] for item in items}
    assert sorted(filter(lambda group: group is not None, prefixes)) == list(range(8))
    assert {len(prefix) for prefix in prefixes.values()} == {384}
    assert all(item.prompt_token_ids[:384] == prefixes[item.group] for item in items)
    assert {len(item.prompt_token_ids) for item in items} == {416}
    assert len({item.prompt_token_ids for item in items}) == len(items)


def test_groups_arrive_mixed(items_by_name: dict[str, tuple[Item, ...]]) -> None:
    groups = [item.group for item in items_by_name[SHARED]]
    assert len(list(_runs(groups))) > len(groups) / 2


def _runs(values: list[int | None]) -> Iterator[int | None]:
    """The values without repeats of the one before."""
    return (value for index, value in enumerate(values) if values[index - 1 : index] != [value])
