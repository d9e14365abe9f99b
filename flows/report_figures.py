"""The figures of a report. Each takes numbers and gives an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)
from numpy.typing import NDArray

from flows.report_axis import PHASE_COLOURS, Axis, legend, over_time
from flows.report_data import Columns
from flows.report_encodes import SHOWN_S, EncodeFacts
from flows.report_svg import INK, MUTED, Drawing
from schedulers.encode_cost import EncodeFit
from schedulers.lengths import Hazard

LINE, SECOND, THIRD = "#0072b2", "#d55e00", "#6a4c93"


def throughput(axis: Axis, bins: Columns, shares: Columns) -> Markup:
    """Tokens per second, phases, KV use, running and waiting over time."""
    label = "Throughput, phases, KV use, running and waiting sequences over time"
    with Drawing("throughput", label, height_in=7.4) as drawing:
        prefill, decode, phases, kv, running, waiting = drawing.panels(1.3, 1.3, 0.35, 1, 1, 1)
        _area(prefill, bins, "prefill", PHASE_COLOURS["prefill"], "prefill\ntokens/s")
        _area(decode, bins, "decode", PHASE_COLOURS["decode"], "decode\ntokens/s")
        _phase_strip(phases, axis, shares)
        _area(kv, bins, "kv_use", THIRD, "KV blocks\nin use")
        kv.set_ylim(0, 1.02)
        kv.yaxis.set_major_formatter(PercentFormatter(1.0))
        _area(running, bins, "running", INK, "running")
        _area(waiting, bins, "waiting", MUTED, "waiting")
        over_time(drawing, axis, [prefill, decode, kv, running, waiting], strips=[phases])
        seen = [name for name in PHASE_COLOURS if np.nansum(shares[name].astype(float)) > 0]
        legend(drawing, axis, phases=seen)
    return drawing.svg


def encode_throughput(axis: Axis, bins: Columns) -> Markup:
    """Texts and tokens per second over time."""
    with Drawing("throughput", "Texts and tokens encoded over time", height_in=3.6) as drawing:
        texts, tokens = drawing.panels(1, 1)
        _area(texts, bins, "seqs", LINE, "texts/s")
        _area(tokens, bins, "prefill", PHASE_COLOURS["mixed"], "tokens/s")
        over_time(drawing, axis, [texts, tokens])
    return drawing.svg


def encode_calls(axis: Axis, calls: Columns, facts: EncodeFacts) -> Markup:
    """Texts of calls over time beside the thresholds, and their seconds beside the fitted line."""
    label = "Texts of encode calls over time, and seconds of calls over their texts"
    with Drawing("superbatches", label, height_in=4.0) as drawing:
        grid: Any = drawing.figure.subplots(1, 2, width_ratios=[1.4, 1])
        over, cost = grid
        _texts_of_calls(over, calls, facts)
        over_time(drawing, axis, [over])
        _seconds_of_calls(cost, calls, facts.fit)
    return drawing.svg


def text_lengths(lengths: NDArray[Any]) -> Markup:
    """Histogram of the texts' lengths."""
    with Drawing("lengths", "Lengths of texts in tokens", height_in=2.8) as drawing:
        (axes,) = drawing.panels(1)
        _histogram(axes, lengths, PHASE_COLOURS["prefill"], "tokens of a text")
    return drawing.svg


def crossover(axis: Axis, evaluations: Columns) -> Markup:
    """Both sides of the crossover, and their difference with the hysteresis band."""
    label = "Contention, amortisation and margin over time"
    with Drawing("crossover", label, height_in=5.2) as drawing:
        sides, margin = drawing.panels(1, 1)
        for run in np.unique(evaluations["number"]):
            end_s = [*axis.borders_s, axis.total_s][int(run) - 1]
            _evaluations_of_run(sides, margin, evaluations, evaluations["number"] == run, end_s)
        sides.set_ylabel("us/token")
        margin.set_ylabel("margin, us/token")
        margin.axhline(0, color=INK, linewidth=0.8)
        over_time(drawing, axis, [sides, margin])
        legend(drawing, axis, lines=_CROSSOVER_LINES)
    return drawing.svg


_CROSSOVER_LINES: Final = (
    Line2D([], [], color=SECOND, label="contention (mixing costs)"),
    Line2D([], [], color=LINE, linestyle="--", label="amortisation (mixing saves)"),
    Line2D([], [], color=THIRD, label="margin"),
    Patch(facecolor="#8a94a3", alpha=0.35, label="hysteresis band"),
)


def costs(cells: Columns) -> Markup:
    """Predicted against realised step times, log-log, with the diagonal."""
    label = "Predicted against realised step times by kind of step"
    with Drawing("costs", label, height_in=3.9) as drawing:
        kinds = [kind for kind in PHASE_COLOURS if (cells["kind"] == kind).any()]
        grid: Any = drawing.figure.subplots(1, max(3, len(kinds)), squeeze=False)
        for axes in grid[0, len(kinds) :]:
            axes.set_visible(False)
        for kind, axes in zip(kinds, grid[0], strict=False):
            _cost_scatter(axes, cells, kind)
    return drawing.svg


def lengths(prompts: NDArray[Any], completions: NDArray[Any], fit: Hazard) -> Markup:
    """Histograms of lengths, and the hazard of ending beside the fitted line."""
    label = "Prompt and completion lengths, and the hazard of ending"
    with Drawing("lengths", label, height_in=3.7) as drawing:
        grid: Any = drawing.figure.subplots(1, 3)
        left, middle, right = grid
        _histogram(left, prompts, PHASE_COLOURS["prefill"], "prompt tokens")
        _histogram(middle, completions, PHASE_COLOURS["decode"], "completion tokens")
        _hazard(right, completions, fit)
    return drawing.svg


def tail(axis: Axis, finished: Columns, shares: Mapping[float, float]) -> Markup:
    """Sequences finished over time, and when shares of them had."""
    label = "Sequences finished over time"
    with Drawing("tail", label, height_in=3.4) as drawing:
        (axes,) = drawing.panels(1)
        times = np.concatenate([[0.0], finished["at_s"]])
        counts = np.concatenate([[0.0], finished["finished"]])
        axes.step(times, counts, where="post", color=LINE)
        total = float(counts[-1])
        for at_s in sorted(set(shares.values())):
            _share_point(axes, at_s, [s for s in shares if shares[s] == at_s], total, axis)
        axes.set_ylim(0, total * 1.12)
        axes.set_ylabel("finished")
        over_time(drawing, axis, [axes])
        legend(drawing, axis)
    return drawing.svg


# -- panels --


def _area(axes: Axes, bins: Columns, name: str, colour: str, label: str) -> None:
    axes.fill_between(bins["at_s"], bins[name], color=colour, alpha=0.18, linewidth=0)
    axes.plot(bins["at_s"], bins[name], color=colour)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(_short))


def _phase_strip(axes: Axes, axis: Axis, shares: Columns) -> None:
    """Each stretch of time as a bar, divided by kind of step."""
    low = np.zeros(len(shares["at_s"]))
    width = axis.total_s / 400
    for name, colour in PHASE_COLOURS.items():
        share = np.nan_to_num(shares[name].astype(float))
        axes.fill_between(
            np.append(shares["at_s"], shares["at_s"][-1:] + width),
            np.append(low, low[-1:]),
            np.append(low + share, (low + share)[-1:]),
            step="post",
            color=colour,
            linewidth=0,
        )
        low = low + share
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_ylabel("phase", rotation=0, ha="right", va="center")


def _evaluations_of_run(
    sides: Axes, margin: Axes, found: Columns, chosen: NDArray[np.bool_], end_s: float
) -> None:
    """What the last look found is in force to the end of its run."""
    at_s = np.append(found["at_s"][chosen], end_s)
    us = {
        name: 1e6 * np.append(found[name][chosen], found[name][chosen][-1]).astype(float)
        for name in ("contention", "amortisation", "margin", "hysteresis")
    }
    dot: dict[str, Any] = (
        {"marker": "o", "markersize": 3, "markevery": slice(-1)} if len(at_s) <= 60 else {}
    )
    sides.step(at_s, us["contention"], where="post", color=SECOND, **dot)
    sides.step(at_s, us["amortisation"], where="post", color=LINE, linestyle="--", **dot)
    band: dict[str, Any] = {"step": "post", "color": "#8a94a3", "alpha": 0.35, "linewidth": 0}
    margin.fill_between(at_s, -us["hysteresis"], us["hysteresis"], **band)
    margin.step(at_s, us["margin"], where="post", color=THIRD, **dot)


def _cost_scatter(axes: Axes, cells: Columns, kind: str) -> None:
    chosen = cells["kind"] == kind
    predicted_ms = 1e3 * cells["predicted_s"][chosen]
    realised_ms = 1e3 * cells["realised_s"][chosen]
    levels = np.floor(np.log2(np.maximum(cells["num_steps"][chosen], 1)))
    axes.scatter(
        predicted_ms,
        realised_ms,
        s=9 + 9 * np.minimum(levels, 6),
        color=PHASE_COLOURS[kind],
        alpha=0.55,
        linewidths=0,
    )
    both = np.concatenate([predicted_ms, realised_ms])
    limits = (float(both.min()) / 1.3, float(both.max()) * 1.3)
    axes.plot(limits, limits, color=INK, linewidth=0.9, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(limits)
    axes.set_ylim(limits)
    axes.set_box_aspect(1)
    axes.set_title(f"{kind} steps", loc="left", color=PHASE_COLOURS[kind])
    axes.set_xlabel("predicted, ms")
    axes.set_ylabel("realised, ms")
    for side in (axes.xaxis, axes.yaxis):
        side.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        side.set_major_formatter(FuncFormatter(_short))
        side.set_minor_formatter(NullFormatter())


def _texts_of_calls(axes: Axes, calls: Columns, facts: EncodeFacts) -> None:
    axes.scatter(calls["at_s"], calls["num_texts"], s=14, color=LINE, alpha=0.6, linewidths=0)
    axes.axhline(facts.max_texts, color=SECOND, linestyle="--")
    handles = [
        Line2D([], [], color=LINE, marker="o", linestyle="", label="encode call"),
        Line2D([], [], color=SECOND, linestyle="--", label=f"upper threshold, {facts.max_texts:,}"),
    ]
    if facts.stats is not None:
        axes.axhline(facts.min_texts, color=THIRD, linestyle=":")
        name = f"lower threshold, {facts.min_texts:,}"
        handles.append(Line2D([], [], color=THIRD, linestyle=":", label=name))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("texts of a call")
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3)


def _seconds_of_calls(axes: Axes, calls: Columns, fit: EncodeFit | None) -> None:
    axes.scatter(calls["num_texts"], calls["interval_s"], s=14, color=LINE, alpha=0.6, linewidths=0)
    handles = [Line2D([], [], color=LINE, marker="o", linestyle="", label="measured")]
    if fit is not None:
        cost = fit.cost
        ends = np.array([0.0, float(np.max(calls["num_texts"], initial=1.0))])
        files_s = cost.partition_s * float(np.mean(calls["files"])) if len(calls["files"]) else 0.0
        axes.plot(ends, cost.call_s + files_s + cost.text_s * ends, color=INK)
        label = "c + t n" if fit.is_identified else "t n"
        label += ", and f for the mean number of files" if files_s >= SHOWN_S else ""
        handles.append(Line2D([], [], color=INK, label=label))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("texts of a call, n")
    axes.set_ylabel("seconds")
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2)


def _histogram(axes: Axes, values: NDArray[Any], colour: str, label: str) -> None:
    axes.set_xlabel(label)
    axes.set_ylabel("rows")
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if len(values):
        num_bins = int(min(40, max(1, np.ptp(values) + 1)))
        axes.hist(values, bins=num_bins, color=colour, alpha=0.75, edgecolor="white", linewidth=0.5)


def _hazard(axes: Axes, values: NDArray[Any], fit: Hazard) -> None:
    at, hazard, weight = empirical_hazard(values)
    size = 8 + 40 * weight / max(1.0, float(weight.max(initial=1.0)))
    axes.scatter(at, hazard, s=size, color=PHASE_COLOURS["decode"], alpha=0.7, linewidths=0)
    line_t = np.array([1.0, float(np.max(values, initial=2.0))])
    axes.plot(line_t, fit.p0 + fit.eta * line_t, color=INK)
    top = float(np.quantile(hazard, 0.9)) if len(hazard) else fit.p0
    axes.set_ylim(0, 1.6 * max(top, fit.p0, 1e-9))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("completion tokens so far")
    axes.set_ylabel("chance of ending at the next")
    handles = [
        Line2D([], [], color=PHASE_COLOURS["decode"], marker="o", linestyle="", label="measured"),
        Line2D([], [], color=INK, label="p0 + eta t"),
    ]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2)


def empirical_hazard(
    lengths: NDArray[Any], num_bins: int = 30
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Ends per token reached, in stretches of equal length up to the longest but 5 %.

    Returns:
        Middles of the stretches, hazards, and tokens reached (the weight of each).
    """
    if not len(lengths):
        return np.zeros(0), np.zeros(0), np.zeros(0)
    last = int(np.quantile(lengths, 0.95))
    edges = np.unique(np.linspace(0, last, num_bins + 1).astype(int))
    times = np.arange(1, last + 1)
    ends = np.bincount(lengths.astype(int), minlength=last + 1)[1 : last + 1]
    reached = len(lengths) - np.concatenate([[0], np.cumsum(ends)[:-1]])
    where = np.searchsorted(edges, times, side="left") - 1
    ends_in = np.bincount(where, ends, len(edges) - 1)
    exposed = np.bincount(where, reached, len(edges) - 1)
    return (edges[:-1] + edges[1:] + 1) / 2, ends_in / np.maximum(exposed, 1), exposed


def _share_point(
    axes: Axes, at_s: float, shares: Sequence[float], total: float, axis: Axis
) -> None:
    """Where shares of the sequences had finished. The curve rises, so above and to the left of a
    point there is room.
    """
    place = (at_s, shares[-1] * total)
    early, last_but_one = at_s < 0.15 * axis.total_s, shares[-1] == 0.99
    axes.plot(*place, "o", color=SECOND, markersize=5, zorder=4, clip_on=False)
    axes.annotate(
        f"{', '.join(f'{100 * share:.0f}' for share in shares)} %: {at_s:,.{_digits(at_s)}f} s",
        place,
        xytext=(8 if early else -8, -13 if early or last_but_one else 5),
        textcoords="offset points",
        ha="left" if early else "right",
        fontsize=8,
    )


def _digits(seconds: float) -> int:
    return 3 if seconds < 1 else 2 if seconds < 10 else 1


def _short(value: float, _: object = None) -> str:
    """`1.5k`, `20`, `0.03`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"
