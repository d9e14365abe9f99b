"""What a policy has learned of its workload and its machine, and the threshold that follows.

Owned by one policy (a hybrid shares one between its two). Fed with every outcome; thresholds are
recomputed only every so many completions, so that the hot path is counters and deques.
Source: `exclusive_batching.md` A3 and A7.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from schedulers.cost import CostFit, StepCost, StepSample
from schedulers.crossover import (
    exact_refill_size,
    hazard_correction,
    optimal_threshold,
    switch_cost,
)
from schedulers.lengths import Hazard, fit_hazard
from schedulers.memory import BatchSizer
from schedulers.view import Budget, Finished, Outcome, View


class Workload(NamedTuple):
    """Lengths at hand: of the last finished sequences, or assumed before there are enough.

    Attributes:
        num_samples: finished sequences behind it; 0: assumed.
    """

    hazard: Hazard
    mean_prompt_tokens: float
    mean_output_tokens: float
    num_samples: int

    @property
    def mean_context_tokens(self) -> float:
        """Positions that a decode token reads on average."""
        return self.mean_prompt_tokens + self.mean_output_tokens / 2


class Threshold(NamedTuple):
    """When a decode phase gives way: after `refill` of `holders` have finished.

    Attributes:
        theta0: of Prop. 1.
        correction: of Thm. 2, for a rising hazard.
        refill: k*, at least 1: the exact finite-N rule, moved by the correction.
        holders: N that it is for.
        switch_ratio: fixed cost of a phase switch in fixed costs of a decode step.
    """

    theta0: float
    correction: float
    refill: int
    holders: int
    switch_ratio: float

    @property
    def theta(self) -> float:
        return self.refill / self.holders


UNIT_COST = StepCost(alpha_p=1.0, beta_p=0.0, alpha_d=1.0, beta_d=0.0, alpha_mb=1.0, mix_a=0.0)
"""Before steps are measured: a prefill step has the fixed cost of a decode step."""


class Estimator:
    """Lengths, costs and what follows from them.

    Args:
        overflow_probability: bound on the chance that N holders outgrow KV memory.
        prior_cost: of a calibration, until enough steps were measured.
        cold_mean_output_tokens: assumed before any length is known.
        window: finished sequences that count.
        min_samples: of them, before they count.
        update_every: completions between updates of the threshold.
    """

    def __init__(
        self,
        *,
        overflow_probability: float = 0.01,
        prior_cost: StepCost | None = None,
        cold_mean_output_tokens: float = 128.0,
        window: int = 500,
        min_samples: int = 30,
        update_every: int = 100,
    ) -> None:
        self.sizer = BatchSizer(overflow_probability=overflow_probability, min_samples=min_samples)
        self.costs = CostFit(prior_cost)
        self._cold_mean_output_tokens = cold_mean_output_tokens
        self._min_samples = min_samples
        self._update_every = update_every
        self._lengths: deque[Finished] = deque(maxlen=window)
        self._num_since_update = 0
        self._workload: Workload | None = None
        self._threshold: Threshold | None = None

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step."""
        self.costs.add((StepSample.of(outcome),))
        if outcome.finished:
            self.sizer.add(outcome.finished)
            self._lengths.extend(outcome.finished)
            self._num_since_update += len(outcome.finished)

    @property
    def workload(self) -> Workload:
        """The lengths as of the last update."""
        if self._workload is None or self._is_due:
            self._update()
        assert self._workload is not None
        return self._workload

    @property
    def _is_due(self) -> bool:
        known = self._workload is not None and self._workload.num_samples > 0
        wait = self._update_every if known else self._min_samples
        return self._num_since_update >= wait

    def _update(self) -> None:
        self._threshold = None
        self._num_since_update = 0
        num = len(self._lengths)
        if num < self._min_samples:
            mean = self._cold_mean_output_tokens
            self._workload = Workload(Hazard(1.0 / mean, 0.0), mean, mean, 0)
            return
        self._workload = Workload(
            hazard=fit_hazard(item.num_output_tokens for item in self._lengths),
            mean_prompt_tokens=sum(item.num_prompt_tokens for item in self._lengths) / num,
            mean_output_tokens=sum(item.num_output_tokens for item in self._lengths) / num,
            num_samples=num,
        )

    def max_holders(self, view: View, budget: Budget) -> int:
        """Memory-safe N under the budget; full reservation needs no estimate."""
        if budget.reservation == "full":
            return budget.max_seqs
        ends = (seq.max_total_tokens for group in (view.running, view.waiting) for seq in group)
        capacity_tokens = view.num_blocks * view.block_size
        safe = self.sizer.max_holders(capacity_tokens, ends, view.block_size)
        return min(budget.max_seqs, safe)

    def threshold(self, holders: int, max_batch_tokens: int) -> Threshold:
        """k* for N holders, as of the last update."""
        workload = self.workload
        known = self._threshold
        if known is None or known.holders != holders:
            known = self._threshold = self._make_threshold(workload, holders, max_batch_tokens)
        return known

    def _make_threshold(self, workload: Workload, holders: int, max_batch_tokens: int) -> Threshold:
        cost = self.costs.cost() or UNIT_COST
        hazard = workload.hazard
        # A hazard that starts near zero would say "never": no lower than the mean's.
        p0 = max(hazard.p0, 1.0 / max(1.0, workload.mean_output_tokens))
        alpha_d = max(cost.alpha_d, 1e-9)
        beta_d = cost.decode_marginal_s(workload.mean_context_tokens)
        guess = optimal_threshold(p0, cost.alpha_p / alpha_d)
        refill_tokens = guess * holders * workload.mean_prompt_tokens
        switch_s = switch_cost(cost, refill_tokens, max_batch_tokens)
        theta0 = optimal_threshold(p0, switch_s / alpha_d)
        correction = hazard_correction(theta0, p0, hazard.eta, beta_d * holders / alpha_d)
        exact = exact_refill_size(holders, p0, alpha_p=switch_s, alpha_d=alpha_d, beta_d=beta_d)
        refill = min(holders, max(1, exact + round(correction * holders)))
        return Threshold(theta0, correction, refill, holders, switch_s / alpha_d)
