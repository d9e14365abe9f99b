"""The memory plan and the memory-safe batch size, against simulation."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np
import pytest

from schedulers.lengths import LengthWindow
from schedulers.memory import (
    BatchSizer,
    Geometric,
    ModelFootprint,
    NotEnoughMemory,
    Running,
    cohort_moments,
    paper_batch_size,
    paper_sigma_batch_size,
    plan_memory,
    resident_moments,
    resident_tokens,
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


LAWS: dict[str, Callable[[random.Random], int]] = {
    "uniform": lambda rng: rng.randint(1, 60),
    "geometric": lambda rng: 1 + int(rng.expovariate(1 / 30)),
    "bimodal": lambda rng: rng.choice([2, 100]),
}


def lengths_of(law: str, count: int, rng: random.Random) -> list[Finished]:
    return [Finished(rng.randint(5, 50), LAWS[law](rng)) for _ in range(count)]


@pytest.mark.parametrize("law", LAWS)
def test_resident_moments_equal_those_of_a_simulated_slot(law: str) -> None:
    """Brute force: one slot refilled for ever, looked at after every token."""
    lengths = lengths_of(law, 8000, random.Random(law))
    seen = np.array(
        [item.num_prompt_tokens + age + 0.5 for item in lengths for age in range(item[1])]
    )
    moments = resident_moments(lengths, block_size=0)
    assert moments.mean_tokens == pytest.approx(seen.mean(), rel=0.01)
    assert moments.std_tokens == pytest.approx(seen.std(), rel=0.02)
    skewness = ((seen - seen.mean()) ** 3).mean() / seen.std() ** 3
    assert moments.skewness == pytest.approx(skewness, abs=0.05)


def resident_tokens_of(num_slots: int, lengths: list[Finished], *, draws: int) -> np.ndarray:
    """Total tokens of so many slots at random instants: sequences by how long they stay, at a
    uniform age.
    """
    rng = np.random.default_rng(num_slots)
    prompts = np.array([item.num_prompt_tokens for item in lengths], float)
    outputs = np.array([item.num_output_tokens for item in lengths], float)
    chosen = rng.choice(len(lengths), (draws, num_slots), p=outputs / outputs.sum())
    return (prompts[chosen] + rng.random(chosen.shape) * outputs[chosen]).sum(axis=1)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("bound", [0.01, 0.05])
@pytest.mark.parametrize("capacity", [1500, 6000, 20000])
def test_the_safe_batch_is_safe_and_within_five_per_cent_of_the_largest(
    law: str, bound: float, capacity: int
) -> None:
    """Monte Carlo over the number of slots, some 25 to 500: the stated bound holds to within its
    sampling error, and 5 % (or one) more breaks it.
    """
    lengths = lengths_of(law, 2000, random.Random(law))
    safe = safe_batch_size(capacity, resident_moments(lengths, block_size=0), bound)
    draws = 20000

    def overflow(num_slots: int) -> float:
        return float((resident_tokens_of(num_slots, lengths, draws=draws) > capacity).mean())

    error = 3 * (bound / draws) ** 0.5
    assert overflow(safe) <= bound + error
    assert overflow(max(safe + 1, ceil(safe * 1.05))) > bound


def simulate_refills(
    theta: float, hazard: float, prompt: int, holders: int, *, rng: np.random.Generator
) -> np.ndarray:
    """Resident tokens right after each refill of EB's cycle, geometric outputs (A5)."""
    age = np.zeros(holders)
    totals = []
    for cycle in range(3000):
        while (age >= 0).mean() > 1 - theta:
            alive = age >= 0
            age[alive] += 1
            age[alive & (rng.random(holders) < hazard)] = -1
        age[age < 0] = 0
        if cycle > 200:
            totals.append((prompt + age).sum())
    return np.array(totals)


@pytest.mark.parametrize(("theta", "hazard"), [(0.1, 1 / 64), (0.3, 1 / 64), (0.3, 1 / 256)])
def test_the_papers_mean_after_a_refill_is_that_of_simulated_cycles(
    theta: float, hazard: float
) -> None:
    totals = simulate_refills(theta, hazard, 40, 200, rng=np.random.default_rng(1))
    expected = resident_tokens(Geometric(theta, hazard, 40))
    assert totals.mean() / 200 == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("bound", [0.01, 0.05])
def test_the_form_behind_the_papers_results_is_safe_and_timid(bound: float) -> None:
    """With the true hazard it overflows less often than stated, and leaves memory idle."""
    theta, hazard, prompt, capacity = 0.3, 1 / 64, 40, 20000
    safe = paper_sigma_batch_size(capacity, Geometric(theta, hazard, prompt), bound)
    rng = np.random.default_rng(2)
    assert (simulate_refills(theta, hazard, prompt, safe, rng=rng) > capacity).mean() <= bound
    larger = round(1.05 * safe)
    assert (simulate_refills(theta, hazard, prompt, larger, rng=rng) > capacity).mean() <= bound


def test_the_form_in_the_papers_text_does_not_grow_its_slack_with_the_batch() -> None:
    """Why it is not the default: its share of slack vanishes as 1 / N, where chance needs
    1 / sqrt(N).
    """
    law = Geometric(0.3, 1 / 64, 40)
    mean = resident_tokens(law)
    small, large = (capacity - mean * paper_batch_size(capacity, law, 0.01)
                    for capacity in (20_000, 2_000_000))  # fmt: skip
    assert large == pytest.approx(small, abs=mean)


def test_a_hazard_that_is_half_too_low_halves_the_papers_batch() -> None:
    """The failure in the paper's own validation."""
    right = paper_sigma_batch_size(780_000, Geometric(0.05, 1 / 1024, 128), 0.01)
    wrong = paper_sigma_batch_size(780_000, Geometric(0.05, 1 / 2118, 128), 0.01)
    assert wrong < 0.55 * right


def sizer(lengths: LengthWindow, **options: Any) -> BatchSizer:
    return BatchSizer(lengths, **{"min_samples": 3, **options})


def geometric() -> Geometric:
    return Geometric(0.1, 1 / 10, 10.0)


def test_before_samples_exist_the_longest_ends_count() -> None:
    window = LengthWindow()
    sizes = sizer(window)
    first = sizes.size(1000, [100, 100], 0, [], geometric)
    assert (first.form, first.holders) == ("longest", 10)
    window.add([Finished(10, 10)] * 3, 27)
    then = sizes.size(1000, [100, 100], 0, [], geometric)
    assert then.form == "moments"
    assert then.holders > 50
    assert then.paper is not None
    assert then.paper_sigma is not None


@pytest.mark.parametrize("form", ["paper", "paper_sigma"])
def test_the_papers_forms_can_be_chosen(form: Any) -> None:
    window = LengthWindow()
    window.add([Finished(10, 10)] * 40, 360)
    found = sizer(window, form=form).size(4000, [], 0, [], geometric)
    assert found.form == form
    assert found.holders == getattr(found, form)


@pytest.mark.parametrize("law", LAWS)
def test_a_cohort_that_still_runs_in_part_has_the_moments_of_all(law: str) -> None:
    """Slots that started together, looked at after 40 tokens: the ended ones alone are too short,
    and with the running ones the moments are those of the law, or safe where its tail was not seen.
    """
    rng = random.Random(law)
    lengths = lengths_of(law, 4000, rng)
    exact = resident_moments(lengths, block_size=0)
    seen_for = 80 if law == "geometric" else 101
    ended = [item for item in lengths if item.num_output_tokens <= seen_for]
    running = [
        Running(item.num_prompt_tokens, seen_for, 400, 0)
        for item in lengths
        if item.num_output_tokens > seen_for
    ]
    found = cohort_moments(ended, running, block_size=0)
    assert found.mean_tokens == pytest.approx(exact.mean_tokens, rel=0.06)
    assert found.std_tokens == pytest.approx(exact.std_tokens, rel=0.12)
    if running:
        assert resident_moments(ended, 0).mean_tokens < 0.9 * exact.mean_tokens


def test_the_error_of_the_mean_is_that_of_repeated_samples() -> None:
    rng = random.Random(4)
    means, errors = [], []
    for _ in range(200):
        found = cohort_moments(lengths_of("geometric", 300, rng), [], block_size=0)
        means.append(found.mean_tokens)
        errors.append(found.error_tokens)
    assert float(np.mean(errors)) == pytest.approx(float(np.std(means)), rel=0.25)


def test_a_larger_batch_is_believed_only_after_a_while() -> None:
    """Holders cannot be taken back: N follows the least of the latest computations."""
    window = LengthWindow()
    sizes = sizer(window, update_every=10)
    window.add([Finished(10, 100)] * 20)
    before = sizes.size(10_000, [], 0, [], geometric).holders
    grown = []
    for _ in range(200):
        window.add([Finished(10, 5)] * 10)
        grown.append(sizes.size(10_000, [], 0, [], geometric).holders)
    assert grown[0] == before
    assert sorted(grown) == grown
    assert grown[-1] > 3 * before


@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_the_bound_is_a_chance(bound: float) -> None:
    with pytest.raises(ValueError, match="overflow_probability is"):
        BatchSizer(LengthWindow(), overflow_probability=bound)
