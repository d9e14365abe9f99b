"""What a step costs: prefill, decode and mixed steps, fitted to measured ones. Pure arithmetic.

Source: `exclusive_batching.md` A2. Seconds of a step, with L prefill tokens, n decode tokens, c KV
positions that the decode tokens read, n_tok = L + n and r = n / n_tok:

    prefill  alpha_p  + beta_p L
    decode   alpha_d  + beta_d n + gamma c
    mixed    alpha_mb + n_tok (a + b r + c2 r^2) + gamma c

The paper's decode cost has no context term: on its GPUs attention is a small part of a step at the
context lengths it uses. On a CPU it is not, so the term is fitted, and the closed forms are given
`decode_marginal_s` at the mean context at hand. The mixed fit has an intercept of its own. The
coefficients that the paper's code ships for one GPU were a fit of 1 / throughput, which holds the
fixed cost already, and so counted it twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

StepKind = Literal["prefill", "decode", "mixed"]


class StepSample(NamedTuple):
    """A measured step.

    Attributes:
        switched: the step before it was of another kind.
    """

    num_prefill_tokens: int
    num_decode_tokens: int
    num_context_tokens: int
    elapsed_s: float
    switched: bool = False

    @property
    def kind(self) -> StepKind:
        if not self.num_decode_tokens:
            return "prefill"
        return "mixed" if self.num_prefill_tokens else "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Coefficients of one model on one device. Seconds, seconds per token, seconds per position.

    Attributes:
        alpha_p: fixed cost of a prefill step.
        beta_p: per prefill token.
        alpha_d: fixed cost of a decode step.
        beta_d: per decode token.
        alpha_mb: fixed cost of a mixed step.
        mix_a: per token of a mixed step at decode share 0.
        mix_b: its slope in the decode share.
        mix_c: its curvature in the decode share.
        gamma: per KV position that a decode token reads.
        alpha_switch: what a change from decode to prefill and back costs beside the steps.
    """

    alpha_p: float
    beta_p: float
    alpha_d: float
    beta_d: float
    alpha_mb: float
    mix_a: float
    mix_b: float = 0.0
    mix_c: float = 0.0
    gamma: float = 0.0
    alpha_switch: float = 0.0

    def step_s(
        self, num_prefill_tokens: int, num_decode_tokens: int, num_context_tokens: int = 0
    ) -> float:
        """Predicted seconds of a step."""
        num_tokens = num_prefill_tokens + num_decode_tokens
        if not num_tokens:
            return 0.0
        context_s = self.gamma * num_context_tokens
        if not num_decode_tokens:
            return self.alpha_p + self.beta_p * num_prefill_tokens
        if not num_prefill_tokens:
            return self.alpha_d + self.beta_d * num_decode_tokens + context_s
        marginal_s = self.mixed_marginal_s(num_decode_tokens / num_tokens)
        return self.alpha_mb + marginal_s * num_tokens + context_s

    def mixed_marginal_s(self, decode_share: float) -> float:
        """beta_MB^e(r): seconds per token of a mixed step, its context apart."""
        return self.mix_a + decode_share * (self.mix_b + decode_share * self.mix_c)

    def decode_marginal_s(self, mean_context_tokens: float) -> float:
        """Seconds per decode token that reads so many positions."""
        return self.beta_d + self.gamma * mean_context_tokens

    def interference_threshold(self) -> float | None:
        """r*: the smallest decode share at which a token costs more in a mixed step than in a pure
        decode step; None when there is none below 1.
        """
        shares = np.linspace(0.0, 1.0, 1001)
        above = self.mix_a + shares * (self.mix_b + shares * self.mix_c) > self.beta_d
        return float(shares[above.argmax()]) if above.any() else None

    def to_json(self) -> Mapping[str, float]:
        return asdict(self)


def _columns(kind: StepKind, samples: list[StepSample]) -> np.ndarray:
    """Regressors of a kind of step, one row a sample."""
    prefill = np.array([s.num_prefill_tokens for s in samples], float)
    decode = np.array([s.num_decode_tokens for s in samples], float)
    context = np.array([s.num_context_tokens for s in samples], float)
    ones, tokens = np.ones(len(samples)), prefill + decode
    share = decode / tokens
    columns: dict[StepKind, list[np.ndarray]] = {
        "prefill": [ones, prefill],
        "decode": [ones, decode, context],
        "mixed": [ones, tokens, tokens * share, tokens * share**2],
    }
    return np.stack(columns[kind], axis=1)


def non_negative_fit(x: np.ndarray, y: np.ndarray, *, free: tuple[int, ...] = ()) -> np.ndarray:
    """Least squares with coefficients clipped at 0, the others fitted again without the clipped
    ones.

    Args:
        x: (samples, regressors).
        y: (samples,).
        free: regressors that may be negative.

    Returns:
        (regressors,).
    """
    kept = list(range(x.shape[1]))
    scale = np.maximum(np.abs(x).max(axis=0), 1e-12)
    while True:
        fitted = np.zeros(x.shape[1])
        solution, *_ = np.linalg.lstsq(x[:, kept] / scale[kept], y, rcond=None)
        fitted[kept] = solution / scale[kept]
        negative = [index for index in kept if fitted[index] < 0 and index not in free]
        if not negative:
            return fitted
        kept.remove(min(negative, key=lambda index: fitted[index] * scale[index]))


KINDS: tuple[StepKind, ...] = ("prefill", "decode", "mixed")
CALIBRATED_WEIGHT = 0.3
"""Of a stored sample beside one of this job's own."""
ASSUMED_WEIGHT = 0.02
"""Of an assumed sample: it decides only where nothing was measured."""


MIN_CALIBRATED = 2
"""Sizes of prefill and of decode steps that make a calibration: two tell a line."""


class _Weighted(NamedTuple):
    sample: StepSample
    weight: float


class CostFit:
    """Fits a `StepCost` to a job's steps, upon what a calibration measured before.

    Steps are kept by size class (kind, and powers of two of their prefill, decode and context
    tokens), the latest few of each, so that a long stretch of equal steps does not wash out the
    only ones that tell the fixed cost from the marginal one. Residuals are relative: noise grows
    with the step. Steps that took far longer than the fit says are the machine's, not the model's
    (another process, a page fault): the fit is repeated once without residuals above 3 median
    absolute deviations.

    A calibration's samples count less than the job's own, and are first scaled by how much slower
    or faster the job's steps are than the calibration says. Where neither has seen mixed steps,
    mixing is taken to cost what its parts cost apart, so that nothing is claimed that was not seen.

    Args:
        calibration: measured earlier on this hardware and model; may be empty.
        per_class: steps kept of each size class.
        min_samples: of a kind, before its fit counts.
    """

    def __init__(
        self,
        calibration: Iterable[StepSample] = (),
        *,
        per_class: int = 16,
        min_samples: int = 4,
    ) -> None:
        self._per_class = per_class
        self._min_samples = min_samples
        self._calibration = tuple(calibration)
        self._prior = _fit_all([_Weighted(s, 1.0) for s in self._calibration], MIN_CALIBRATED)
        self._classes: dict[tuple[int, ...], deque[StepSample]] = {}
        self._drift: deque[float] = deque(maxlen=200)
        self._num: dict[StepKind, int] = dict.fromkeys(KINDS, 0)

    @property
    def has_calibration(self) -> bool:
        return self._prior is not None

    @property
    def calibrated(self) -> StepCost | None:
        """What the calibration alone says."""
        return self._prior

    def add(self, samples: Iterable[StepSample]) -> None:
        """Take in measured steps."""
        for sample in samples:
            if not (sample.num_prefill_tokens or sample.num_decode_tokens):
                continue
            key = (
                int(sample.switched),
                sample.num_prefill_tokens.bit_length(),
                sample.num_decode_tokens.bit_length(),
                sample.num_context_tokens.bit_length(),
            )
            kept = self._classes.setdefault(key, deque(maxlen=self._per_class))
            kept.append(sample)
            self._num[sample.kind] += 1
            if self._prior is not None:
                self._drift.append(sample.elapsed_s / max(1e-9, self._prior.step_s(*sample[:3])))

    def num_samples(self, kind: StepKind) -> int:
        """Steps of a kind that this job has measured."""
        return self._num[kind]

    def spans(self, kind: StepKind) -> bool:
        """Whether the job's own steps of a kind differ enough in size to tell fixed from marginal
        cost: a factor of 3.
        """
        sizes = [s.num_prefill_tokens + s.num_decode_tokens for s in self._own() if s.kind == kind]
        return bool(sizes) and max(sizes) >= 3 * min(sizes)

    def cost(self) -> StepCost | None:
        """The cost at hand; None while prefill or decode steps are too few, here and in the
        calibration.
        """
        if not self._classes:
            return self._prior
        drift = float(np.median(self._drift)) if self._drift else 1.0
        samples = [_Weighted(sample, 1.0) for sample in self._own()]
        for sample in self._calibration:
            scaled = sample._replace(elapsed_s=sample.elapsed_s * drift)
            samples.append(_Weighted(scaled, CALIBRATED_WEIGHT))
        return _fit_all(samples, MIN_CALIBRATED if self.has_calibration else self._min_samples)

    def _own(self) -> Iterable[StepSample]:
        return (sample for kept in self._classes.values() for sample in kept)


def _fit_all(samples: Sequence[_Weighted], min_samples: int) -> StepCost | None:
    """All kinds, each upon the ones before it."""
    by_kind = {kind: [item for item in samples if item.sample.kind == kind] for kind in KINDS}
    if min(len(by_kind["prefill"]), len(by_kind["decode"])) < min_samples:
        return None
    alpha_p, beta_p = _fit("prefill", by_kind["prefill"])
    assumed = [_Weighted(StepSample(0, n, 0, alpha_p + beta_p * n), ASSUMED_WEIGHT) for n in (1, 8)]
    alpha_d, beta_d, gamma = _fit("decode", by_kind["decode"] + assumed)
    apart = StepCost(
        alpha_p=alpha_p,
        beta_p=beta_p,
        alpha_d=alpha_d,
        beta_d=beta_d,
        gamma=gamma,
        alpha_mb=alpha_d,
        mix_a=beta_p,
        mix_b=beta_d - beta_p,
    )
    mixed = by_kind["mixed"] + _assumed_mixed(by_kind["mixed"], apart)
    alpha_mb, mix_a, mix_b, mix_c = _fit("mixed", mixed, gamma=gamma)
    cost = replace(apart, alpha_mb=alpha_mb, mix_a=mix_a, mix_b=mix_b, mix_c=mix_c)
    return replace(cost, alpha_switch=_switch_cost(samples, cost))


def _assumed_mixed(measured: Sequence[_Weighted], apart: StepCost) -> list[_Weighted]:
    """Mixed steps at what their parts cost apart, over the range that policies compare."""
    largest = max((i.sample.num_prefill_tokens + i.sample.num_decode_tokens for i in measured),
                  default=1024)  # fmt: skip
    return [
        _Weighted(StepSample(p, d, 0, apart.step_s(p, d)), ASSUMED_WEIGHT)
        for tokens in (largest, max(8, largest // 8))
        for d in (max(1, tokens // 10), tokens // 2, tokens * 9 // 10)
        if (p := tokens - d) > 0
    ]


def _switch_cost(samples: Sequence[_Weighted], cost: StepCost) -> float:
    """What the first step after a change of kind costs beside its size, prefill and decode
    together: the median of their excess over the fit, at least 0.
    """
    excess_s = 0.0
    for kind in ("prefill", "decode"):
        switched = [s for s, _ in samples if s.kind == kind and s.switched]
        steady = [s for s, _ in samples if s.kind == kind and not s.switched]
        if len(switched) >= 8 and len(steady) >= 8:
            excess_s += _median_excess(switched, cost) - _median_excess(steady, cost)
    return max(0.0, excess_s)


def _median_excess(samples: Iterable[StepSample], cost: StepCost) -> float:
    return float(np.median([s.elapsed_s - cost.step_s(*s[:3]) for s in samples]))


def _fit(kind: StepKind, items: Sequence[_Weighted], *, gamma: float = 0.0) -> list[float]:
    """Coefficients of a kind by weighted least squares of relative residuals."""
    samples = [item.sample for item in items]
    x = _columns(kind, samples)
    y = np.array([sample.elapsed_s for sample in samples])
    scale = np.sqrt([item.weight for item in items]) / np.maximum(y, 1e-9)
    free: tuple[int, ...] = ()
    if kind == "mixed":
        y = y - gamma * np.array([sample.num_context_tokens for sample in samples])
        free = (2, 3)
    return _robust(x * scale[:, None], y * scale, free=free)


def _robust(x: np.ndarray, y: np.ndarray, *, free: tuple[int, ...] = ()) -> list[float]:
    fitted = non_negative_fit(x, y, free=free)
    residual = np.abs(y - x @ fitted)
    limit = 3 * 1.4826 * np.median(residual)
    good = residual <= limit
    if limit > 1e-6 and good.sum() > x.shape[1] + 2:
        fitted = non_negative_fit(x[good], y[good], free=free)
    return [float(value) for value in fitted]
