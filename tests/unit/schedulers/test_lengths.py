"""The fitted hazard against laws whose hazard is known."""

from __future__ import annotations

import random

import pytest

from schedulers.lengths import fit_hazard


@pytest.mark.parametrize("p0", [1 / 20, 1 / 128])
def test_geometric_lengths_have_a_constant_hazard(p0: float) -> None:
    rng = random.Random(3)
    lengths = [1 + int(rng.expovariate(p0)) for _ in range(4000)]
    found = fit_hazard(lengths)
    middle = 1 / (sum(lengths) / len(lengths))
    at_mean = found.p0 + found.eta * sum(lengths) / len(lengths)
    assert at_mean == pytest.approx(middle, rel=0.15)
    assert found.eta * 3 / p0 < 0.5 * p0


@pytest.mark.parametrize("slope", [1e-4, 5e-4])
def test_a_rising_hazard_is_found(slope: float) -> None:
    """Lengths drawn token by token from h(t) = p0 + eta t."""
    rng, p0 = random.Random(4), 0.005

    def draw() -> int:
        length = 1
        while rng.random() >= p0 + slope * length:
            length += 1
        return length

    found = fit_hazard(draw() for _ in range(5000))
    assert found.eta == pytest.approx(slope, rel=0.25)
    assert found.p0 == pytest.approx(p0, abs=0.006)


def test_a_falling_hazard_is_taken_as_constant() -> None:
    rng = random.Random(5)
    lengths = [1 + int(rng.expovariate(1 / rng.choice([5, 200]))) for _ in range(3000)]
    assert fit_hazard(lengths).eta == 0.0


@pytest.mark.parametrize("lengths", [[7], [16] * 100, [1, 2, 3], [1]])
def test_lengths_without_spread_have_the_hazard_of_their_mean(lengths: list[int]) -> None:
    found = fit_hazard(lengths)
    assert found.p0 == pytest.approx(min(1.0, len(lengths) / sum(lengths)))
    assert found.eta == 0.0


def test_it_is_a_chance() -> None:
    rng = random.Random(6)
    for _ in range(200):
        found = fit_hazard([rng.randint(1, 60) for _ in range(rng.randint(1, 80))])
        assert 0 < found.p0 <= 1
        assert found.eta >= 0
