"""Calibrations as values: they survive storage, their key is stable, damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from schedulers.calibration import (
    VERSION,
    Calibration,
    calibrated,
    calibration_key,
    fit_steps,
    interference,
    noise,
    r_squared,
    steady_medians,
    switch_s,
)
from schedulers.cost import StepCost, StepSample

TRUE = StepCost(
    alpha_p=1e-2, beta_p=4e-4, alpha_d=1.5e-2, beta_d=6e-4,
    alpha_mb=1.7e-2, mix_a=5e-4, mix_b=1e-4, mix_c=2e-4, gamma=2e-6,
)  # fmt: skip
HARDWARE = {"device": "cpu", "processor": "a \u00b5 processor", "cores": 2, "threads": 2}


def sample(prefill: int, decode: int, context: int = 0, factor: float = 1.0) -> StepSample:
    return StepSample(prefill, decode, context, factor * TRUE.step_s(prefill, decode, context))


def samples() -> list[StepSample]:
    sizes = [(2**power, 0, 0) for power in range(4, 11)]
    sizes += [(0, n, n * context) for n in (1, 4, 16, 64) for context in (65, 513)]
    for total in (64, 128, 256, 512):
        for share in (0.1, 0.3, 0.5, 0.7, 0.9):
            decode = round(share * total)
            sizes.append((total - decode, decode, 150 * decode))
    return [sample(*size) for size in sizes for _ in range(2)]


def calibration(**changes: Any) -> Calibration:
    settings = {"max_batch_tokens": 1024, "max_seqs": 64, "block_size": 16}
    made = calibrated(
        samples(),
        hardware=HARDWARE,
        model_fingerprint="f00d",
        model="tiny",
        dtype="bfloat16",
        created="2026-11-29T12:00:00+00:00",
        settings=settings,
    )
    return replace(made, **changes)


def test_what_is_stored_is_read_back() -> None:
    made = calibration(samples=(*samples(), StepSample(64, 0, 0, 0.5, True)))
    text = json.dumps(made.to_json())
    assert text.isascii()
    assert Calibration.from_json(json.loads(text)) == made


def test_the_cost_is_the_fit_of_the_samples() -> None:
    made = calibration()
    for step in samples():
        assert made.cost.step_s(*step[:3]) == pytest.approx(step.elapsed_s, rel=0.01)
    ones = {"prefill": 1.0, "decode": 1.0, "mixed": 1.0}
    assert made.r_squared == pytest.approx(ones, abs=1e-4)


def test_the_key_is_stable_and_short() -> None:
    assert calibration_key({"device": "cpu", "cores": 2}, "f00d", "float32") == "328ffb55fb690bde"
    assert calibration().key == calibration(samples=(), created="later", settings={}).key
    backwards = dict(reversed(HARDWARE.items()))
    assert calibration(hardware=backwards).key == calibration().key


@pytest.mark.parametrize(
    "changes",
    [{"hardware": {**HARDWARE, "threads": 1}}, {"model_fingerprint": "beef"}, {"dtype": "float32"}],
    ids=lambda changes: next(iter(changes)),
)
def test_the_key_tells_apart_what_costs_differently(changes: dict[str, Any]) -> None:
    assert calibration(**changes).key != calibration().key


def damaged(**changes: Any) -> dict[str, Any]:
    return {**calibration().to_json(), **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be an object"),
        ({}, "version is None"),
        (damaged(version=0), f"version is 0; this release reads version {VERSION}"),
        ({k: v for k, v in damaged().items() if k != "dtype"}, "lacks dtype"),
        (damaged(more=1), "unknown more"),
        (damaged(model=7), "model is 7"),
        (damaged(hardware=["cpu"]), "hardware is"),
        (damaged(hardware={"device": None}), "hardware.device is None"),
        (damaged(settings={"max_seqs": "64"}), "settings.max_seqs is '64'"),
        (damaged(samples=None), "samples is None"),
        (damaged(samples=[[1, 2, 3]]), r"a sample is \[1, 2, 3\]"),
        (damaged(samples=[[1, 2, 3, "0.5", False]]), "a sample is"),
        (damaged(samples=[[-1, 2, 3, 0.5, False]]), "a sample is"),
        (damaged(samples=[[1, 2, 3, float("nan"), False]]), "a sample is"),
        (damaged(cost={"alpha_p": 1.0}), "cost lacks alpha_d"),
        (damaged(cost={**TRUE.to_json(), "beta_p": True}), "cost.beta_p is True"),
        (damaged(cost={**TRUE.to_json(), "beta_p": float("inf")}), "cost.beta_p is inf"),
        (damaged(r_squared={"mixed": None}), "r_squared.mixed is None"),
    ],
)
def test_damage_is_named(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Calibration.from_json(data)


def test_a_step_is_the_median_of_its_repetitions() -> None:
    times = [sample(64, 0, factor=factor) for factor in (1.0, 0.9, 7.0)]
    switched = StepSample(64, 0, 0, 9.0, True)
    assert steady_medians([*times, switched]) == [sample(64, 0)]


def test_a_switch_costs_what_both_its_steps_take_longer() -> None:
    steady = [sample(64, 0), sample(0, 16, 1040)]
    late = [
        StepSample(*item[:3], item.elapsed_s + extra_s, True)
        for item, extra_s in zip(steady, (0.003, 0.002), strict=True)
    ]
    assert switch_s([*steady, *late]) == pytest.approx(0.005)
    assert switch_s(steady) == 0.0
    early = [StepSample(*item[:3], item.elapsed_s / 2, True) for item in steady]
    assert switch_s([*steady, *early]) == 0.0


def test_noise_is_that_of_the_repetitions_of_a_step() -> None:
    assert noise(samples()) == pytest.approx(0.0)
    factors = (0.8, 1.0, 1.0, 1.4)
    assert noise([sample(64, 0, factor=factor) for factor in factors]) == pytest.approx(0.15)
    assert noise([StepSample(64, 0, 0, 9.0, True)]) == 0.0


def test_interference_compares_with_the_parts() -> None:
    curve = interference(samples(), TRUE)
    assert [round(item.decode_share, 1) for item in curve] == [0.1, 0.3, 0.5, 0.7, 0.9]
    step = sample(32, 32, 4800)
    (item,) = interference([step], TRUE)
    assert item.mean_tokens == 64
    assert item.mixed_s == pytest.approx(step.elapsed_s / 64)
    apart_s = TRUE.step_s(32, 0) + TRUE.step_s(0, 32, 4800)
    assert item.apart_s == pytest.approx(apart_s / 64)
    assert item.ratio == pytest.approx(step.elapsed_s / apart_s)
    assert item.mixed_marginal_s == pytest.approx(6e-4)
    assert item.apart_marginal_s == pytest.approx(5e-4)


def test_r_squared_is_lower_for_a_worse_cost() -> None:
    worse = replace(TRUE, beta_p=2 * TRUE.beta_p)
    found = r_squared(samples(), worse)
    assert found["prefill"] < 0.9
    assert found["decode"] == pytest.approx(1.0)


def test_a_fit_needs_both_kinds() -> None:
    with pytest.raises(ValueError, match="'decode': 0"):
        fit_steps([sample(64, 0)])
