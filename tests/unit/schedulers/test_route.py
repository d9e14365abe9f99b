"""Loads and the router against counting and brute force."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from schedulers.cost import StepCost
from schedulers.load import (
    Load,
    OutputLengths,
    Part,
    choose_given,
    choose_share,
    load_of,
    part_of,
)
from schedulers.route import MOVE_S, Way, next_receiver, plan_steal

COST = StepCost(alpha_p=0.01, beta_p=1e-3, alpha_d=5e-3, beta_d=2e-3, alpha_mb=0.0, mix_a=0.0)


@dataclass
class Seq:
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    max_total_tokens: int


def test_the_remaining_output_is_the_mean_of_those_that_were_longer() -> None:
    rng = random.Random(0)
    ended = [rng.randint(1, 200) for _ in range(300)]
    lengths = OutputLengths(ended)
    for age in range(0, 199, 7):
        longer = [length - age for length in ended if length > age]
        assert lengths.remaining(age, at_most=10_000) == pytest.approx(sum(longer) / len(longer))
    assert lengths.remaining(50, at_most=3) == 3


def test_where_nothing_is_known_as_many_tokens_are_left_as_were() -> None:
    assert OutputLengths([], assumed=100).remaining(0, at_most=1000) == 100
    assert OutputLengths([5, 6]).remaining(400, at_most=1000) == 400
    assert OutputLengths([5, 6]).remaining(400, at_most=50) == 50
    assert OutputLengths([5]).remaining(7, at_most=0) == 1


def test_a_load_is_the_steps_of_the_longest_and_the_tokens_of_all() -> None:
    lengths = OutputLengths([10, 20, 30])
    seqs = [Seq(100, 100, 0, 400), Seq(50, 65, 64, 400), Seq(8, 18, 17, 20)]
    load = load_of([part_of(seq, lengths, COST) for seq in seqs], COST)
    steps = [20, 10, 2]  # mean of all; of 20 and 30, less 15; at most 2 more
    assert load.num_rows == 3
    assert load.serial_s == pytest.approx(COST.alpha_d * 20)
    assert load.work_s == pytest.approx(COST.beta_p * 100 + COST.beta_d * sum(steps))
    assert load_of([], COST) == Load()


@pytest.mark.parametrize("seed", range(20))
def test_a_share_has_about_its_size_and_looks_like_the_rest(seed: int) -> None:
    rng = random.Random(seed)
    lengths = OutputLengths([])
    seqs = [Seq(1, 1, 0, 1 + rng.randint(1, 120)) for _ in range(rng.randint(1, 60))]
    parts = [part_of(seq, lengths, COST) for seq in seqs]
    total = sum(part.work_s for part in parts)
    longest = max(part.work_s for part in parts)
    for wanted in (0.0, 0.25, 0.5, 0.9, 1.0):
        chosen = choose_share(parts, wanted * total)
        got = sum(parts[index].work_s for index in chosen)
        assert len(set(chosen)) == len(chosen)
        assert abs(got - wanted * total) <= longest
    half = choose_share(parts, total / 2)
    if len(parts) > 20:  # both have long ones
        kept = [p.work_s for i, p in enumerate(parts) if i not in half]
        assert max(kept) > 0.5 * longest


@pytest.mark.parametrize("seed", range(20))
def test_what_waits_is_given_before_what_runs(seed: int) -> None:
    rng = random.Random(seed)
    parts = [Part(1.0, rng.uniform(0.1, 3.0)) for _ in range(rng.randint(2, 40))]
    waiting = [rng.random() < 0.5 for _ in parts]
    waiting_s = sum(part.work_s for part, waits in zip(parts, waiting, strict=True) if waits)
    for share_s in (0.0, waiting_s / 2, waiting_s + 1.0):
        chosen = choose_given(parts, waiting, share_s, move_s=[0.0] * len(parts))
        assert len(set(chosen)) == len(chosen)
        given_s = sum(parts[index].work_s for index in chosen)
        assert abs(given_s - min(share_s, sum(p.work_s for p in parts))) <= 3.0
        running = [index for index in chosen if not waiting[index]]
        if running:
            assert {index for index, waits in enumerate(waiting) if waits} <= set(chosen)


def test_the_next_shard_goes_to_the_hungry_worker_with_the_least_work() -> None:
    loads = {0: Load(10, 0, 5.0), 1: Load(3, 0, 1.0), 2: Load(3000, 0, 0.5)}
    rows = {0: 10, 1: 3, 2: 3000}
    assert next_receiver(loads, rows_ahead=100, rows=rows) == 1
    assert next_receiver(loads, rows_ahead=4000, rows=rows) == 2
    assert next_receiver(loads, rows_ahead=1, rows=rows) is None
    assert next_receiver({}, rows_ahead=1, rows={}) is None


def test_work_goes_from_the_last_to_a_dry_one() -> None:
    loads = {0: Load(40, 0.1, 20.0), 1: Load(0), 2: Load(30, 0.1, 10.0)}
    steal = plan_steal(loads, ahead_s=1.0)
    assert steal is not None
    assert (steal.thief, steal.victim, steal.share_s) == (1, 0, 10.0)
    assert steal.gain_s == pytest.approx(20.1 - (10.1 + MOVE_S))
    assert plan_steal(loads, ahead_s=1.0, busy=frozenset({1})) is None
    other = plan_steal(loads, ahead_s=1.0, busy=frozenset({0}))
    assert other is not None
    assert other.victim == 2


def test_nothing_moves_where_it_saves_nothing() -> None:
    # One row cannot be parted; steps that cost the same with half of the rows are not saved.
    assert plan_steal({0: Load(1, 0.1, 20.0), 1: Load()}, ahead_s=1.0) is None
    assert plan_steal({0: Load(8, 20.0, 0.2), 1: Load()}, ahead_s=1.0) is None
    assert plan_steal({0: Load(8, 0.0, 0.2), 1: Load()}, ahead_s=1.0) is None
    assert plan_steal({0: Load(8, 0.0, 9.0), 1: Load(8, 0.0, 8.0)}, ahead_s=1.0) is None


@pytest.mark.parametrize("seed", range(30))
def test_a_move_is_the_best_of_all_and_makes_the_end_no_later(seed: int) -> None:
    rng = random.Random(seed)
    loads = {
        index: Load(rng.randint(2, 50), rng.uniform(0, 3), rng.choice([0.0, rng.uniform(0, 30)]))
        for index in range(rng.randint(2, 6))
    }
    steal = plan_steal(loads, ahead_s=4.0)
    dry = [index for index, load in loads.items() if load.total_s < 4.0]
    best = 0.0
    for thief, victim in itertools.permutations(loads, 2):
        if thief in dry and loads[thief].total_s == min(loads[i].total_s for i in dry):
            share = (loads[victim].work_s - loads[thief].work_s) / 2
            ends = (
                loads[victim].total_s - share,
                loads[victim].serial_s + loads[thief].work_s + share,
            )
            best = max(best, loads[victim].total_s - max(ends) - MOVE_S) if share > 0 else best
    if steal is None:
        assert best <= MOVE_S
    else:
        assert steal.gain_s == pytest.approx(best)


def test_keys_travel_where_that_is_sooner() -> None:
    slow, fast = Way(1e-3, 23_040, 5e8), Way(1e-6, 23_040, 5e8)
    assert slow.carries_kv
    assert slow.move_s(500) == pytest.approx(2 * 500 * 23_040 / 5e8)  # both stand still
    assert not fast.carries_kv
    assert fast.move_s(500) == pytest.approx(5e-4)  # the receiver computes
    assert not Way(1e-3, 23_040, 0.0).carries_kv


def test_what_runs_moves_only_where_it_is_worth_its_way() -> None:
    parts = [Part(10.0, 1.0), Part(10.0, 1.0), Part(10.0, 0.1)]
    waiting = [False, False, True]
    assert choose_given(parts, waiting, 1.0, move_s=[0.8, 1.2, 9.0]) == [2, 0]
    assert choose_given(parts, waiting, 1.0, move_s=[1.2, 1.2, 9.0]) == [2]
