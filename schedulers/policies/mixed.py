"""Mixed batching (MB): chunked prefill and decode in one step.

Every running sequence gets its token, and what is left of the token budget is filled with chunks of
prompts. Source: `exclusive_batching.md` A1 (the baseline "v1").
"""

from __future__ import annotations

from schedulers.filling import PlanBuilder, admit_waiting, chunk_running, decode_running
from schedulers.memory import BatchSizer
from schedulers.view import Budget, Outcome, Plan, View


class Mixed:
    """Decode first, then chunks, then admissions, until the token budget is full."""

    name = "mixed"

    def __init__(self, *, overflow_probability: float = 0.01) -> None:
        self._sizer = BatchSizer(overflow_probability=overflow_probability)

    def plan(self, view: View, budget: Budget) -> Plan:
        builder = PlanBuilder(view, budget)
        decode_running(builder, view.running)
        chunk_running(builder, view.running)
        max_holders = safe_holders(self._sizer, view, budget)
        admit_waiting(
            builder,
            view.waiting,
            max_holders=max_holders,
            spare_blocks=spare_blocks(builder.num_holders, budget),
        )
        return builder.build(f"N={max_holders}")

    def observe(self, outcome: Outcome) -> None:
        self._sizer.add(outcome.finished)


def safe_holders(sizer: BatchSizer, view: View, budget: Budget) -> int:
    """Memory-safe N under the budget; full reservation needs no estimate."""
    if budget.reservation == "full":
        return budget.max_seqs
    ends = (seq.max_total_tokens for group in (view.running, view.waiting) for seq in group)
    capacity_tokens = view.num_blocks * view.block_size
    return min(budget.max_seqs, sizer.max_holders(capacity_tokens, ends, view.block_size))


def spare_blocks(num_holders: int, budget: Budget) -> int:
    """Blocks kept free at admission against thrashing: one for every other holder to grow into."""
    return 0 if budget.reservation == "full" else num_holders // 2
