"""The tables and sentences of a report: values to text, nothing else. The template escapes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flows.report_data import Telemetry
from flows.report_encodes import SHOWN_S, EncodeFacts
from flows.summary import counted, duration, ordered, size_text
from schedulers.encode_cost import EncodeFit
from storage.status import JobStatus
from storage.telemetry import COEFFICIENTS

MAX_SWITCHES = 200
MAX_PHASES = 50
MAX_SIZINGS = 15


class Table(NamedTuple):
    """A table of text.

    Attributes:
        headers: one a column.
        rows: the cells.
        anchors: of the rows, where something links to them.
        words: columns that hold text, not numbers.
        notes: a line under each row.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    anchors: Sequence[str] = ()
    words: frozenset[int] = frozenset()
    notes: Sequence[str] = ()


def us(seconds: float | None) -> str:
    """Microseconds."""
    return "-" if seconds is None else f"{1e6 * seconds:,.2f}"


def number(value: float | None, digits: int = 1) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def whole(value: float | None) -> str:
    return number(value, 0)


def size(num_bytes: int | None) -> str:
    """A size, or a dash where it is not known."""
    return "-" if num_bytes is None else size_text(num_bytes)


# -- headline --


def facts(status: JobStatus, telemetry: Telemetry) -> list[tuple[str, str]]:
    """Name and value of what the page begins with."""
    total_s = telemetry.total_s
    counts = ", ".join(f"{count:,} {name}" for name, count in ordered(status.by_status))
    found = [
        ("rows", f"{status.done_rows:,} of {status.total_rows:,}"),
        ("by status", counts or "none yet"),
        ("total time", duration(total_s) if total_s > 0 else "-"),
    ]
    if status.encodes:
        return [
            *found,
            ("rows/s", _rate(status.done_rows, total_s)),
            ("text tokens/s", _rate(status.prompt_tokens, total_s)),
            ("text tokens", f"{status.prompt_tokens:,}"),
        ]
    return [
        *found,
        ("generated tokens/s", _rate(status.completion_tokens, total_s)),
        ("prompt tokens", f"{status.prompt_tokens:,}"),
        ("completion tokens", f"{status.completion_tokens:,}"),
    ]


def _rate(count: int, total_s: float) -> str:
    return f"{count / total_s:,.1f}" if total_s > 0 else "-"


def policy_sentence(
    policy: str, telemetry: Telemetry, switches: Sequence[Mapping[str, Any]]
) -> str:
    """What the policy did, in a sentence or two."""
    if not telemetry.num_steps:
        return f"Policy {policy}: no step has been recorded."
    looks = telemetry.rows("SELECT count(*) AS num FROM crossover")[0]["num"]
    if not looks:
        return (
            f"Policy {policy} ran {telemetry.num_steps:,} steps and never compared exclusive with "
            "mixed batching."
        )
    if not switches:
        mode = telemetry.last("crossover")
        stayed = mode["mode_after"] if mode else "-"
        looked = counted(looks, "look")
        return f"No mode switch: {looked} at the crossover, and the mode stayed {stayed}."
    told = "; ".join(
        f"at {switch['time_s']:,.1f} s {switch['mode_before']} -> {switch['mode_after']} because "
        f"{switch['reason']}"
        for switch in switches[:3]
    )
    more = f"; and {len(switches) - 3} more, in the table below" if len(switches) > 3 else ""
    looked = counted(looks, "look")
    return f"{counted(len(switches), 'mode switch')} in {looked} at the crossover: {told}{more}."


# -- superbatches --


def superbatch_sentence(facts: EncodeFacts) -> str:
    """What became of the partitions, and whether gathering them paid."""
    calls = counted(facts.num_calls, "encode call")
    if facts.stats is None:
        return (
            f"No partitions: {counted(facts.num_shards, 'shard')} in {calls} of at most "
            f"{facts.max_texts:,} texts."
        )
    gathered = (
        f"{counted(facts.stats.count, 'partition')} in "
        f"{counted(facts.num_shards, 'superbatch')}, {calls}; coefficient of variation of the "
        f"sizes (CV) {facts.stats.cv:.2f}."
    )
    if facts.fit is None:
        return f"{gathered} No encode call has been recorded, so its cost is not known."
    advice = facts.advice
    if advice is None:
        return f"{gathered} Whether superbatching paid is not known, as {facts.fit.note}."
    return (
        f"{gathered} By what this job's calls cost, phi is {advice.phi:.1%}, and the predicted "
        f"speed-up against a call for each partition {advice.speed_up:.2f}. {advice.text}"
    )


def superbatch_table(facts: EncodeFacts, telemetry: Telemetry) -> Table:
    """The encode calls in numbers."""
    made = telemetry.encode_totals()
    num_calls, num_texts = made["num_calls"], made["num_texts"]
    rows = [
        ("encode calls", f"{num_calls:,}", f"{facts.num_calls:,} in the plan"),
        ("slices", f"{facts.num_slices:,}", "calls of what is larger than the upper threshold"),
        ("model's batches", f"{made['num_batches']:,}", "a call is cut by tokens"),
        ("texts of a call", number(num_texts / num_calls) if num_calls else "-", "mean"),
        ("", f"{made['most_texts']:,}", "largest"),
    ]
    if facts.stats is not None:
        rows += [
            ("partitions of a call", number(made["partitions"]), "mean"),
            ("", f"{made['most_partitions']:,}", "largest"),
            ("texts of a partition", number(facts.stats.mean), "mean"),
            ("", f"{facts.stats.largest:,}", "largest"),
        ]
    rows += [("texts/s", _rate(num_texts, telemetry.total_s), ""), *_fit_rows(facts.fit)]
    return Table(("superbatches", "", ""), rows, words=frozenset({0, 2}))


def _fit_rows(fit: EncodeFit | None) -> list[tuple[str, str, str]]:
    """What a call and a text cost; without c where the calls do not tell it."""
    if fit is None:
        return []
    text = _short_time(fit.cost.text_s)
    rows = [("t", text, f"per text of {fit.mean_tokens:,.1f} tokens, the mean")]
    if fit.partition_s >= SHOWN_S:
        rows.append(("f", _short_time(fit.partition_s), "per partition's file"))
    if fit.is_identified:
        error = f"per call, give or take {_short_time(fit.call_error_s)}"
        rows = [("c", _short_time(fit.call_s), error), *rows]
    else:
        rows = [("c", "-", fit.note), *rows]
    left_out = f"; {counted(fit.num_outliers, 'call')} left out" if fit.num_outliers else ""
    return [*rows, ("error of the fit", f"{fit.error:.1%}", f"median of a call{left_out}")]


def _short_time(seconds: float) -> str:
    """Three digits, in the unit that has them."""
    if seconds >= 0.9995:
        return f"{seconds:,.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 0.9995e-3 else f"{1e6 * seconds:.3g} us"


# -- the crossover --

_SWITCHES = (
    "no.", "time, s", "trigger", "before -> after", "demand", "mean prompt", "mean output",
    "theta", "k", "contention, us/token", "amortisation, us/token", "margin, us/token",
)  # fmt: skip


def switch_table(switches: Sequence[Mapping[str, Any]]) -> Table:
    """The numbered mode switches."""
    shown = switches[:MAX_SWITCHES]
    rows = [
        (
            str(count),
            number(switch["time_s"], 2),
            switch["trigger"] or "",
            f"{switch['mode_before']} -> {switch['mode_after']}",
            number(switch["demand"]),
            number(switch["mean_prompt_tokens"]),
            number(switch["mean_output_tokens"]),
            number(switch["theta"], 3),
            whole(switch["refill"]),
            us(switch["contention"]),
            us(switch["amortisation"]),
            us(switch["margin"]),
        )
        for count, switch in enumerate(shown, start=1)
    ]
    anchors = [f"switch-{count}" for count in range(1, len(shown) + 1)]
    reasons = [f"Reason: {switch['reason'] or '-'}" for switch in shown]
    return Table(_SWITCHES, rows, anchors, frozenset({2, 3}), reasons)


# -- costs --


def cost_errors(telemetry: Telemetry) -> Table:
    """How far predictions were off, by kind of step."""
    rows = [
        (
            row["kind"],
            whole(row["num_steps"]),
            f"{row['median_error']:.1%}",
            f"{row['p90_error']:.1%}",
            f"{row['bias']:+.1%}",
        )
        for row in telemetry.cost_errors()
    ]
    headers = ("kind", "steps", "median relative error", "90 % below", "median bias")
    return Table(headers, rows, words=frozenset({0}))


_UNITS: Mapping[str, tuple[str, float, str]] = {
    "alpha_p": ("ms", 1e3, "fixed cost of a prefill step"),
    "beta_p": ("us/token", 1e6, "per prefill token"),
    "alpha_d": ("ms", 1e3, "fixed cost of a decode step"),
    "beta_d": ("us/token", 1e6, "per decode token"),
    "alpha_mb": ("ms", 1e3, "fixed cost of a mixed step"),
    "mix_a": ("us/token", 1e6, "per token of a mixed step at decode share 0"),
    "mix_b": ("us/token", 1e6, "its slope in the decode share"),
    "mix_c": ("us/token", 1e6, "its curvature in the decode share"),
    "gamma": ("ns/position", 1e9, "per KV position that a decode token reads"),
    "alpha_switch": ("ms", 1e3, "of a change from decode to prefill and back"),
}


def cost_table(telemetry: Telemetry) -> Table | None:
    """The last coefficients of a calibration beside the last ones fitted to this job's steps."""
    found = [telemetry.last("costs", f"source = '{name}'") for name in ("calibration", "online")]
    if not any(found):
        return None
    rows: list[tuple[str, ...]] = []
    for name in COEFFICIENTS:
        unit, scale, meaning = _UNITS[name]
        cells = [_scaled(row, name, scale) for row in found]
        rows.append((name, *cells, unit, meaning))
    cells = [_scaled(row, "interference_threshold", 1.0) for row in found]
    rows.append(("r*", *cells, "", "decode share above which mixing costs a token more"))
    for kind in ("prefill", "decode", "mixed"):
        seen = ["-" if row is None else whole(row[f"num_{kind}"]) for row in found]
        rows.append((f"{kind} steps", *seen, "", "behind the fit"))
    headers = ("coefficient", "calibration", "online, last", "unit", "meaning")
    return Table(headers, rows, words=frozenset({0, 3, 4}))


def _scaled(row: Mapping[str, Any] | None, name: str, scale: float) -> str:
    if row is None or row[name] is None:
        return "-"
    return f"{row[name] * scale:,.4g}"


# -- rows, memory, phases --


def count_table(name: str, counts: Mapping[str, int]) -> Table:
    """Rows by a value, with their share."""
    total = sum(counts.values())
    rows = [(key, f"{num:,}", f"{num / total:.1%}") for key, num in ordered(counts)]
    return Table((name, "rows", "share"), rows, words=frozenset({0}))


def memory_table(plan: Mapping[str, Any]) -> Table:
    """Where the bytes went."""
    parts = (
        ("limit", size(plan["limit_bytes"])),
        ("weights", size(plan["weights_bytes"])),
        ("activations", size(plan["activation_bytes"])),
        ("KV blocks", size(plan["kv_bytes"])),
        ("block size, tokens", whole(plan["block_size"])),
        ("blocks", whole(plan["num_blocks"])),
        ("capacity, tokens", whole(plan["capacity_tokens"])),
    )
    return Table(("memory", ""), parts, words=frozenset({0}))


_SIZINGS = (
    "time, s", "form", "N", "N before the cut", "N, paper", "N, paper's code", "bound",
    "mean tokens", "std tokens", "samples", "reason",
)  # fmt: skip


def sizing_table(sizings: Sequence[Mapping[str, Any]]) -> Table:
    """The latest memory-safe numbers of holders."""
    rows = [
        (
            number(row["time_s"], 2),
            row["form"] or "",
            whole(row["holders"]),
            whole(row["uncut_holders"]),
            whole(row["holders_paper"]),
            whole(row["holders_paper_sigma"]),
            "-" if row["overflow_probability"] is None else f"{row['overflow_probability']:.2g}",
            number(row["mean_tokens"]),
            number(row["std_tokens"]),
            whole(row["num_samples"]),
            row["reason"] or "",
        )
        for row in sizings
    ]
    return Table(_SIZINGS, rows, words=frozenset({1, 10}))


def phase_counts(telemetry: Telemetry) -> Table:
    """Phase switches by kind and reason, the most frequent first."""
    found = telemetry.rows(
        'SELECT "before", "after", reason, count(*) AS num FROM phases '
        "GROUP BY ALL ORDER BY num DESC, 1, 2, 3 LIMIT 40"
    )
    rows = [
        (f"{row['before']} -> {row['after']}", whole(row["num"]), row["reason"] or "")
        for row in found
    ]
    return Table(("before -> after", "switches", "reason"), rows, words=frozenset({0, 2}))


_PHASES = (
    "time, s", "step", "before -> after", "decoding", "prefilling", "waiting", "free blocks", "N",
    "k", "reason",
)  # fmt: skip


def phase_table(telemetry: Telemetry) -> Table:
    """The first phase switches."""
    rows = [
        (
            number(row["time_s"], 3),
            whole(row["step"]),
            f"{row['before']} -> {row['after']}",
            *(whole(row[name]) for name in _PHASE_COUNTS),
            row["reason"] or "",
        )
        for row in telemetry.events("phases", most=MAX_PHASES)
    ]
    return Table(_PHASES, rows, words=frozenset({2, 9}))


_PHASE_COUNTS = (
    "num_decoding", "num_prefilling", "num_waiting", "num_free_blocks", "holders", "refill",
)  # fmt: skip


def tail_table(shares: Mapping[float, float]) -> Table:
    """When shares of the sequences had finished, and how long the rest took."""
    end_s = shares[1.0]
    rows = [
        (f"{share:.0%}", number(at_s, 2), number(end_s - at_s, 2), f"{(end_s - at_s) / end_s:.1%}")
        for share, at_s in shares.items()
    ]
    return Table(("finished", "at, s", "the rest took, s", "share of the time"), rows)


def tail_sentence(shares: Mapping[float, float]) -> str:
    """How long the last rows took."""
    end_s = shares[1.0]
    last_10, last_1 = end_s - shares[0.9], end_s - shares[0.99]
    return (
        f"The last 10 % of the rows took {duration(last_10)} ({last_10 / end_s:.1%} of the time), "
        f"the last 1 % {duration(last_1)} ({last_1 / end_s:.1%})."
    )
