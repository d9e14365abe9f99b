"""The simulator of many workers: its arithmetic by hand, and nothing lost on the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from schedulers.cost import StepCost
from schedulers.sim.fleet import FleetConfig, FleetSimulator, SimRow

COST = StepCost(alpha_p=0.5, beta_p=0.01, alpha_d=0.2, beta_d=0.05, alpha_mb=0.0, mix_a=0.0)
CONFIG = FleetConfig(num_workers=1, max_seqs=2, cost=COST, max_output_tokens=1000, steal=False)


def test_the_time_of_one_worker_is_that_of_its_steps() -> None:
    """Two places: 3 steps of both, then the third row comes in, and so on."""
    result = FleetSimulator(CONFIG).run([[SimRow(10, 3), SimRow(20, 5), SimRow(30, 4)]])
    both, one = 0.2 + 0.05 * 2, 0.2 + 0.05
    seconds = (0.5 + 0.01 * 30) + 3 * both + (0.5 + 0.01 * 30) + 2 * both + 2 * one
    assert result.makespan_s == pytest.approx(seconds)
    assert result.busy_s == pytest.approx(seconds)
    assert result.idle_share == pytest.approx(0.0, abs=1e-9)
    assert result.serial_s == pytest.approx(5 * one)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("carries_kv", [True, False])
def test_every_row_ends_once_and_the_tail_is_no_longer_for_it(seed: int, carries_kv: bool) -> None:
    rng = random.Random(seed)
    shards = [
        [SimRow(rng.randint(1, 200), rng.randint(1, 60)) for _ in range(rng.randint(1, 40))]
        for _ in range(12)
    ]
    shards.append([SimRow(50, 900) for _ in range(30)])
    cost = replace(COST, alpha_p=0.01, beta_p=1e-4, alpha_d=0.002, beta_d=0.01)
    config = FleetConfig(
        num_workers=6, max_seqs=16, cost=cost, max_output_tokens=1000, rows_ahead=32,
        carries_kv=carries_kv,
    )  # fmt: skip
    with_moves = FleetSimulator(config).run(shards)
    without = FleetSimulator(replace(config, steal=False)).run(shards)
    num_rows = sum(map(len, shards))
    assert with_moves.num_rows == without.num_rows == num_rows
    assert with_moves.num_moves > 0 == without.num_moves
    assert with_moves.makespan_s < without.makespan_s
    assert with_moves.idle_share < without.idle_share
    tokens = sum(row.num_output_tokens for shard in shards for row in shard)
    assert with_moves.busy_s >= tokens * cost.beta_d
    assert FleetSimulator(config).run(shards) == with_moves


@pytest.mark.parametrize("seed", range(5))
def test_c33_largest_first_ends_sooner_than_first_come_first_served(seed: int) -> None:
    """Outputs of 16 and of 2,048 tokens, the long ones last: without any other help."""
    rng = random.Random(seed)
    shards = [[SimRow(rng.randint(10, 200), 16) for _ in range(40)] for _ in range(30)]
    shards += [[SimRow(rng.randint(10, 200), 2048) for _ in range(12)] for _ in range(3)]
    cost = replace(COST, alpha_p=0.01, beta_p=1e-4, alpha_d=0.002, beta_d=0.002)
    config = replace(CONFIG, num_workers=4, max_seqs=32, cost=cost, rows_ahead=8)
    first_come = FleetSimulator(config).run(shards)
    largest_first = FleetSimulator(config).run(
        sorted(shards, key=lambda shard: -sum(row.num_output_tokens for row in shard))
    )
    assert largest_first.makespan_s < first_come.makespan_s
    assert largest_first.idle_share < first_come.idle_share


def test_steps_of_fixed_cost_are_not_shared_in_vain() -> None:
    """Where a step costs the same for one and for many, nothing moves."""
    cost = replace(COST, beta_d=0.0, beta_p=0.0)
    config = replace(CONFIG, num_workers=3, max_seqs=64, cost=cost, steal=True)
    result = FleetSimulator(config).run([[SimRow(5, 100)] * 40])
    assert result.num_moves == 0
    assert result.makespan_s == pytest.approx(0.5 * 0 + 100 * 0.2, rel=0.2)
