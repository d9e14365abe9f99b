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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import numpy as np

from schedulers.view import Outcome

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

    @classmethod
    def of(cls, outcome: Outcome) -> StepSample:
        return cls(
            outcome.num_prefill_tokens,
            outcome.num_decode_tokens,
            outcome.num_context_tokens,
            outcome.elapsed_s,
        )


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


class CostFit:
    """Fits a `StepCost` to the latest steps of each kind.

    Steps that took far longer than their kind's median relative error are the machine's, not the
    model's (another process, a page fault): the fit is repeated once without residuals above 3
    median absolute deviations.

    Args:
        prior: used for what has not been seen often enough.
        window: steps kept per kind.
        min_samples: steps of a kind before its own fit counts.
    """

    def __init__(
        self, prior: StepCost | None = None, *, window: int = 400, min_samples: int = 24
    ) -> None:
        self._prior = prior
        self._samples: dict[StepKind, deque[StepSample]] = {
            "prefill": deque(maxlen=window),
            "decode": deque(maxlen=window),
            "mixed": deque(maxlen=window),
        }
        self._min_samples = min_samples

    def add(self, samples: Iterable[StepSample]) -> None:
        """Take in measured steps."""
        for sample in samples:
            if sample.num_prefill_tokens or sample.num_decode_tokens:
                self._samples[sample.kind].append(sample)

    def num_samples(self, kind: StepKind) -> int:
        return len(self._samples[kind])

    def cost(self) -> StepCost | None:
        """The cost at hand; None while prefill or decode steps are too few and there is no prior.

        Without mixed steps of its own, mixing is taken to cost what its parts cost apart: the fixed
        cost of a decode step and each token's own marginal cost, so that nothing is claimed that
        was not seen.
        """
        fitted: dict[str, float] = {}
        for kind in ("prefill", "decode", "mixed"):
            fitted.update(self._fit(kind))
        if self._prior is not None:
            return StepCost(**{**asdict(self._prior), **fitted})
        if "alpha_p" not in fitted or "alpha_d" not in fitted:
            return None
        apart = {
            "alpha_mb": fitted["alpha_d"],
            "mix_a": fitted["beta_p"],
            "mix_b": fitted["beta_d"] - fitted["beta_p"],
        }
        return StepCost(**{**apart, **fitted})

    def _fit(self, kind: StepKind) -> dict[str, float]:
        samples = list(self._samples[kind])
        if len(samples) < self._min_samples:
            return {}
        x = _columns(kind, samples)
        y = np.array([sample.elapsed_s for sample in samples])
        if kind == "mixed":
            gamma = self._fit("decode").get("gamma", self._prior.gamma if self._prior else 0.0)
            y = y - gamma * np.array([sample.num_context_tokens for sample in samples])
            values = _robust(x, y, free=(2, 3))
            return dict(zip(("alpha_mb", "mix_a", "mix_b", "mix_c"), values, strict=True))
        names = ("alpha_p", "beta_p") if kind == "prefill" else ("alpha_d", "beta_d", "gamma")
        return dict(zip(names, _robust(x, y), strict=True))


def _robust(x: np.ndarray, y: np.ndarray, *, free: tuple[int, ...] = ()) -> list[float]:
    fitted = non_negative_fit(x, y, free=free)
    residual = np.abs(y - x @ fitted)
    limit = 3 * 1.4826 * np.median(residual)
    good = residual <= limit
    if limit > 0 and good.sum() > x.shape[1] + 2:
        fitted = non_negative_fit(x[good], y[good], free=free)
    return [float(value) for value in fitted]
