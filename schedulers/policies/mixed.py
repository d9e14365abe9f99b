"""Mixed batching (MB): chunked prefill and decode in one step.

Every running sequence gets its token, and what is left of the token budget is filled with chunks of
prompts. Source: `exclusive_batching.md` A1 (the baseline "v1").
"""

from __future__ import annotations

from schedulers.estimate import Estimator
from schedulers.filling import (
    PlanBuilder,
    admit_waiting,
    chunk_running,
    decode_running,
    spare_blocks,
)
from schedulers.view import Budget, Outcome, Plan, View


class Mixed:
    """Decode first, then chunks, then admissions, until the token budget is full.

    Args:
        estimator: lengths, for the number of holders; a fresh one by default.
    """

    name = "mixed"

    def __init__(self, estimator: Estimator | None = None) -> None:
        self._estimator = estimator or Estimator()

    def plan(self, view: View, budget: Budget) -> Plan:
        self._estimator.look(view)
        builder = PlanBuilder(view, budget)
        decode_running(builder, view.running)
        chunk_running(builder, view.running)
        holders = self._estimator.max_holders(view, budget)
        admit_waiting(
            builder,
            view.waiting,
            max_holders=holders,
            spare_blocks=spare_blocks(builder.num_holders, budget),
        )
        return builder.build(f"N={holders}", mode="mixed", events=self._estimator.take_events())

    def observe(self, outcome: Outcome) -> None:
        self._estimator.observe(outcome)
