"""Exclusive batching (EB): prefill phases and decode phases, never both in one step.

Theory of operation (`exclusive_batching.md` A3, A4). Two phases:

    prefill   chunks only, until the holders number N again, or nothing more can come in
    decode    tokens only, until enough have finished that a refill pays

With n sequences decoding, q waiting, N the memory-safe number of holders and f = min(q, N - n) the
refill at hand, decode gives way to prefill iff

    f (N - k) >= n k

that is, f / n >= theta / (1 - theta) with theta = k / N. With a full queue this is "k of N have
finished"; under light load it becomes continuous batching. k is `Estimator.threshold`'s: the exact
finite-N rule, moved by the correction for a rising hazard, from measured lengths and step costs.
"""

from __future__ import annotations

from typing import Literal

from schedulers.estimate import Estimator
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
        self._phase: Literal["prefill", "decode"] = "prefill"

    def plan(self, view: View, budget: Budget) -> Plan:
        max_holders = self._estimator.max_holders(view, budget)
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
        refill = self._refill_size(max_holders, budget)
        return builder.build(f"decode until k={refill} of N={max_holders}")

    def observe(self, outcome: Outcome) -> None:
        self._estimator.observe(outcome)

    def _refill_size(self, max_holders: int, budget: Budget) -> int:
        return self._estimator.threshold(max_holders, budget.max_batch_tokens).refill

    def _should_refill(self, view: View, budget: Budget, max_holders: int) -> bool:
        num_decoding = sum(1 for seq in view.running if is_decoding(seq))
        if num_decoding < len(view.running):
            return True  # half-prefilled sequences are waiting: their chunks come first
        if not view.waiting:
            return False
        if not num_decoding:
            return True
        refill = min(len(view.waiting), max_holders - num_decoding)
        size = self._refill_size(max_holders, budget)
        if refill < 1 or refill * (max_holders - size) < num_decoding * size:
            return False
        return _fits(view, budget)


def _fits(view: View, budget: Budget) -> bool:
    """KV gate: a switch that could admit nothing would only thrash."""
    builder = PlanBuilder(view, budget)
    return builder.admit(view.waiting[0], spare_blocks=spare_blocks(builder.num_holders, budget))
