"""Matplotlib figures as SVG that can stand in one HTML page with others: style and clean-up.

An inlined SVG shares the page's ids and style sheet, so ids that something refers to get the
figure's name in front and a number, and other ids, prolog, metadata and style element go.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping
from html import escape
from typing import Any, Final, Self

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#5f6b7a", "#e4e8ee"
WIDTH_IN: Final = 11.2

_STYLE: Final[dict[Any, Any]] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#b6bfca",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "headrace",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
}
_NO_METADATA: Final = dict.fromkeys(("Creator", "Date", "Format", "Type"))


class Drawing:
    """A figure in the page's style: draw on `figure` inside the block, then take `svg`.

    Args:
        name: unique in the page; ids begin with it.
        label: what the figure shows, for who cannot see it.
        height_in: at the page's width.
    """

    def __init__(self, name: str, label: str, *, height_in: float) -> None:
        self.name = name
        self._label = label
        self._height_in = height_in
        self._tooltips: dict[str, str] = {}
        self._style = mpl.rc_context(_STYLE)

    def __enter__(self) -> Self:
        self._style.__enter__()
        self.figure = Figure(figsize=(WIDTH_IN, self._height_in), layout="constrained")
        self.figure.patch.set_alpha(0.0)
        FigureCanvasSVG(self.figure)
        return self

    def __exit__(self, *fault: object) -> None:
        try:
            if fault[0] is None:
                self.svg = self._rendered()
        finally:
            self._style.__exit__(None, None, None)

    def panels(self, *heights: float) -> list[Axes]:
        """Axes one below the other on a common horizontal axis."""
        grid: Any = self.figure.subplots(
            len(heights),
            1,
            sharex=True,
            squeeze=False,
            gridspec_kw={"height_ratios": list(heights)},
        )
        return list(grid[:, 0])

    def tooltip(self, gid: str, text: str) -> None:
        """Say something more when the pointer is over an artist of that gid."""
        self._tooltips[gid] = text

    def _rendered(self) -> Markup:
        file = io.StringIO()
        self.figure.savefig(file, format="svg", metadata=_NO_METADATA)
        return Markup(inlined(file.getvalue(), self.name, self._label, self._tooltips))


def inlined(svg: str, name: str, label: str, tooltips: Mapping[str, str]) -> str:
    """An SVG file as an element of a page that holds others. `label` and tooltips are escaped."""
    head, body = svg[svg.index("<svg") :].split(">", 1)
    (view_box,) = re.findall(r'viewBox="[^"]*"', head)
    body = re.sub(r"<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = body.replace(' target="_blank"', "")
    body = _renamed_ids(body, name, keep=tooltips)
    for gid, text in tooltips.items():
        group = f'<g id="{name}-{gid}">'
        body = body.replace(group, f"{group}<title>{escape(text)}</title>")
    return f'<svg role="img" aria-label="{escape(label)}" {view_box}>{body}'


def _renamed_ids(body: str, name: str, *, keep: Collection[str]) -> str:
    """Matplotlib's ids are not the same each time, so they are numbered; those in `keep` stay."""
    used = dict.fromkeys(re.findall(r'(?:\bhref="#|url\(#)([^")]+)', body))
    ids = set(re.findall(r'\bid="([^"]+)"', body))
    numbered = {own: f"{name}-{count}" for count, own in enumerate(o for o in used if o in ids)}
    names = numbered | {own: f"{name}-{own}" for own in keep}

    def renamed(match: re.Match[str]) -> str:
        before, own = match.groups()
        return f"{before}{names.get(own, own)}"

    body = re.sub(r'\sid="([^"]+)"', lambda match: match[0] if match[1] in names else "", body)
    return re.sub(r'(\bid="|\bhref="#|url\(#)([^")]+)', renamed, body)
