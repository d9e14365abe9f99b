"""What a policy has learned of its workload and its machine, and what follows from it.

Owned by one policy (a hybrid shares one between its two). Fed with every outcome; lengths, costs
and thresholds are computed anew only every so many completions, so that the hot path is counters
and deques. What was computed is told as events, once.
Source: `exclusive_batching.md` A3, A5 and A7.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from schedulers.cost import CostFit, StepCost, StepKind, StepSample
from schedulers.crossover import (
    Crossover,
    RequestCost,
    crossover,
    crossover_holders,
    hazard_correction,
    optimal_threshold,
    refill_size,
    switch_cost,
)
from schedulers.events import CostModel, MemorySizing, PolicyEvent
from schedulers.lengths import LengthWindow
from schedulers.memory import BatchSizer, Geometric, Sizing, SizingForm
from schedulers.view import Budget, Outcome, View
from schedulers.workload import (
    Present,
    Workload,
    assumed_workload,
    holders_of,
    measured_workload,
)


class Threshold(NamedTuple):
    """When a decode phase gives way: after `refill` of `holders` have finished.

    Attributes:
        theta0: of Prop. 1.
        correction: of Thm. 2, for a rising hazard.
        refill: k*, at least 1: the finite-N rule, moved by the correction.
        holders: N that it is for.
        switch_s: fixed cost of a phase switch.
    """

    theta0: float
    correction: float
    refill: int
    holders: int
    switch_s: float

    @property
    def theta(self) -> float:
        return self.refill / self.holders


MAX_CORRECTION = 0.5
"""Most that a rising hazard moves theta, in theta_0: beyond it, larger corrections only lost."""

UNIT_COST = StepCost(
    alpha_p=1.0, beta_p=1 / 128, alpha_d=1.0, beta_d=1 / 128, alpha_mb=1.0, mix_a=1 / 128
)
"""Before steps are measured: a prefill step has the fixed cost of a decode step, and 128 tokens
double it."""


SIZING_WINDOW = 1000
"""Finished lengths that the memory-safe N is computed from: the second moment of a long-tailed
output needs more of them than the rest does."""
UNKNOWN_CROSSOVER = Crossover(0.0, 0.0, RequestCost(0.0, 0.0), RequestCost(0.0, 0.0))
"""Before costs are known."""


class Estimator:
    """Lengths, costs and what follows from them.

    Args:
        overflow_probability: bound on the chance that N holders outgrow KV memory.
        sizing: the form of the memory-safe N.
        calibration: steps measured earlier on this hardware and model.
        theta_floor: least share of the holders that a refill waits for; 0 but to repeat the paper's
            own runs, which needed 0.7.
        cold_mean_output_tokens: most that is assumed before any length is known.
        window: finished sequences that count.
        min_samples: of them, before they count.
        update_every: completions between updates.
    """

    def __init__(
        self,
        *,
        overflow_probability: float = 0.01,
        sizing: SizingForm = "moments",
        calibration: Iterable[StepSample] = (),
        theta_floor: float = 0.0,
        cold_mean_output_tokens: float = 128.0,
        window: int = 500,
        min_samples: int = 30,
        update_every: int = 100,
    ) -> None:
        self.lengths = LengthWindow(size=SIZING_WINDOW, recent=window)
        self.sizer = BatchSizer(
            self.lengths,
            overflow_probability=overflow_probability,
            form=sizing,
            min_samples=min_samples,
        )
        self.costs = CostFit(calibration)
        self._theta_floor = theta_floor
        self._cold_mean_output_tokens = cold_mean_output_tokens
        self._min_samples = min_samples
        self._update_every = update_every
        self._updated_at = 0
        self._last_kind: StepKind | None = None
        self._present: Present | None = None
        self.workload: Workload = assumed_workload(None, cold_mean_output_tokens)
        self._cost = self.costs.calibrated
        self._thresholds: dict[tuple[int, int], Threshold] = {}
        self._sizing: tuple[Sizing, int] | None = None
        self._num_steps = 0
        self._num_overflows = 0
        self._events: list[PolicyEvent] = []
        if self._cost is not None:
            self._tell_cost(self._cost)

    # -- what happens --

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step."""
        sample = StepSample(
            outcome.num_prefill_tokens,
            outcome.num_decode_tokens,
            outcome.num_context_tokens,
            outcome.elapsed_s,
        )
        switched = self._last_kind is not None and sample.kind != self._last_kind
        self._last_kind = sample.kind
        self.costs.add((sample._replace(switched=switched),))
        self._num_steps += 1
        self._num_overflows += outcome.num_suspended > 0
        self.lengths.add(outcome.finished, outcome.num_decode_tokens)

    def look(self, view: View) -> bool:
        """Called once a plan: `update` when enough sequences have finished since the last time, and
        at the first view. True when lengths were measured anew.
        """
        known = self.workload.num_samples > 0
        wait = self._update_every if known else self._min_samples
        is_due = self.lengths.num_added - self._updated_at >= wait
        if is_due or self._present is None:
            self.update(view)
        return is_due

    def take_events(self) -> tuple[PolicyEvent, ...]:
        """What was computed since the last call."""
        events, self._events = tuple(self._events), []
        return events

    def tell(self, event: PolicyEvent) -> None:
        """Add a policy's own event."""
        self._events.append(event)

    # -- lengths and costs --

    @property
    def cost(self) -> StepCost | None:
        """The costs as of the last update; None while prefill or decode were not measured."""
        if self._cost is None:
            self._refit()
        return self._cost

    @property
    def cost_or_unit(self) -> StepCost:
        """The costs at hand, else `UNIT_COST`."""
        return self.cost or UNIT_COST

    def update(self, view: View) -> None:
        """Compute lengths, costs and thresholds anew."""
        self._present = Present.of(view) or self._present
        self._updated_at = self.lengths.num_added
        if len(self.lengths) < self._min_samples:
            self.workload = assumed_workload(self._present, self._cold_mean_output_tokens)
        else:
            self.workload = measured_workload(self.lengths, self._present)
        self._refit()

    def _refit(self) -> None:
        self._thresholds.clear()
        cost = self.costs.cost()
        if cost is not None and cost != self._cost:
            self._cost = cost
            self._tell_cost(cost)

    def _tell_cost(self, cost: StepCost) -> None:
        self.tell(
            CostModel(
                source="online" if self._num_steps else "calibration",
                num_prefill=self.costs.num_samples("prefill"),
                num_decode=self.costs.num_samples("decode"),
                num_mixed=self.costs.num_samples("mixed"),
                cost=cost,
                interference_threshold=cost.interference_threshold(),
            )
        )

    # -- what follows --

    def max_holders(self, view: View, budget: Budget) -> int:
        """Memory-safe N under the budget; full reservation needs no estimate."""
        if budget.reservation == "full":
            return budget.max_seqs
        ends = (seq.max_total_tokens for group in (view.running, view.waiting) for seq in group)
        capacity_tokens = view.num_blocks * view.block_size
        sizing = self.sizer.size(
            capacity_tokens, ends, view.block_size, holders_of(view), self._geometric
        )
        holders = min(budget.max_seqs, sizing.holders)
        if self._is_news(sizing, holders):
            self._sizing = sizing, holders
            self.tell(self._sizing_event(sizing, holders, capacity_tokens))
        return holders

    def _geometric(self) -> Geometric:
        workload = self.workload
        cost = self.cost_or_unit
        theta = optimal_threshold(workload.phase_hazard, cost.alpha_p / max(cost.alpha_d, 1e-9))
        return Geometric(theta, workload.phase_hazard, workload.mean_prompt_tokens)

    def _is_news(self, sizing: Sizing, holders: int) -> bool:
        """The first, another form, or an N that differs by more than 2 %."""
        if self._sizing is None:
            return True
        known, known_holders = self._sizing
        if sizing.form != known.form:
            return True
        return sizing.form != "longest" and abs(holders - known_holders) > 0.02 * known_holders

    def _sizing_event(self, sizing: Sizing, holders: int, capacity_tokens: int) -> MemorySizing:
        mean, std, *_ = sizing.moments
        cut = "" if holders == sizing.holders else f", cut from {sizing.holders}"
        return MemorySizing(
            form=sizing.form,
            capacity_tokens=capacity_tokens,
            overflow_probability=self.sizer.overflow_probability,
            num_samples=sizing.num_samples,
            mean_tokens=mean,
            std_tokens=std,
            holders=holders,
            uncut_holders=sizing.holders,
            holders_paper=sizing.paper,
            holders_paper_sigma=sizing.paper_sigma,
            num_steps=self._num_steps,
            num_overflows=self._num_overflows,
            reason=f"N={holders}{cut}: {mean:.0f} +- {std:.0f} tokens a holder",
        )

    def threshold(self, holders: int, max_batch_tokens: int) -> Threshold:
        """k* for N holders, as of the last update."""
        key = holders, max_batch_tokens
        known = self._thresholds.get(key)
        if known is None:
            known = self._make_threshold(holders, max_batch_tokens)
            self._thresholds[key] = known
        return known

    def _make_threshold(self, holders: int, max_batch_tokens: int) -> Threshold:
        cost, workload = self.cost_or_unit, self.workload
        p0 = workload.phase_hazard
        alpha_d = max(cost.alpha_d, 1e-9)
        beta_d = cost.decode_marginal_s(workload.lengths.context_tokens)
        guess = optimal_threshold(p0, cost.alpha_p / alpha_d)
        refill_tokens = guess * holders * workload.mean_prompt_tokens
        switch_s = switch_cost(cost, refill_tokens, max_batch_tokens)
        theta0 = optimal_threshold(p0, switch_s / alpha_d)
        shift = hazard_correction(theta0, p0, workload.phase_slope, beta_d * holders / alpha_d)
        correction = min(shift, MAX_CORRECTION * theta0)
        best = refill_size(holders, p0, switch_s=switch_s, alpha_d=alpha_d, beta_d=beta_d)
        refill = max(1, best + round(correction * holders), round(self._theta_floor * holders))
        return Threshold(theta0, correction, min(holders, refill), holders, switch_s)

    def compare(self, holders: int, max_batch_tokens: int) -> Crossover | None:
        """Exclusive against mixed batching at N holders; None while costs are unknown."""
        cost, workload = self.cost, self.workload
        if cost is None:
            return None
        return crossover(
            cost,
            workload.lengths,
            holders=holders,
            refill=self.threshold(holders, max_batch_tokens).refill,
            max_batch_tokens=max_batch_tokens,
        )

    def crossover_holders(self, most: int, max_batch_tokens: int) -> int | None:
        """N_cross at the lengths and costs at hand, searched for up to `most`."""

        def margin(holders: int) -> float:
            found = self.compare(holders, max_batch_tokens)
            return -1.0 if found is None else found.margin

        return crossover_holders(margin, most=most)
