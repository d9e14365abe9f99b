"""The fitted hazard against laws whose hazard is known."""

from __future__ import annotations

import random

import pytest

from schedulers.lengths import Hazard, LengthWindow, fit_hazard, phase_slope, survival
from schedulers.view import Finished


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


def run_slots(lengths: list[int], slots: int, window: LengthWindow) -> None:
    """Slots that are refilled at once, one token a step each, until the lengths are used up."""
    left = [lengths.pop() for _ in range(slots)]
    born = list(left)
    while lengths:
        ended = []
        for slot in range(slots):
            left[slot] -= 1
            if left[slot] == 0 and lengths:
                ended.append(Finished(5, born[slot]))
                left[slot] = born[slot] = lengths.pop()
        window.add(ended, slots - len(ended))
        if window.num_added >= 60:
            return


def test_the_flow_knows_the_mean_while_only_the_short_ones_have_finished() -> None:
    """200 slots start at once; after 60 completions, the finished ones are much shorter than all,
    and the flow is right.
    """
    rng = random.Random(7)
    window = LengthWindow()
    run_slots([1 + int(rng.expovariate(1 / 128)) for _ in range(2000)], 200, window)
    seen = sum(item.num_output_tokens for item in window.items) / len(window)
    assert seen < 40
    assert window.flow_mean_output_tokens == pytest.approx(128, rel=0.3)


@pytest.mark.parametrize("low", [1, 96])
def test_the_hazard_of_holders_of_all_ages_rises_less_than_that_of_one(low: int) -> None:
    """Brute force: slots in a steady state; how their chance of ending changes in a phase that
    refills nothing.
    """
    rng = random.Random(8)
    outputs = [rng.randint(low, 256 - low) for _ in range(20000)]
    fitted = fit_hazard(outputs[:2000])
    # Seen at a random instant: chosen by length, at a uniform age.
    ages = [(out, rng.randrange(out)) for out in rng.choices(outputs, weights=outputs, k=40000)]
    chances = []
    for step in range(24):
        alive = [(out, age) for out, age in ages if out - age > step]
        chances.append(sum(out - age == step + 1 for out, age in alive) / len(alive))
    rise = (sum(chances[12:]) - sum(chances[:12])) / 12 / 12
    assert 0 <= phase_slope(fitted, outputs) <= fitted.eta
    assert abs(phase_slope(fitted, outputs) - rise) < abs(fitted.eta - rise)


def test_a_constant_hazard_has_no_slope() -> None:
    assert phase_slope(Hazard(0.01, 0.0), [3, 100, 7]) == 0.0


@pytest.mark.parametrize("mean", [5, 60])
def test_survival_of_ended_outputs_is_their_share(mean: int) -> None:
    rng = random.Random(9)
    outputs = [1 + int(rng.expovariate(1 / mean)) for _ in range(500)]
    found = survival(outputs, [], max(outputs))
    for t in range(max(outputs)):
        share = sum(out > t for out in outputs) / len(outputs)
        assert found.chances[t] == pytest.approx(share)
    assert found.moment(0) == pytest.approx(sum(outputs) / len(outputs))
    second = sum(out * out for out in outputs) / len(outputs)
    assert found.moment(1) == pytest.approx(second / 2)


def test_survival_with_running_outputs_is_that_of_the_law() -> None:
    """Each output is seen for a random while: those cut short count for as long as they were
    seen.
    """
    rng = random.Random(10)
    outputs = [1 + int(rng.expovariate(1 / 50)) for _ in range(20000)]
    seen = [rng.randint(1, 200) for _ in outputs]
    ended = [out for out, until in zip(outputs, seen, strict=True) if out <= until]
    running = [until for out, until in zip(outputs, seen, strict=True) if out > until]
    found = survival(ended, running, 800)
    assert sum(ended) / len(ended) < 45
    assert found.moment(0) == pytest.approx(sum(outputs) / len(outputs), rel=0.03)
