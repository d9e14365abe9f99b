"""What a recorded job says a simulation should cost: steps, what lies between them, shared prompts.

A robust fit says what most steps take, but a job takes the time of all of them, of the slow ones
too. So what is fitted is then scaled, for each kind of step, until the recorded steps add up to
their recorded time (`levelled`). The policies' own fits in the simulation know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from schedulers.cost import CostFit, StepCost, StepKind, StepSample, non_negative_fit
from schedulers.sim.simulator import ScheduleCost

PER_CLASS = 256
"""Steps that are fitted of each class of sizes."""


class RecordedStep(NamedTuple):
    """A step of a recorded job. A job may have several runs, each with a clock of its own."""

    run_id: str
    started_s: float
    elapsed_s: float
    schedule_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_context_tokens: int
    num_seqs: int
    num_finished: int

    @property
    def end_s(self) -> float:
        return self.started_s + self.elapsed_s + self.schedule_s


Steps = Sequence[RecordedStep]
"""In order: run by run, and step by step."""


def _by_run(steps: Steps) -> Iterator[list[RecordedStep]]:
    for _, group in groupby(steps, key=lambda step: step.run_id):
        yield list(group)


def span_s(steps: Steps) -> float:
    """Seconds from the first step to the end of the last, of all runs together."""
    return sum(run[-1].end_s - run[0].started_s for run in _by_run(steps))


# -- steps --


def step_samples(steps: Steps) -> list[StepSample]:
    """What a cost fit takes; steps that computed nothing are left out."""
    return [sample for run in _by_run(steps) for sample in _samples_of(run)]


def _samples_of(run: Iterable[RecordedStep]) -> Iterator[StepSample]:
    before: StepKind | None = None
    for step in run:
        sizes = step.num_prefill_tokens, step.num_decode_tokens, step.num_context_tokens
        if sizes[0] or sizes[1]:
            sample = StepSample(*sizes, step.elapsed_s)
            yield sample._replace(switched=before not in (None, sample.kind))
            before = sample.kind


class FittedCost(NamedTuple):
    """Costs of recorded steps.

    Attributes:
        cost: of steps of any size.
        scale: recorded seconds over those of the fit before it was scaled.
        rest_s: recorded seconds that `cost` does not add up to, per step: of the few prefill steps
            of mixed batching, where they took longer than its mixed steps tell of prefill.
    """

    cost: StepCost
    scale: float
    rest_s: float


def fit_step_cost(samples: Sequence[StepSample]) -> FittedCost | None:
    """Step costs of a job; None when no prefill or no decode step was recorded."""
    cost, spans_prefill = _fit(samples)
    mixed = [sample for sample in samples if sample.kind == "mixed"]
    if cost is None:
        return None
    known = list(samples)
    if mixed and not spans_prefill:
        known.extend([_prefill_part(sample, cost) for sample in mixed])
        cost = _fit(known)[0] or cost
    level = levelled(cost, known)
    return FittedCost(level, _scale(cost, samples), max(0.0, _rest_s(level, samples)))


def _fit(samples: Iterable[StepSample]) -> tuple[StepCost | None, bool]:
    fit = CostFit(per_class=PER_CLASS, min_samples=1)
    fit.add(samples)
    return fit.cost(), fit.spans("prefill")


def _prefill_part(sample: StepSample, cost: StepCost) -> StepSample:
    """A mixed step less what its decode tokens cost. Mixed batching has almost no other prefill
    steps (one of a new job, with all that a first step has to set up), so what prefill costs by
    itself is assumed from these.
    """
    decode_s = cost.beta_d * sample.num_decode_tokens + cost.gamma * sample.num_context_tokens
    elapsed_s = max(0.1 * sample.elapsed_s, sample.elapsed_s - decode_s)
    return StepSample(sample.num_prefill_tokens, 0, 0, elapsed_s)


def levelled(cost: StepCost, samples: Sequence[StepSample]) -> StepCost:
    """`cost`, scaled for each kind of step so that the samples add up to their measured time. A
    kind without samples is scaled as all the others are together.
    """
    overall = _scale(cost, samples)
    by_kind = {kind: [s for s in samples if s.kind == kind] for kind in ("prefill", "decode")}
    prefill, decode = (_scale(cost, found, overall) for found in by_kind.values())
    scaled = replace(
        cost,
        alpha_p=cost.alpha_p * prefill,
        beta_p=cost.beta_p * prefill,
        alpha_d=cost.alpha_d * decode,
        beta_d=cost.beta_d * decode,
        gamma=cost.gamma * decode,
    )
    mixed = [sample for sample in samples if sample.kind == "mixed"]
    context_s = scaled.gamma * sum(sample.num_context_tokens for sample in mixed)
    factor = _scale(replace(cost, gamma=0.0), mixed, overall, less_s=context_s)
    return replace(
        scaled,
        alpha_mb=cost.alpha_mb * factor,
        mix_a=cost.mix_a * factor,
        mix_b=cost.mix_b * factor,
        mix_c=cost.mix_c * factor,
    )


def _scale(
    cost: StepCost, samples: Sequence[StepSample], default: float = 1.0, *, less_s: float = 0.0
) -> float:
    """Measured over predicted seconds of all samples together, the cost of switches apart."""
    predicted_s = sum(cost.step_s(*sample[:3]) for sample in samples)
    measured_s = predicted_s + len(samples) * _rest_s(cost, samples) - less_s
    return measured_s / predicted_s if predicted_s > 0 and measured_s > 0 else default


def _rest_s(cost: StepCost, samples: Sequence[StepSample]) -> float:
    """Mean seconds of a sample above what it should take, its switch included."""
    switch_s = cost.alpha_switch / 2
    rest_s = (
        sample.elapsed_s
        - cost.step_s(*sample[:3])
        - switch_s * (sample.switched and sample.kind != "mixed")
        for sample in samples
    )
    return sum(rest_s) / max(1, len(samples))


# -- between steps --


def fit_schedule_cost(steps: Steps) -> ScheduleCost:
    """Seconds outside the backend: scheduling by sequences of a step, and the gaps behind steps by
    requests that ended in them.
    """
    fixed_s, per_seq_s = _line(
        [step.num_seqs for step in steps],
        [max(0.0, step.schedule_s) for step in steps],
        without_outliers=True,
    )
    gaps = [
        (step.num_finished, max(0.0, after.started_s - step.end_s))
        for run in _by_run(steps)
        for step, after in pairwise(run)
    ]
    gap_s, per_request_s = _line([finished for finished, _ in gaps], [gap for _, gap in gaps])
    return ScheduleCost(fixed_s + gap_s, per_seq_s, per_request_s)


def _line(
    sizes: Sequence[float], seconds: Sequence[float], *, without_outliers: bool = False
) -> tuple[float, float]:
    """Intercept and slope, neither below 0, scaled so that they add up to the sum of all."""
    y = np.array(seconds, float)
    if not y.size or not y.any():
        return 0.0, 0.0
    x = np.stack([np.ones(y.size), np.array(sizes, float)], axis=1)
    fitted = non_negative_fit(x, y)
    residual = np.abs(y - x @ fitted)
    limit = 3 * 1.4826 * np.median(residual)
    good = residual <= limit
    if without_outliers and limit > 1e-9 and good.sum() > 4:
        fitted = non_negative_fit(x[good], y[good])
    predicted_s = float((x @ fitted).sum())
    if predicted_s <= 0:
        return float(y.mean()), 0.0
    fixed, slope = (float(value) * float(y.sum()) / predicted_s for value in fitted)
    return fixed, slope


# -- a calibration --


def samples_like(cost: StepCost) -> tuple[StepSample, ...]:
    """Steps of many sizes at what `cost` says: stands for the calibration that it was fitted to."""
    chunks, singles = (16, 64, 256, 1024), (1, 4, 16, 64, 256)
    sizes = [(tokens, 0) for tokens in chunks] + [(0, seqs) for seqs in singles]
    sizes += [(tokens, seqs) for tokens in chunks for seqs in singles]
    return tuple(
        StepSample(tokens, seqs, seqs * context, cost.step_s(tokens, seqs, seqs * context))
        for tokens, seqs in sizes
        for context in ((32, 512) if seqs else (0,))
    )


# -- shared prompts --


def with_shared_context(cost: StepCost, num_tokens: float) -> StepCost:
    """`cost` of decode tokens that read so many positions beside those of their own sequence.

    A simulated sequence stands for the part of a prompt that was computed for it; what shared
    blocks brought is read by its decode tokens all the same.
    """
    extra_s = cost.gamma * num_tokens
    return replace(cost, beta_d=cost.beta_d + extra_s, mix_b=cost.mix_b + extra_s)
