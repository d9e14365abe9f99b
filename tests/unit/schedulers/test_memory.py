"""The memory plan and the memory-safe batch size, against simulation."""

from __future__ import annotations

import random

import pytest

from schedulers.memory import (
    BatchSizer,
    ModelFootprint,
    NotEnoughMemory,
    plan_memory,
    resident_moments,
    safe_batch_size,
)
from schedulers.view import Finished

FOOTPRINT = ModelFootprint(
    weights_bytes=1 << 30,
    kv_bytes_per_token=1 << 14,
    activation_bytes_per_token=1 << 16,
    logits_bytes_per_seq=1 << 18,
)


def test_the_plan_never_exceeds_its_limit_and_leaves_less_than_a_block() -> None:
    limit = 3 << 30
    plan = plan_memory(
        FOOTPRINT, limit_bytes=limit, max_batch_tokens=512, max_seqs=64, max_model_len=8192
    )
    used = plan.weights_bytes + plan.activation_bytes + plan.kv_bytes
    assert used <= limit < used + (1 << 14) * 16
    assert plan.capacity_tokens == plan.num_blocks * 16


def test_no_more_than_is_useful_is_taken() -> None:
    plan = plan_memory(
        FOOTPRINT, limit_bytes=100 << 30, max_batch_tokens=512, max_seqs=2, max_model_len=100
    )
    assert plan.num_blocks == 2 * 7


def test_too_little_memory_says_how_much_and_what_to_do() -> None:
    with pytest.raises(NotEnoughMemory, match=r"1\.00 GiB is too little.*raise --memory"):
        plan_memory(
            FOOTPRINT, limit_bytes=1 << 30, max_batch_tokens=512, max_seqs=2, max_model_len=100
        )


@pytest.mark.parametrize("law", ["uniform", "geometric", "bimodal"])
def test_resident_moments_equal_those_of_a_simulated_slot(law: str) -> None:
    """Brute force: one slot refilled for ever, looked at after every token."""
    rng = random.Random(law)
    draw = {
        "uniform": lambda: rng.randint(1, 60),
        "geometric": lambda: 1 + int(rng.expovariate(1 / 30)),
        "bimodal": lambda: rng.choice([2, 100]),
    }[law]
    lengths = [Finished(rng.randint(5, 50), draw()) for _ in range(8000)]
    seen = [item.num_prompt_tokens + age + 0.5 for item in lengths for age in range(item[1])]
    mean = sum(seen) / len(seen)
    std = (sum((x - mean) ** 2 for x in seen) / len(seen)) ** 0.5
    moments = resident_moments(lengths, block_size=0)
    assert moments.mean_tokens == pytest.approx(mean, rel=0.01)
    assert moments.std_tokens == pytest.approx(std, rel=0.02)


@pytest.mark.parametrize("bound", [0.01, 0.05])
def test_safe_batch_size_overflows_no_more_often_than_stated_and_is_not_timid(bound: float) -> None:
    """Monte Carlo: N slots with independent phases against the capacity."""
    rng = random.Random(5)
    lengths = [Finished(rng.randint(5, 50), rng.randint(1, 200)) for _ in range(2000)]
    capacity = 20_000
    moments = resident_moments(lengths, block_size=0)
    safe = safe_batch_size(capacity, moments, bound)
    weights = [item.num_output_tokens for item in lengths]

    def overflow(num: int) -> float:
        hits = 0
        for _ in range(1000):
            chosen = rng.choices(lengths, weights, k=num)
            hits += sum(c[0] + rng.random() * c[1] for c in chosen) > capacity
        return hits / 1000

    assert overflow(safe) <= 1.5 * bound + 0.005
    assert overflow(int(safe * 1.08)) > bound


def test_before_samples_exist_the_longest_ends_count() -> None:
    sizer = BatchSizer(min_samples=3)
    assert sizer.max_holders(1000, [100, 100], block_size=0) == 10
    sizer.add([Finished(10, 10)] * 3)
    assert sizer.max_holders(1000, [100, 100], block_size=0) > 50
