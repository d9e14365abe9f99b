"""What a calibration is: measured steps of one model on one machine, and what was fitted to them.

Pure values. `workers.calibrate` measures, `flows.calibration` stores. Source of what is measured
and fitted: `exclusive_batching.md` A2.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar, cast, get_args

import numpy as np

from schedulers.cost import CostFit, StepCost, StepKind, StepSample

VERSION = 2
"""Of the stored form and of the kernels whose steps were measured (2: the native decoder); another
one is not read.
"""

Hardware = Mapping[str, str | int]
_Size = tuple[int, int, int, bool]
"""Prefill, decode and context tokens, and whether behind a step of another kind."""
_T = TypeVar("_T")


class ShareCost(NamedTuple):
    """Mixed steps of about the same decode share beside what their parts cost apart.

    Attributes:
        decode_share: of all tokens of the steps.
        mean_tokens: of a step.
        mixed_s: measured seconds per token, all sizes together.
        apart_s: fitted seconds per token of a prefill and a decode step with the same tokens.
        mixed_marginal_s: fitted marginal seconds per token in a mixed step, context apart.
        apart_marginal_s: the same in steps of one kind.
    """

    decode_share: float
    mean_tokens: float
    mixed_s: float
    apart_s: float
    mixed_marginal_s: float
    apart_marginal_s: float

    @property
    def ratio(self) -> float:
        """Above 1: mixing costs more than it saves."""
        return self.mixed_s / self.apart_s if self.apart_s else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured step costs of one model on one machine. Made by `calibrated` or `from_json`.

    Attributes:
        hardware: device, processor or GPU, cores, threads, torch, platform.
        model_fingerprint: of the model's content.
        model: its name, for people.
        dtype: number format of weights and KV memory.
        created: when, as ISO text.
        settings: `max_batch_tokens`, `max_seqs`, `block_size`.
        samples: one a repetition.
        cost: fitted to the samples.
        r_squared: share of the variance of the steady steps that `cost` explains, by kind.
    """

    hardware: Hardware
    model_fingerprint: str
    model: str
    dtype: str
    created: str
    settings: Mapping[str, int]
    samples: tuple[StepSample, ...]
    cost: StepCost
    r_squared: Mapping[str, float]

    @property
    def key(self) -> str:
        """Names what it is valid for; see `calibration_key`."""
        return calibration_key(self.hardware, self.model_fingerprint, self.dtype)

    @property
    def prior_samples(self) -> tuple[StepSample, ...]:
        """What a job's own fit starts from: each steady step once, and all switched ones."""
        switched = (sample for sample in self.samples if sample.switched)
        return (*steady_medians(self.samples), *switched)

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json.dumps` takes and `from_json` reads."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        samples = [list(sample) for sample in self.samples]
        return {"version": VERSION, **plain, "samples": samples, "cost": asdict(self.cost)}

    @classmethod
    def from_json(cls, data: object) -> Calibration:
        """Read what `to_json` wrote.

        Raises:
            ValueError: naming the field that is missing, unknown or of the wrong kind.
        """
        plain = _mapping(data, "the calibration")
        version = plain.get("version")
        if version != VERSION:
            raise ValueError(f"version is {version!r}; this release reads version {VERSION}")
        _check_names(plain, {"version", *(item.name for item in fields(cls))}, "the calibration")
        return cls(
            hardware=_values(plain, "hardware", (str, int)),
            **{name: _text(plain, name) for name in _TEXTS},
            settings=_values(plain, "settings", (int,)),
            samples=_samples(plain["samples"]),
            cost=_cost(_values(plain, "cost", (int, float))),
            r_squared=_values(plain, "r_squared", (int, float)),
        )


_TEXTS = ("model_fingerprint", "model", "dtype", "created")


def calibration_key(hardware: Hardware, model_fingerprint: str, dtype: str) -> str:
    """16 hex digits that are the same for the same hardware, model content and number format."""
    what = {"hardware": dict(hardware), "model": model_fingerprint, "dtype": dtype}
    text = json.dumps(what, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def calibrated(
    samples: Iterable[StepSample],
    *,
    hardware: Hardware,
    model_fingerprint: str,
    model: str,
    dtype: str,
    created: str,
    settings: Mapping[str, int],
) -> Calibration:
    """A calibration from measured steps.

    Raises:
        ValueError: there are no prefill or no decode steps among them.
    """
    kept = tuple(samples)
    cost = fit_steps(kept)
    return Calibration(
        hardware=dict(hardware),
        model_fingerprint=model_fingerprint,
        model=model,
        dtype=dtype,
        created=created,
        settings=dict(settings),
        samples=kept,
        cost=cost,
        r_squared=r_squared(kept, cost),
    )


# -- fitting --


def steady_medians(samples: Iterable[StepSample]) -> list[StepSample]:
    """One sample for each size of step: the median of its repetitions, those after a switch left
    out.
    """
    return [
        StepSample(*size[:3], elapsed_s)
        for size, elapsed_s in _medians(samples).items()
        if not size[3]
    ]


def _medians(samples: Iterable[StepSample]) -> dict[_Size, float]:
    return {size: median(times) for size, times in _repetitions(samples).items()}


def _repetitions(samples: Iterable[StepSample]) -> dict[_Size, list[float]]:
    found: defaultdict[_Size, list[float]] = defaultdict(list)
    for item in samples:
        size = item.num_prefill_tokens, item.num_decode_tokens, item.num_context_tokens
        found[(*size, item.switched)].append(item.elapsed_s)
    return found


def fit_steps(samples: Iterable[StepSample]) -> StepCost:
    """`CostFit` over the medians, with the measured cost of a switch.

    Raises:
        ValueError: there are no prefill or no decode steps.
    """
    kept = tuple(samples)
    fit = CostFit(min_samples=1)
    fit.add(steady_medians(kept))
    cost = fit.cost()
    if cost is None:
        counts = {kind: fit.num_samples(kind) for kind in get_args(StepKind)}
        raise ValueError(f"a calibration needs prefill and decode steps; there are {counts}")
    return replace(cost, alpha_switch=switch_s(kept))


def switch_s(samples: Iterable[StepSample]) -> float:
    """Seconds that a change from decode to prefill and back takes beside the two steps: what steps
    took longer behind one of another kind than the same steps behind one of their own. At least 0.
    """
    medians = _medians(samples)
    extra: defaultdict[bool, list[float]] = defaultdict(list)
    for size, elapsed_s in medians.items():
        steady_s = medians.get((*size[:3], False))
        if size[3] and steady_s is not None:
            extra[size[0] > 0].append(elapsed_s - steady_s)
    return max(0.0, sum(median(times) for times in extra.values()))


def noise(samples: Iterable[StepSample]) -> float:
    """How far repetitions of a steady step are from their median, as a share of it: the mean, of
    the median size of step. An idle machine has 0.01 to 0.05.
    """
    repetitions = _repetitions(item for item in samples if not item.switched)
    shares = [
        fmean(abs(elapsed_s - median(times)) for elapsed_s in times) / median(times)
        for times in repetitions.values()
        if median(times) > 0
    ]
    return median(shares) if shares else 0.0


def r_squared(samples: Iterable[StepSample], cost: StepCost) -> dict[str, float]:
    """Share of the variance of the steady medians that a cost explains, by kind of step; kinds of
    which fewer than two sizes were measured are left out.
    """
    by_kind: defaultdict[StepKind, list[StepSample]] = defaultdict(list)
    for item in steady_medians(samples):
        by_kind[item.kind].append(item)
    return {kind: _explained(steps, cost) for kind, steps in by_kind.items() if len(steps) > 1}


def _explained(steps: Sequence[StepSample], cost: StepCost) -> float:
    measured = np.array([step.elapsed_s for step in steps])
    predicted = np.array([cost.step_s(*step[:3]) for step in steps])
    spread = float(((measured - measured.mean()) ** 2).sum())
    return 1.0 - float(((measured - predicted) ** 2).sum()) / spread if spread else 0.0


def interference(samples: Iterable[StepSample], cost: StepCost) -> list[ShareCost]:
    """The interference curve: mixed steps by decode share, in steps of a tenth."""
    by_share: defaultdict[int, list[StepSample]] = defaultdict(list)
    for item in steady_medians(samples):
        if item.kind == "mixed":
            by_share[round(10 * _decode_share([item]))].append(item)
    return [_share_cost(steps, cost) for _, steps in sorted(by_share.items())]


def _share_cost(steps: Sequence[StepSample], cost: StepCost) -> ShareCost:
    num_tokens = sum(step.num_prefill_tokens + step.num_decode_tokens for step in steps)
    apart_s = sum(
        cost.step_s(step.num_prefill_tokens, 0)
        + cost.step_s(0, step.num_decode_tokens, step.num_context_tokens)
        for step in steps
    )
    share = _decode_share(steps)
    return ShareCost(
        decode_share=share,
        mean_tokens=num_tokens / len(steps),
        mixed_s=sum(step.elapsed_s for step in steps) / num_tokens,
        apart_s=apart_s / num_tokens,
        mixed_marginal_s=cost.mixed_marginal_s(share),
        apart_marginal_s=(1 - share) * cost.beta_p + share * cost.beta_d,
    )


def _decode_share(steps: Sequence[StepSample]) -> float:
    decode = sum(step.num_decode_tokens for step in steps)
    return decode / (decode + sum(step.num_prefill_tokens for step in steps))


# -- reading --


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {_short(value)}; it must be an object")
    return cast("Mapping[str, Any]", value)


def _check_names(plain: Mapping[str, Any], known: set[str], what: str) -> None:
    missing, unknown = known - plain.keys(), plain.keys() - known
    if missing:
        raise ValueError(f"{what} lacks {', '.join(sorted(missing))}")
    if unknown:
        raise ValueError(f"{what} has the unknown {', '.join(sorted(unknown))}")


def _text(plain: Mapping[str, Any], name: str) -> str:
    value = plain[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_short(value)}; it must be text")
    return value


def _values(plain: Mapping[str, Any], name: str, kinds: tuple[type[_T], ...]) -> dict[str, _T]:
    found = _mapping(plain[name], name)
    for key, value in found.items():
        finite = not isinstance(value, float) or isfinite(value)
        if not isinstance(value, kinds) or isinstance(value, bool) or not finite:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name}.{key} is {_short(value)}; it must be {wanted}")
    return dict(found)


def _samples(value: object) -> tuple[StepSample, ...]:
    if not isinstance(value, list):
        raise ValueError(f"samples is {_short(value)}; it must be a list")
    return tuple(_sample(item) for item in cast("list[object]", value))


def _sample(item: object) -> StepSample:
    match item:
        case [int(), int(), int(), float() | int(), bool()] if min(item[:4]) >= 0 and _finite(item):
            return StepSample(*cast("list[Any]", item))
        case _:
            raise ValueError(
                f"a sample is {_short(item)}; it must be three counts, seconds and a truth value"
            )


def _finite(values: Iterable[float]) -> bool:
    return all(isfinite(value) for value in values)


def _cost(values: Mapping[str, float]) -> StepCost:
    _check_names(values, {item.name for item in fields(StepCost)}, "cost")
    return StepCost(**values)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
