"""What a policy tells about its decisions: values for the telemetry, one class a table.

A plan carries the events that led to it. The engine stamps them with its step and clock and hands
them on; nobody decides by them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from schedulers.cost import StepCost

Phase = Literal["prefill", "decode", "mixed", "idle"]
"""What kind of step a plan is: only chunks, only single tokens, both, or nothing to do."""
Mode = Literal["exclusive", "mixed"]
Trigger = Literal["completions", "surge", "calibrated", "unmeasured", "probed"]
"""Why the crossover was looked at: enough completions, a jump in demand, the first plan with a
calibration at hand, a step kind that has not been measured, or one that just was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossoverEvaluation:
    """One look at the crossover: every estimated quantity, both sides, and what follows.

    Attributes:
        trigger: why now.
        p0: hazard of ending at the first token.
        eta: its slope, per token.
        mean_prompt_tokens: mu_L.
        mean_output_tokens: mu_O.
        num_samples: finished sequences behind the lengths; 0: assumed.
        decode_share: rbar = mu_O / (mu_L + mu_O).
        demand: N_obs, smoothed running + waiting.
        holders: N that the costs are compared at.
        max_holders: memory-safe N.
        theta0: Prop. 1.
        correction: Thm. 2.
        theta: k / N.
        refill: k.
        cost: coefficients in force; a column each.
        switch_s: fixed cost of a phase switch, seconds.
        contention: left side: what mixing costs, seconds per token.
        amortisation: right side: what mixing saves, seconds per token.
        margin: left less right, seconds per token; above 0 exclusive batching wins.
        hysteresis: the margin that has to be exceeded for a change.
        crossover_holders: N at which both sides are equal; None: none found.
        exclusive_s: predicted seconds per request.
        mixed_s: likewise.
        mode_before: before the evaluation.
        mode_after: after it.
        cooldown: evaluations that still may not change the mode.
        reason: of the outcome, in words.
    """

    table: ClassVar[str] = "crossover"
    trigger: Trigger
    p0: float
    eta: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    num_samples: int
    decode_share: float
    demand: float
    holders: int
    max_holders: int
    theta0: float
    correction: float
    theta: float
    refill: int
    cost: StepCost
    switch_s: float
    contention: float
    amortisation: float
    margin: float
    hysteresis: float
    crossover_holders: float | None
    exclusive_s: float
    mixed_s: float
    mode_before: Mode
    mode_after: Mode
    cooldown: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSwitch:
    """A policy went from one phase to another.

    Attributes:
        before: "prefill", "decode" or "mixed"; "idle" at the start.
        after: likewise.
        num_decoding: holders that wait for a token.
        num_prefilling: holders whose prompt is not computed yet.
        num_waiting: sequences that hold nothing.
        num_free_blocks: of KV memory.
        holders: N.
        refill: k.
        reason: in words.
    """

    table: ClassVar[str] = "phases"
    before: Phase
    after: Phase
    num_decoding: int
    num_prefilling: int
    num_waiting: int
    num_free_blocks: int
    holders: int
    refill: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySizing:
    """A memory-safe number of holders was computed.

    Attributes:
        form: "longest" (no length is known yet), "moments" (distribution-free), or one of the
            paper's: "paper", "paper_sigma"; "full": longest ends are reserved.
        capacity_tokens: C.
        overflow_probability: bound on the chance that N holders need more than C.
        num_samples: finished sequences behind it.
        mean_tokens: of a holder.
        std_tokens: of a holder.
        holders: N of this form, cut to the configured most.
        uncut_holders: N before the cut.
        holders_paper: N of the paper's text form; None before lengths are known.
        holders_paper_sigma: N of the form that the paper's code uses; None likewise.
        num_steps: steps so far.
        num_overflows: of these, steps in which KV memory ran short.
        reason: in words.
    """

    table: ClassVar[str] = "memory_plan"
    form: str
    capacity_tokens: int
    overflow_probability: float
    num_samples: int
    mean_tokens: float
    std_tokens: float
    holders: int
    uncut_holders: int
    holders_paper: int | None
    holders_paper_sigma: int | None
    num_steps: int
    num_overflows: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The coefficients in force from here on.

    Attributes:
        cost: a column each.
        source: "calibration": of a stored one; "online": refitted from this job's steps.
        num_prefill: steps behind the fit.
        num_decode: likewise.
        num_mixed: likewise.
        interference_threshold: r*; None: a token never costs more in a mixed step.
    """

    table: ClassVar[str] = "costs"
    source: Literal["calibration", "online"]
    num_prefill: int
    num_decode: int
    num_mixed: int
    cost: StepCost
    interference_threshold: float | None


PolicyEvent = CrossoverEvaluation | PhaseSwitch | MemorySizing | CostModel
EVENTS: tuple[type[PolicyEvent], ...] = (CrossoverEvaluation, PhaseSwitch, MemorySizing, CostModel)


def event_row(event: PolicyEvent) -> dict[str, Any]:
    """An event's columns: its fields, with the coefficients of a cost beside them."""
    row = asdict(event)
    return row | row.pop("cost", {})
