"""What figures over time share: the time axis, the mode behind it, and its numbered switches.

A switch is a line through every panel, and on top a badge that leads to the switch's row in the
table (`switch-N`). Colours are of Okabe and Ito's set, told apart by all eyes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from flows.report_svg import INK, MUTED, Drawing

PHASE_COLOURS: Final[Mapping[str, str]] = {
    "prefill": "#0072b2",
    "decode": "#d55e00",
    "mixed": "#009e73",
    "idle": "#c9ced6",
}
MODE_COLOURS: Final[Mapping[str, str]] = {"exclusive": "#e6e2f6", "mixed": "#fdf1cf"}
MODE_EDGES: Final[Mapping[str, str]] = {"exclusive": "#9a8fd0", "mixed": "#d9b44a"}
MAX_BADGES = 150
BADGE_WIDTH = 0.024
"""Of a badge, as a share of the axis."""
MAX_LEVELS = 6


class Mark(NamedTuple):
    """A mode switch on the time axis; `text` is what the pointer shows."""

    number: int
    at_s: float
    text: str


class Axis(NamedTuple):
    """What all figures over time share.

    Attributes:
        total_s: the length of the axis.
        borders_s: where a run ended and the next began.
        modes: start, end and mode of each stretch.
        marks: the mode switches.
    """

    total_s: float
    borders_s: Sequence[float]
    modes: Sequence[tuple[float, float, str]]
    marks: Sequence[Mark]


def over_time(
    drawing: Drawing, axis: Axis, panels: Sequence[Axes], *, strips: Sequence[Axes] = ()
) -> None:
    """Modes in the background, borders of runs, and the numbered switches."""
    for axes in panels:
        for start_s, end_s, mode in axis.modes:
            if mode in MODE_COLOURS:
                axes.axvspan(start_s, end_s, color=MODE_COLOURS[mode], linewidth=0, zorder=0)
    for axes in (*panels, *strips):
        for border_s in axis.borders_s:
            axes.axvline(border_s, color=INK, linewidth=1.2, linestyle=(0, (1, 2)))
        for mark in axis.marks:
            axes.axvline(mark.at_s, color=INK, linewidth=0.9)
    _run_names(panels[-1], axis)
    _badges(drawing, panels[0], axis)
    panels[-1].set_xlabel("seconds since the first step")
    panels[-1].set_xlim(0, max(axis.total_s, 1e-3))


def _badges(drawing: Drawing, top: Axes, axis: Axis) -> None:
    """Numbers over the top panel, higher where they would cover one another."""
    taken = np.full(MAX_LEVELS, -np.inf)
    for mark in axis.marks[:MAX_BADGES]:
        free = np.flatnonzero(mark.at_s - taken > BADGE_WIDTH * axis.total_s)
        level = int(free[0]) if len(free) else int(taken.argmin())
        taken[level] = mark.at_s
        _badge(top, mark, level)
        drawing.tooltip(f"mark-{mark.number}", mark.text)


def _badge(top: Axes, mark: Mark, level: int) -> None:
    badge = top.annotate(
        str(mark.number),
        (mark.at_s, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 9 + 15 * level),
        textcoords="offset points",
        ha="center",
        va="center",
        color="white",
        fontsize=8,
        fontweight="bold",
        bbox={"boxstyle": "circle,pad=0.25", "facecolor": INK, "edgecolor": "white"},
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.6} if level else None,
    )
    badge.set_gid(f"mark-{mark.number}")
    badge.set_url(f"#switch-{mark.number}")
    patch = badge.get_bbox_patch()
    if patch is not None:
        patch.set_url(f"#switch-{mark.number}")


def _run_names(bottom: Axes, axis: Axis) -> None:
    for number, border_s in enumerate(axis.borders_s, start=2):
        bottom.annotate(
            f" run {number}",
            (border_s, 1.0),
            xycoords=("data", "axes fraction"),
            va="top",
            fontsize=8,
            color=MUTED,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
        )


def legend(
    drawing: Drawing, axis: Axis, *, phases: Collection[str] = (), lines: Sequence[Any] = ()
) -> None:
    """One legend above the panels: lines, kinds of step, and modes."""
    present = {mode for _, _, mode in axis.modes}
    steps = [
        Patch(color=colour, label=f"{name} step")
        for name, colour in PHASE_COLOURS.items()
        if name in phases
    ]
    modes = [
        Patch(facecolor=colour, edgecolor=MODE_EDGES[mode], label=f"mode {mode}")
        for mode, colour in MODE_COLOURS.items()
        if mode in present
    ]
    handles = [*lines, *steps, *modes]
    if handles:
        drawing.figure.legend(handles=handles, loc="outside upper left", ncols=6)
