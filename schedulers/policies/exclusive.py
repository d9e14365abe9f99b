"""Exclusive batching (EB): prefill phases and decode phases, never both in one step.

Theory of operation (`exclusive_batching.md` A3, A4). Two phases:

    prefill   chunks only, until the holders number N again, or nothing more can come in
    decode    tokens only, until enough have finished that a refill pays

With n sequences decoding, q waiting, N the memory-safe number of holders and f = min(q, N - n) the
refill at hand, decode gives way to prefill iff

    f (N - k) >= n k            k = max(1, floor(theta N))

that is, f / n >= theta / (1 - theta). With a full queue this is "k of N have finished"; under light
load it becomes continuous batching. theta solves Prop. 1,

    theta / (1 - theta) + ln(1 - theta) = p0 alpha_p / alpha_d

with p0 the hazard of ending (one over the mean output length) and alpha_p / alpha_d the fixed cost
of a switch to prefill in units of the fixed cost of a decode step.
"""

from __future__ import annotations

from typing import Literal

from schedulers.crossover import optimal_threshold
from schedulers.filling import (
    PlanBuilder,
    admit_waiting,
    chunk_running,
    decode_running,
    is_decoding,
)
from schedulers.memory import BatchSizer
from schedulers.policies.mixed import safe_holders, spare_blocks
from schedulers.view import Budget, Outcome, Plan, View


class Exclusive:
    """Prefill phases and decode phases, switching by a threshold.

    Args:
        overflow_probability: bound on the chance that N holders outgrow KV memory.
        switch_cost_ratio: alpha_p / alpha_d; 1 says that a prefill step has the fixed cost of a
            decode step.
        cold_mean_output_tokens: mean output length assumed before any is known.
    """

    name = "exclusive"

    def __init__(
        self,
        *,
        overflow_probability: float = 0.01,
        switch_cost_ratio: float = 1.0,
        cold_mean_output_tokens: float = 128.0,
    ) -> None:
        self._sizer = BatchSizer(overflow_probability=overflow_probability)
        self._switch_cost_ratio = switch_cost_ratio
        self._cold_mean_output_tokens = cold_mean_output_tokens
        self._phase: Literal["prefill", "decode"] = "prefill"

    def plan(self, view: View, budget: Budget) -> Plan:
        max_holders = safe_holders(self._sizer, view, budget)
        if self._phase == "decode" and self._should_refill(view, budget, max_holders):
            self._phase = "prefill"
        if self._phase == "prefill":
            builder = PlanBuilder(view, budget)
            chunk_running(builder, view.running)
            admit_waiting(
                builder,
                view.waiting,
                max_holders=max_holders,
                spare_blocks=spare_blocks(builder.num_holders, budget),
            )
            if builder.num_scheduled:
                return builder.build(f"prefill to N={max_holders}")
            self._phase = "decode"
        builder = PlanBuilder(view, budget)
        decode_running(builder, view.running)
        return builder.build(f"decode until k={self._refill_size(max_holders)} of N={max_holders}")

    def observe(self, outcome: Outcome) -> None:
        self._sizer.add(outcome.finished)

    def _refill_size(self, max_holders: int) -> int:
        mean = self._sizer.mean_output_tokens or self._cold_mean_output_tokens
        theta = optimal_threshold(1.0 / max(1.0, mean), self._switch_cost_ratio)
        return max(1, int(theta * max_holders))

    def _should_refill(self, view: View, budget: Budget, max_holders: int) -> bool:
        num_decoding = sum(1 for seq in view.running if is_decoding(seq))
        if num_decoding < len(view.running):
            return True  # half-prefilled sequences are waiting: their chunks come first
        if not view.waiting:
            return False
        if not num_decoding:
            return True
        refill = min(len(view.waiting), max_holders - num_decoding)
        size = self._refill_size(max_holders)
        if refill < 1 or refill * (max_holders - size) < num_decoding * size:
            return False
        return _fits(view, budget)


def _fits(view: View, budget: Budget) -> bool:
    """KV gate: a switch that could admit nothing would only thrash."""
    builder = PlanBuilder(view, budget)
    return builder.admit(view.waiting[0], spare_blocks=spare_blocks(builder.num_holders, budget))
