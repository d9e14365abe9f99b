"""The floor and the workload of the benchmarks, against counting by hand."""

from __future__ import annotations

import random

import pytest

from tests.bench.common import Check, Item, Workload, log_uniform
from tests.bench.floor import Shape, floor_of, num_context_positions
from tests.bench.machine import Ceilings

SMOLLM2 = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
}


@pytest.mark.parametrize(("num_prompt_tokens", "num_output_tokens"), [(1, 1), (5, 2), (16, 40)])
def test_context_positions_equal_a_step_by_step_count(
    num_prompt_tokens: int, num_output_tokens: int
) -> None:
    num_in_memory, num_read = num_prompt_tokens, 0
    for _ in range(num_output_tokens - 1):
        num_in_memory += 1
        num_read += num_in_memory
    assert num_context_positions(num_prompt_tokens, num_output_tokens) == num_read


def test_shape_counts_the_parameters_of_smollm2() -> None:
    shape = Shape.of_config(SMOLLM2, dtype_bytes=2)
    num_norms = (2 * 30 + 1) * 576
    assert shape.layer_parameters + shape.head_parameters + num_norms == 134_515_008
    assert shape.kv_bytes_per_token == 23_040


def test_floor_is_the_products_time_and_the_reads_time() -> None:
    shape = Shape(layer_parameters=100, head_parameters=10, kv_bytes_per_token=4)
    workload = Workload(name="two", items=(Item((1, 2, 3), 2), Item((4,), 1)))
    ceilings = Ceilings(bfloat16_flops=2.0, float32_flops=1.0, copy_bytes_per_s=8.0)
    floor = floor_of(workload, shape, ceilings, dtype="bfloat16")
    assert floor.flops == 2 * (100 * (4 + 1) + 10 * 3)
    assert floor.kv_read_bytes == 4 * 4
    assert floor.total_s == floor.flops / 2.0 + 16 / 8.0


def test_log_uniform_stays_in_bounds_and_halves_at_the_geometric_mean() -> None:
    rng = random.Random(3)
    values = [log_uniform(rng, 16, 512) for _ in range(4000)]
    assert min(values) == 16 and max(values) == 512
    assert 0.46 < sum(value < 90 for value in values) / len(values) < 0.54


@pytest.mark.parametrize(("sense", "holds"), [(">=", True), ("<=", False)])
def test_check_holds_on_its_side_of_the_bound(sense: str, holds: bool) -> None:
    check = Check(name="ratio", value=4.5, bound=4.0, sense=sense)  # type: ignore[arg-type]
    assert check.holds is holds


def test_a_shared_prefix_counts_once_per_group() -> None:
    shape = Shape(layer_parameters=100, head_parameters=10, kv_bytes_per_token=4)
    ceilings = Ceilings(bfloat16_flops=2.0, float32_flops=1.0, copy_bytes_per_s=8.0)
    prefix = (1, 2, 3)
    rows = (Item((*prefix, 7), 3, 0, 3), Item((*prefix, 8), 2, 0, 3), Item((*prefix, 9), 2, 1, 3))
    apart = tuple(item._replace(group=None, num_prefix_tokens=0) for item in rows)
    shared, whole = (
        floor_of(Workload(name="", items=items), shape, ceilings, dtype="bfloat16")
        for items in (rows, apart)
    )
    assert whole.flops - shared.flops == 2 * 100 * 3  # one prompt of group 0 computes it
    # Two steps of the first row read it, and the one step of the second row reads it with them.
    assert whole.kv_read_bytes - shared.kv_read_bytes == 4 * 3


def test_int8_multiplies_twice_as_fast_as_bfloat16() -> None:
    ceilings = Ceilings(bfloat16_flops=2.0, float32_flops=1.0, copy_bytes_per_s=8.0)
    rates = [ceilings.matrix_rate(dtype) for dtype in ("float32", "bfloat16", "int8")]
    assert rates == [1.0, 2.0, 4.0]
