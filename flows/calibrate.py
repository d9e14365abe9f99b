"""`flows calibrate`: measures the step costs of a model on this machine, and keeps them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flows.calibration import hardware_of, store_calibration
from flows.errors import SpecError
from flows.model import Model, open_model
from flows.specfile import build
from schedulers.calibration import Calibration, calibrated, interference, noise
from workers.calibrate import OnProgress, measure_steps
from workers.setup import EngineOptions, device_memory_bytes, size_engine

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flows.spec import JobSpec
    from workers.backends.base import Backend


class Calibrated(NamedTuple):
    """A calibration and where it is kept."""

    calibration: Calibration
    path: Path


def spec_of(flat: Mapping[str, Any]) -> JobSpec:
    """The job spec with these options and no rows: a calibration reads no input.

    Raises:
        SpecError: as for a job.
    """
    return build({"input": "none", "prompt": {"template": "none"}}, flat)


def run_calibration(
    spec: JobSpec,
    *,
    budget_s: float,
    model: Model | None = None,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: OnProgress = lambda _what, _elapsed_s: None,
) -> Calibrated:
    """Load the model, measure, fit and store.

    Args:
        spec: the model, and the engine's limits.
        budget_s: seconds for measuring; see `measure_steps`.
        model: another model than the spec names.
        clock: seconds, monotonic.
        on_progress: told what is being done.

    Raises:
        SpecError: the budget is not above 0, or the cache cannot be written.
        ModelError, NotEnoughMemory: as running a job would.
    """
    if budget_s <= 0:
        raise SpecError(f"--budget is {budget_s:g}; it must be above 0 seconds")
    on_progress("loading the model", 0.0)
    known = model or open_model(spec)
    backend = known.load_backend()
    try:
        calibration = _measured(spec, backend, known.fingerprint, budget_s, clock, on_progress)
    finally:
        backend.close()
    return Calibrated(calibration, store_calibration(calibration))


def _measured(
    spec: JobSpec,
    backend: Backend,
    model_fingerprint: str,
    budget_s: float,
    clock: Callable[[], float],
    on_progress: OnProgress,
) -> Calibration:
    info = backend.info
    num_blocks, settings = _sizes(spec, backend)
    samples = measure_steps(
        backend,
        num_blocks=num_blocks,
        **settings,
        clock=clock,
        budget_s=budget_s,
        on_progress=on_progress,
    )
    return calibrated(
        samples,
        hardware=hardware_of(info.device),
        model_fingerprint=model_fingerprint,
        model=info.name,
        dtype=info.dtype,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=settings,
    )


def _sizes(spec: JobSpec, backend: Backend) -> tuple[int, dict[str, int]]:
    """KV blocks and step sizes that a job with these options would run with."""
    engine = spec.engine
    options = EngineOptions(
        memory_bytes=engine.memory_bytes(device_memory_bytes(backend.info.device)),
        max_batch_tokens=engine.max_batch_tokens,
        max_seqs=engine.max_seqs,
    )
    config = size_engine(backend.info, options).config
    return config.num_blocks, {
        "block_size": config.block_size,
        "max_batch_tokens": config.budget.max_batch_tokens,
        "max_seqs": config.budget.max_seqs,
    }


# -- what is shown --

NOISY = 0.1
"""Share by which repetitions may differ before they are not relied on."""
CURVE_HEAD = (
    "decode share", "tokens a step", "mixed", "apart", "ratio", "marginal, mixed", "apart",
)  # fmt: skip


class ProgressLines:
    """Writes what is being done, when it changes and every few seconds.

    Args:
        write: takes a line.
        interval_s: between lines about the same.
    """

    def __init__(self, write: Callable[[str], None], *, interval_s: float = 5.0) -> None:
        self._write = write
        self._interval_s = interval_s
        self._what = ""
        self._told_s = 0.0

    def __call__(self, what: str, elapsed_s: float) -> None:
        """Told about once a step."""
        if what == self._what and elapsed_s - self._told_s < self._interval_s:
            return
        self._what, self._told_s = what, elapsed_s
        self._write(f"{elapsed_s:5.1f} s  {what}")


def render_calibration(done: Calibrated) -> RenderableType:
    """Coefficients, fit and interference curve for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table(show_header=False, title="Step costs", title_justify="left", box=None)
    facts.add_column(style="bold")
    facts.add_column(justify="right")
    facts.add_column(overflow="fold")
    for name, value, meaning in coefficient_lines(done.calibration):
        facts.add_row(name, value, Text(meaning))
    lines = [Text(line) for line in closing_lines(done)]
    return Group(facts, Text(), curve_table(done.calibration), *lines)


def curve_table(calibration: Calibration) -> RenderableType:
    """The interference curve for the terminal."""
    from rich.table import Table

    head = (
        "decode share",
        "tokens a step",
        "mixed",
        "apart",
        "ratio",
        "mixed, marginal",
        "apart, marginal",
    )
    curve = Table(*head, title="Interference, ms per token", title_justify="left", box=None)
    for row in curve_lines(calibration):
        curve.add_row(*row)
    return curve


def closing_lines(done: Calibrated) -> Iterator[str]:
    """Where it is kept, and a warning where it should not be relied on."""
    yield f"stored in {done.path}"
    share = noise(done.calibration.samples)
    if share > NOISY:
        yield (
            f"repetitions of a step differ by {share:.0%}: something else is using this machine; "
            "calibrate again when it is idle"
        )


def coefficient_lines(calibration: Calibration) -> Iterator[tuple[str, str, str]]:
    """Name, value and meaning of each coefficient, r* and the fit's quality."""
    cost = calibration.cost
    yield "alpha_p", f"{1e3 * cost.alpha_p:.2f} ms", "a prefill step"
    yield "beta_p", f"{1e3 * cost.beta_p:.4f} ms", "each of its tokens"
    yield "alpha_d", f"{1e3 * cost.alpha_d:.2f} ms", "a decode step"
    yield "beta_d", f"{1e3 * cost.beta_d:.4f} ms", "each of its tokens"
    yield "gamma", f"{1e6 * cost.gamma:.3f} us", "each KV position that a decode token reads"
    yield "alpha_mb", f"{1e3 * cost.alpha_mb:.2f} ms", "a mixed step"
    yield "a, b, c", _quadratic(calibration), "ms per token of it: a + b r + c r^2"
    yield "alpha_switch", f"{1e3 * cost.alpha_switch:.2f} ms", "from decode to prefill and back"
    threshold = cost.interference_threshold()
    shown = "none" if threshold is None else f"{threshold:.3f}"
    yield "r*", shown, "decode share above which a token costs more mixed than in a decode step"
    yield "noise", f"{noise(calibration.samples):.1%}", "of repetitions around their median"
    for kind, value in calibration.r_squared.items():
        yield f"R^2 {kind}", f"{value:.4f}", ""


def _quadratic(calibration: Calibration) -> str:
    cost = calibration.cost
    return " ".join(f"{1e3 * value:.4f}" for value in (cost.mix_a, cost.mix_b, cost.mix_c))


def curve_lines(calibration: Calibration) -> Iterator[tuple[str, ...]]:
    """A row for each decode share, in ms per token."""
    for item in interference(calibration.samples, calibration.cost):
        yield (
            f"{item.decode_share:.2f}",
            f"{item.mean_tokens:.0f}",
            f"{1e3 * item.mixed_s:.3f}",
            f"{1e3 * item.apart_s:.3f}",
            f"{item.ratio:.2f}",
            f"{1e3 * item.mixed_marginal_s:.3f}",
            f"{1e3 * item.apart_marginal_s:.3f}",
        )
