"""Exclusive batching (EB): prefill phases and decode phases, never both in one step.

Theory of operation (`exclusive_batching.md` A3, A4). Two phases:

    prefill   chunks only, until the holders number N again, or nothing more can come in
    decode    tokens only, until enough have finished that a refill pays

With n sequences decoding, q waiting, N the number of holders that can be had and f = min(q, N - n)
the refill at hand, decode gives way to prefill iff

    f (N - k) >= n k

that is, f / n >= theta / (1 - theta) with theta = k / N. With a full queue this is "k of N have
finished"; under light load, where all that is in the system is less than memory would hold, N is
what there is, and the rule becomes continuous batching. k is `Estimator.threshold`'s: the finite-N
rule, moved by the correction for a rising hazard, from measured lengths and step costs.
"""

from __future__ import annotations

from typing import Literal

from schedulers.estimate import Estimator, Threshold
from schedulers.events import PhaseSwitch
from schedulers.filling import (
    PlanBuilder,
    admit_waiting,
    chunk_running,
    decode_running,
    is_decoding,
    spare_blocks,
)
from schedulers.view import Budget, Outcome, Plan, View


class Exclusive:
    """Prefill phases and decode phases, switching by a threshold.

    Args:
        estimator: lengths, costs and the threshold; a fresh one by default.
    """

    name = "exclusive"

    def __init__(self, estimator: Estimator | None = None) -> None:
        self._estimator = estimator or Estimator()
        self._phase: Literal["idle", "prefill", "decode"] = "idle"

    def plan(self, view: View, budget: Budget) -> Plan:
        self._estimator.look(view)
        holders = self._estimator.max_holders(view, budget)
        num_decoding = sum(1 for seq in view.running if is_decoding(seq))
        if self._phase != "decode" or self._should_refill(view, budget, holders, num_decoding):
            builder = PlanBuilder(view, budget)
            chunk_running(builder, view.running)
            admit_waiting(
                builder,
                view.waiting,
                max_holders=holders,
                spare_blocks=spare_blocks(builder.num_holders, budget),
            )
            if builder.num_scheduled:
                self._enter("prefill", view, budget, holders, num_decoding)
                return self._build(builder, f"prefill to N={holders}")
        self._enter("decode", view, budget, holders, num_decoding)
        builder = PlanBuilder(view, budget)
        decode_running(builder, view.running)
        refill = self._threshold(holders, budget).refill
        return self._build(builder, f"decode until k={refill} of N={holders}")

    def observe(self, outcome: Outcome) -> None:
        self._estimator.observe(outcome)

    def resume(self) -> None:
        """Take over sequences in any state from another policy: decode them until a refill pays;
        half-prefilled ones come first.
        """
        self._phase = "decode"

    def _build(self, builder: PlanBuilder, reason: str) -> Plan:
        return builder.build(reason, mode="exclusive", events=self._estimator.take_events())

    def _should_refill(self, view: View, budget: Budget, holders: int, num_decoding: int) -> bool:
        if num_decoding < len(view.running):
            return True  # half-prefilled sequences are waiting: their chunks come first
        if not view.waiting:
            return False
        if not num_decoding:
            return True
        reachable = min(holders, len(view.running) + len(view.waiting))
        refill = min(len(view.waiting), reachable - num_decoding)
        rule = self._threshold(reachable, budget)
        if refill < 1 or refill * (rule.holders - rule.refill) < num_decoding * rule.refill:
            return False
        return _fits(view, budget)

    def _threshold(self, holders: int, budget: Budget) -> Threshold:
        """The threshold of `holders`, or of a number up to an eighth below it: theta changes
        slowly, and need not be computed for every number.
        """
        grain = 1 << max(0, holders.bit_length() - 4)
        return self._estimator.threshold(holders - holders % grain, budget.max_batch_tokens)

    def _enter(
        self,
        phase: Literal["prefill", "decode"],
        view: View,
        budget: Budget,
        holders: int,
        num_decoding: int,
    ) -> None:
        """Note a change of phase."""
        before, self._phase = self._phase, phase
        if before == phase:
            return
        reachable = min(holders, len(view.running) + len(view.waiting))
        refill = self._threshold(max(1, reachable), budget).refill
        self._estimator.tell(
            PhaseSwitch(
                before=before,
                after=phase,
                num_decoding=num_decoding,
                num_prefilling=len(view.running) - num_decoding,
                num_waiting=len(view.waiting),
                num_free_blocks=view.num_free_blocks,
                holders=holders,
                refill=refill,
                reason=_why(phase, view, num_decoding, holders, refill),
            )
        )


def _why(phase: str, view: View, num_decoding: int, holders: int, refill: int) -> str:
    if phase == "decode":
        if len(view.running) >= holders:
            return f"all N={holders} are prefilled"
        return "nothing waits" if not view.waiting else "KV memory takes no more"
    if num_decoding < len(view.running):
        return "chunks of half-prefilled sequences come first"
    return f"{len(view.waiting)} wait beside {num_decoding}: k={refill} of N={holders} is reached"


def _fits(view: View, budget: Budget) -> bool:
    """KV gate: a switch that could admit nothing would only thrash."""
    builder = PlanBuilder(view, budget)
    return builder.admit(view.waiting[0], spare_blocks=spare_blocks(builder.num_holders, budget))
