"""Names of sides, their turns, and how alike answers are."""

from __future__ import annotations

import pytest

from tests.bench.sides import Side, agreement, parse_sides
from tests.bench.throughput import turns


def labels(names: str, dtype: str = "bfloat16") -> list[tuple[str, str]]:
    return [(side.label, side.dtype) for side in parse_sides(names, dtype)]


def test_ours_comes_first_and_transformers_is_two_sides() -> None:
    assert labels("vllm,transformers") == [
        ("headrace", "bfloat16"),
        ("vllm", "bfloat16"),
        ("transformers", "bfloat16"),
        ("transformers-cb", "bfloat16"),
    ]


def test_a_peer_may_have_a_number_format_of_its_own() -> None:
    assert labels("openvino,openvino:bfloat16", "int8") == [
        ("headrace", "int8"),
        ("openvino", "int8"),
        ("openvino:bfloat16", "bfloat16"),
    ]


def test_who_lacks_the_default_format_is_left_out() -> None:
    assert labels("transformers,vllm", "int8") == [("headrace", "int8"), ("vllm", "int8")]


def test_options_reach_the_runner_and_the_label() -> None:
    side = parse_sides("openvino@max_num_batched_tokens=2048@KV_CACHE_PRECISION=u8", "int8")[1]
    assert side.options == {"max_num_batched_tokens": "2048", "KV_CACHE_PRECISION": "u8"}
    assert side.label == "openvino@max_num_batched_tokens=2048@KV_CACHE_PRECISION=u8"


@pytest.mark.parametrize("name", ["tgi", "transformers:int8", "vllm:float8"])
def test_unknown_peers_and_formats_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match=name.partition(":")[0]):
        parse_sides(name, "bfloat16")


def test_sides_take_turns_and_slow_ones_have_one() -> None:
    sides: tuple[Side, ...] = parse_sides("vllm,transformers", "bfloat16")
    order = [(round_number, side.label) for round_number, side in turns(sides, 2)]
    assert order == [
        (0, "headrace"),
        (0, "vllm"),
        (0, "transformers"),
        (0, "transformers-cb"),
        (1, "vllm"),
        (1, "headrace"),
    ]


def test_agreement_looks_at_the_first_tokens_only() -> None:
    left, right = [[1, 2, 3], [4, 5], [6]], [[1, 2, 9], [4, 7], [6]]
    assert agreement(left, right, num_tokens=2) == pytest.approx(2 / 3)
    assert agreement(left, right, num_tokens=1) == 1.0
