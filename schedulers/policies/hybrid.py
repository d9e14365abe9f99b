"""EB+: exclusive or mixed batching, whichever is cheaper at the load, lengths and costs at hand.

Theory of operation (`exclusive_batching.md` A6, A7). One estimator feeds two policies, of which one
plans. Both know the same sequences, so a change of mode moves nothing and recomputes nothing.

The crossover is evaluated whenever the estimator has measured lengths anew, every 100 completions;
at once when demand (running and waiting, smoothed) has more than doubled; and at the first plan
when a calibration is at hand. The mode changes when the margin between the costs of a request
exceeds the hysteresis, and, but for the first choice, not again for `cooldown` evaluations.

    evaluate -> a kind of step is unmeasured -> probe -> evaluate
             -> margin beyond the hysteresis -> other mode, cooldown

Three departures from the paper. The cold start is exclusive, as its first prefill and decode phases
measure what the comparison needs, while a mixed start measures neither. What a mode does not show
by itself is probed: a few decode steps of part of the batch (they tell the fixed from the marginal
cost, which a full batch does not) and a few steps of the other mode, at the first evaluation and
seldom after it. And the hysteresis is a share of the cost, not a number of seconds that fits one
GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from schedulers.cost import StepKind
from schedulers.crossover import Crossover
from schedulers.estimate import UNKNOWN_CROSSOVER, Estimator
from schedulers.events import CrossoverEvaluation, Mode, Trigger
from schedulers.filling import PlanBuilder, is_decoding
from schedulers.policies.exclusive import Exclusive
from schedulers.policies.mixed import Mixed
from schedulers.view import Budget, Outcome, Plan, View


class _Probe(NamedTuple):
    """Steps that are taken to measure, in a mode that was not chosen.

    Attributes:
        kind: "decode": part of the batch; else the mode to try.
        num_steps: most that are still taken.
        share: of the decoding sequences.
        until: ends as soon as the job has measured so many steps of the mode's own kind.
    """

    kind: Literal["decode"] | Mode
    num_steps: int
    share: float = 1.0
    until: int = 0


OWN_KIND: dict[Mode, StepKind] = {"exclusive": "prefill", "mixed": "mixed"}
"""The kind of step that only one mode shows."""
PROBE_PATIENCE = 8
"""Steps that a probe may take for each step of its kind: at light load most are decode steps."""


class Hybrid:
    """Exclusive or mixed batching by the measured crossover.

    Args:
        estimator: shared by both; a fresh one by default.
        hysteresis: share of a request's cost that a change must save.
        cooldown: evaluations after a change that cannot change again.
        probe_steps: steps of a probe.
        probe_every: evaluations after which the other mode is measured again.
    """

    name = "hybrid"

    def __init__(
        self,
        estimator: Estimator | None = None,
        *,
        hysteresis: float = 0.005,
        cooldown: int = 3,
        probe_steps: int = 4,
        probe_every: int = 10,
    ) -> None:
        self._estimator = estimator or Estimator()
        self._exclusive = Exclusive(self._estimator)
        self._mixed = Mixed(self._estimator)
        self._hysteresis = hysteresis
        self._cooldown = cooldown
        self._probe_steps = probe_steps
        self._probe_every = probe_every
        self.mode: Mode = "exclusive"
        self._probes: list[_Probe] = []
        self._demand = 0.0
        self._has_looked = False
        self._cooldown_left = 0
        self._has_chosen = False
        self._num_since_probe = 0

    def plan(self, view: View, budget: Budget) -> Plan:
        updated = self._estimator.look(view)
        surge = self._note_demand(len(view.running) + len(view.waiting))
        if view.input_exhausted and not view.waiting:
            return self._policy(self.mode).plan(view, budget)  # nothing is left to decide
        while self._probes:
            plan = self._probe(view, budget)
            if plan is not None:
                return plan
            if not self._probes:
                self._evaluate("probed", view, budget)
        trigger = self._trigger(updated, surge)
        if trigger is not None:
            self._evaluate(trigger, view, budget)
        return self._policy(self.mode).plan(view, budget)

    def observe(self, outcome: Outcome) -> None:
        self._estimator.observe(outcome)

    def _policy(self, mode: Mode) -> Exclusive | Mixed:
        return self._exclusive if mode == "exclusive" else self._mixed

    # -- when --

    def _note_demand(self, present: int) -> bool:
        """Smooth what is in the system: fast up, slow down. True when it has jumped."""
        if not self._demand:
            self._demand = float(present)
            return False
        weight = 0.3 if present > self._demand else 0.03
        self._demand += weight * (present - self._demand)
        return present > 2.0 * self._demand

    def _trigger(self, updated: bool, surge: bool) -> Trigger | None:
        if not self._has_looked and self._estimator.costs.has_calibration:
            return "calibrated"
        if updated:
            return "completions" if self._has_looked else "unmeasured"
        return "surge" if surge and self._has_looked and not self._cooldown_left else None

    # -- whether --

    def _evaluate(self, trigger: Trigger, view: View, budget: Budget) -> None:
        """Look at the crossover, and change the mode or start a probe."""
        first, self._has_looked = not self._has_looked, True
        if trigger in ("surge", "probed"):
            self._estimator.update(view)  # the others come with an update
        max_holders = self._estimator.max_holders(view, budget)
        holders = max(1, min(max_holders, round(self._demand)))
        found = self._estimator.compare(holders, budget.max_batch_tokens)
        if first and not self._estimator.costs.has_calibration:
            self._probes = list(self._first_probes())
        before, reason = self.mode, self._decide(found)
        self._tell(trigger, found, holders, max_holders, budget, before, reason)
        if before != self.mode and self.mode == "exclusive":
            self._exclusive.resume()
        self._num_since_probe += 1
        if self._num_since_probe >= self._probe_every and not self._probes:
            self._num_since_probe = 0
            self._probes = [self._mode_probe(self._other)]

    @property
    def _other(self) -> Mode:
        return "mixed" if self.mode == "exclusive" else "exclusive"

    def _decide(self, found: Crossover | None) -> str:
        """Set the mode; returns why."""
        if found is None:
            return "prefill or decode steps are not measured yet"
        if self._probes:
            return "mixed steps are not measured yet: a few are tried"
        if self._cooldown_left:
            self._cooldown_left -= 1
            return f"cooldown after a change: {self._cooldown_left} more evaluations"
        cheaper: Mode = "exclusive" if found.margin > 0 else "mixed"
        gain = found.gain
        told = f"{cheaper} batching is {gain:.1%} cheaper a request"
        if cheaper == self.mode:
            return f"stays: {told}"
        if gain <= self._hysteresis:
            return f"stays: {told}, within the hysteresis of {self._hysteresis:.1%}"
        self.mode = cheaper
        self._cooldown_left = self._cooldown if self._has_chosen else 0
        self._has_chosen = True
        return told

    def _tell(
        self,
        trigger: Trigger,
        found: Crossover | None,
        holders: int,
        max_holders: int,
        budget: Budget,
        before: Mode,
        reason: str,
    ) -> None:
        estimator, batch = self._estimator, budget.max_batch_tokens
        workload, threshold = estimator.workload, estimator.threshold(holders, batch)
        shown = found or UNKNOWN_CROSSOVER
        tokens = workload.lengths.tokens
        estimator.tell(
            CrossoverEvaluation(
                trigger=trigger,
                p0=workload.hazard.p0,
                eta=workload.hazard.eta,
                mean_prompt_tokens=workload.mean_prompt_tokens,
                mean_output_tokens=workload.mean_output_tokens,
                num_samples=workload.num_samples,
                decode_share=workload.lengths.decode_tokens / tokens,
                demand=self._demand,
                holders=holders,
                max_holders=max_holders,
                theta0=threshold.theta0,
                correction=threshold.correction,
                theta=threshold.theta,
                refill=threshold.refill,
                cost=estimator.cost_or_unit,
                switch_s=threshold.switch_s,
                contention=shown.contention,
                amortisation=shown.amortisation,
                margin=shown.margin,
                hysteresis=self._hysteresis * shown.exclusive.total_s / tokens,
                crossover_holders=estimator.crossover_holders(max_holders, batch),
                exclusive_s=shown.exclusive.total_s,
                mixed_s=shown.mixed.total_s,
                mode_before=before,
                mode_after=self.mode,
                cooldown=self._cooldown_left,
                reason=reason,
            )
        )

    # -- probes --

    def _first_probes(self) -> Iterator[_Probe]:
        """What exclusive batching has not shown by itself."""
        for share in (0.1, 0.5):
            yield _Probe("decode", self._probe_steps // 2, share)
        yield self._mode_probe(self._other)

    def _mode_probe(self, mode: Mode) -> _Probe:
        measured = self._estimator.costs.num_samples(OWN_KIND[mode])
        steps = self._probe_steps
        return _Probe(mode, PROBE_PATIENCE * steps, until=measured + steps)

    def _is_over(self, probe: _Probe) -> bool:
        if probe.kind == "decode":
            return probe.num_steps < 1
        measured = self._estimator.costs.num_samples(OWN_KIND[probe.kind])
        return probe.num_steps < 1 or measured >= probe.until

    def _probe(self, view: View, budget: Budget) -> Plan | None:
        """The next step of the first probe; None when it is over."""
        probe = self._probes[0]
        if self._is_over(probe):
            del self._probes[0]
            return None
        if probe.kind == "decode":
            plan = self._partial_decode(view, budget, probe.share)
        else:
            size = self._usual_size(view, budget, probe) if probe.kind == "mixed" else budget
            plan = self._policy(probe.kind).plan(view, size)
        if plan is None:
            del self._probes[0]
            return None
        self._probes[0] = probe._replace(num_steps=probe.num_steps - 1)
        return replace(plan, reason=f"probe: {plan.reason}")

    def _usual_size(self, view: View, budget: Budget, probe: _Probe) -> Budget:
        """A budget of about the tokens that mixed steps would have in a steady state: a backlog of
        prompts would make the probe long, and measure another point.
        """
        if budget.chunk_tokens is not None:
            return budget
        num_decoding = sum(1 for seq in view.running if is_decoding(seq))
        lengths = self._estimator.workload.lengths
        arriving = num_decoding / lengths.mean_output_tokens * lengths.mean_prompt_tokens
        spread = (0.6, 1.0, 1.6)[probe.num_steps % 3]
        tokens = num_decoding + max(16, round(spread * arriving))
        return replace(budget, max_batch_tokens=min(budget.max_batch_tokens, tokens))

    def _partial_decode(self, view: View, budget: Budget, share: float) -> Plan | None:
        """A decode step of the oldest part of the batch; None when that tells nothing."""
        decoding = [seq for seq in view.running if is_decoding(seq)]
        num = round(share * len(decoding))
        if num < 1:
            return None
        builder = PlanBuilder(view, budget)
        fits = [builder.decode(seq) for seq in decoding[:num]]
        if not all(fits):
            return None
        events = self._estimator.take_events()
        return builder.build(f"{num} of {len(decoding)}", mode="exclusive", events=events)
