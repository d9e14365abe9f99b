"""What `flows simulate` shows: a row for each policy, the recording beside it, and the costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flows.simulate import Costs, PolicyRun, Simulation
from schedulers.sim.recorded import step_samples

if TYPE_CHECKING:
    from rich.console import RenderableType

HEAD = (
    "policy", "time, s", "rows/s", "out tok/s", "tok/s", "steps", "suspended", "short", "switches",
)  # fmt: skip
"""Of the table; "short": steps for which KV memory was short."""


def render_simulation(done: Simulation) -> RenderableType:
    """The simulation for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Simulated job", title_justify="left", box=None)
    for index, name in enumerate(HEAD):
        table.add_column(name, justify="right" if index else "left")
    for run in done.runs:
        table.add_row(*run_cells(run))
    lines = [*recording_lines(done), *size_lines(done), *cost_lines(done.setup.costs)]
    return Group(table, Text(), *(Text(line) for line in lines))


def run_cells(run: PolicyRun) -> tuple[str, ...]:
    """A row of the table."""
    result = run.result
    return (
        run.policy,
        _number(result.job_s),
        _number(result.requests_per_s),
        _number(result.output_tokens_per_s),
        _number(result.tokens_per_s),
        f"{result.num_steps:,}",
        f"{result.num_suspensions:,}",
        f"{result.num_overflow_steps / result.num_steps:.1%}",
        str(run.num_switches),
    )


def recording_lines(done: Simulation) -> Iterator[str]:
    """The recorded job beside the simulated one."""
    recording = done.recording
    if recording is None:
        return
    kinds = Counter(sample.kind for sample in step_samples(recording.steps))
    steps = ", ".join(f"{kinds[kind]:,} {kind}" for kind in ("prefill", "decode", "mixed"))
    yield (
        f"recorded: {recording.num_rows:,} of {recording.record.total_rows:,} rows, policy "
        f"{recording.policy}, steps: {steps}"
    )
    run = done.recorded_run
    if done.measured_s is not None:
        measured = f"{recording.policy}: measured {_number(done.measured_s)} s"
        if run is not None:
            measured += f", simulated {_number(run.result.job_s)} s, ratio {done.ratio:.3f}"
        yield measured
    if recording.num_rows < recording.record.total_rows:
        yield "rows without a completion are not simulated, though their steps were measured"
    if done.measured_s is not None and not kinds["mixed"] and not done.setup.costs.calibration:
        yield "no mixed step was recorded: mixing is taken to cost what its parts cost apart"


def size_lines(done: Simulation) -> Iterator[str]:
    """Sizes of the simulated engine, and its load."""
    setup = done.setup
    config, budget = setup.config, setup.config.budget
    load = "all at once" if setup.concurrency is None else f"{setup.concurrency:,} in flight"
    yield (
        f"{len(setup.requests):,} requests, {load}; KV memory "
        f"{config.num_blocks * config.block_size:,} tokens, at most {budget.max_seqs:,} sequences "
        f"and {budget.max_batch_tokens:,} tokens a step"
    )


def cost_lines(costs: Costs) -> Iterator[str]:
    """The coefficients in use, in milliseconds."""
    cost, beside = costs.cost, costs.schedule
    mixed = f"({_ms(cost.mix_a)} {_signed_ms(cost.mix_b)} r {_signed_ms(cost.mix_c)} r^2)"
    yield f"costs: {costs.source}; in ms:"
    yield f"  prefill  {_ms(cost.alpha_p)} + {_ms(cost.beta_p)} a token"
    yield f"  decode   {_ms(cost.alpha_d)} + {_ms(cost.beta_d)} a token"
    yield f"  mixed    {_ms(cost.alpha_mb)} + {mixed} a token, r: share of decode tokens"
    yield f"  context  {_ms(cost.gamma)} a KV position that a decode token reads"
    yield f"  switch   {_ms(cost.alpha_switch)} from decode to prefill and back"
    yield (
        f"  between  {_ms(beside.fixed_s)} a step, {_ms(beside.per_seq_s)} a sequence, "
        f"{_ms(beside.per_request_s)} a finished row"
    )


def _ms(seconds: float) -> str:
    return f"{_cut(seconds):.4g}"


def _signed_ms(seconds: float) -> str:
    return f"{_cut(seconds):+.4g}"


def _cut(seconds: float) -> float:
    """Milliseconds, without what rounding has left of a zero."""
    return round(1e3 * seconds, 9) + 0.0


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
