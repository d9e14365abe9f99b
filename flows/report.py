"""`flows report`: one HTML page that says what a job did, made from its output alone.

    storage.views    the output in SQL
    report_data      queries: seconds on the job's axis, added up to a few hundred points
    report_encodes   of a job that encodes: its superbatches, and what a call cost
    report_figures   numbers to SVG, over time on the one `report_axis`
    report_tables    numbers to text
    report_page.html the page; escapes all that is not a figure

What is not there (no steps, no crossover, no results) is said in a sentence in its place. What a
task does not have at all (an encoder has no crossover) has no section.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flows import report_figures as figures
from flows import report_tables as tables
from flows.credentials import storage_options
from flows.job_profile import profile_of
from flows.profile_tables import headline, titled_tables
from flows.report_axis import Axis, Mark
from flows.report_data import Telemetry
from flows.report_encodes import EncodeFacts, encode_facts
from schedulers.lengths import Hazard, fit_hazard
from storage.errors import OutputError
from storage.ledger import JOB
from storage.objects import ObjectStore
from storage.record import JobRecord
from storage.status import JobStatus, read_status
from storage.views import open_views

FILE = "report.html"


def write_report(output: str, to: Path | None = None, *, credentials: str | None = None) -> str:
    """Write a job's report and say where it is.

    Args:
        output: the job's output directory or URL.
        to: a local file; None: `report.html` in the output.
        credentials: a Prefect block for an s3:// URL; None: the AWS chain.

    Raises:
        InputError: there is no job at that place.
        OutputError: the page cannot be written.
    """
    options = storage_options(credentials, output)
    page = render_report(output, options).encode()
    if to is None:
        ObjectStore(output, storage_options=options).write(FILE, page)
        return f"{output.rstrip('/')}/{FILE}"
    try:
        to.write_bytes(page)
    except OSError as fault:
        raise OutputError(f"{to} cannot be written: {fault}") from fault
    return str(to)


def render_report(output: str, options: Mapping[str, Any] | None = None) -> str:
    """The page of a job; `options` are of fsspec.

    Raises:
        InputError: there is no job at that place.
    """
    status = read_status(output, storage_options=options)
    store = ObjectStore(output, storage_options=options)
    record = JobRecord.from_bytes(store.read(JOB), store.path(JOB))
    with closing(open_views(store)) as con:
        telemetry = Telemetry(con)
        facts = encode_facts(record, store, telemetry)
        return _template().render(page_values(record, status, telemetry, facts))


def page_values(
    record: JobRecord, status: JobStatus, telemetry: Telemetry, facts: EncodeFacts | None
) -> dict[str, Any]:
    """What the template shows, section by section.

    Args:
        record: of the job.
        status: of its rows.
        telemetry: of its runs.
        facts: its superbatches; None: it generates.
    """
    spec = record.spec
    policy = str(_dig(spec, "engine", "policy"))
    switches = telemetry.switches()
    axis = time_axis(telemetry, switches)
    return {
        "job": {
            "id": record.job_id,
            "created": record.created,
            "model": _dig(spec, "model"),
            "input": _dig(spec, "input"),
            "how": _how(spec, policy, facts),
        },
        "generates": facts is None,
        "facts": tables.facts(status, telemetry),
        "sentence": tables.policy_sentence(policy, telemetry, switches)
        if facts is None
        else tables.superbatch_sentence(facts),
        "state": _state(status),
        "runs": telemetry.runs,
        "throughput": _throughput(telemetry, axis, facts),
        "superbatches": _superbatches(telemetry, axis, facts),
        "crossover": _crossover(telemetry, axis, switches),
        "costs": _costs(telemetry),
        "lengths": _lengths(telemetry) if facts is None else _text_lengths(telemetry),
        "tail": _tail(telemetry, axis),
        "rows": _rows(status),
        "memory": _memory(telemetry),
        "phases": _phases(telemetry),
        "cost_model": tables.cost_table(telemetry),
        "profile": _profile(telemetry),
    }


def time_axis(telemetry: Telemetry, switches: Sequence[Mapping[str, Any]]) -> Axis:
    """The runs end to end, with the mode's stretches and switches."""
    marks = [
        Mark(
            number,
            switch["time_s"],
            f"{number}: {switch['time_s']:,.2f} s, {switch['mode_before']} -> "
            f"{switch['mode_after']}: {switch['reason']}",
        )
        for number, switch in enumerate(switches, start=1)
    ]
    borders_s = [run.start_s for run in telemetry.runs[1:]]
    return Axis(telemetry.total_s, borders_s, telemetry.modes(), marks)


# -- sections: what the template takes; None where there is nothing to show --


def _throughput(telemetry: Telemetry, axis: Axis, facts: EncodeFacts | None) -> Markup | None:
    if not telemetry.num_steps:
        return None
    if facts is not None:
        return figures.encode_throughput(axis, telemetry.bins())
    return figures.throughput(axis, telemetry.bins(), telemetry.phase_shares())


def _superbatches(
    telemetry: Telemetry, axis: Axis, facts: EncodeFacts | None
) -> dict[str, Any] | None:
    calls = telemetry.encode_calls()
    if facts is None or not len(calls["at_s"]):
        return None
    return {
        "figure": figures.encode_calls(axis, calls, facts),
        "table": tables.superbatch_table(facts, telemetry),
    }


def _crossover(
    telemetry: Telemetry, axis: Axis, switches: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    evaluations = telemetry.evaluations()
    if not len(evaluations["at_s"]):
        return None
    return {
        "figure": figures.crossover(axis, evaluations),
        "switches": tables.switch_table(switches),
        "num_switches": len(switches),
    }


def _costs(telemetry: Telemetry) -> dict[str, Any] | None:
    cells = telemetry.cost_cells()
    if not len(cells["kind"]):
        return None
    return {"figure": figures.costs(cells), "errors": tables.cost_errors(telemetry)}


def _lengths(telemetry: Telemetry) -> dict[str, Any] | None:
    prompts = telemetry.lengths("prompt_tokens")
    completions = telemetry.lengths("completion_tokens")
    if not len(completions):
        return None
    row = telemetry.last("crossover", "p0 IS NOT NULL AND eta IS NOT NULL")
    if row is not None:
        fit, fitted = Hazard(row["p0"], row["eta"]), "last look at the crossover"
    else:
        fit, fitted = fit_hazard(completions.tolist()), "fitted to the results"
    return {
        "figure": figures.lengths(prompts, completions, fit),
        "fit": f"p0 = {fit.p0:.4g}, eta = {fit.eta:.3g} per token, {fitted}",
        "mean_prompt": tables.number(float(prompts.mean()) if len(prompts) else math.nan),
        "mean_completion": tables.number(float(completions.mean())),
    }


def _text_lengths(telemetry: Telemetry) -> dict[str, Any] | None:
    lengths = telemetry.lengths("prompt_tokens")
    if not len(lengths):
        return None
    return {
        "figure": figures.text_lengths(lengths),
        "mean": tables.number(float(lengths.mean())),
        "longest": tables.whole(float(lengths.max())),
        "cut": f"{telemetry.num_truncated():,}",
    }


def _tail(telemetry: Telemetry, axis: Axis) -> dict[str, Any] | None:
    shares = telemetry.finished_at()
    if not shares:
        return None
    return {
        "figure": figures.tail(axis, telemetry.finished(), shares),
        "table": tables.tail_table(shares),
        "sentence": tables.tail_sentence(shares),
    }


def _rows(status: JobStatus) -> list[tables.Table]:
    found = {"status": status.by_status, "finish reason": status.by_finish_reason}
    return [tables.count_table(name, counts) for name, counts in found.items() if counts]


def _memory(telemetry: Telemetry) -> dict[str, Any] | None:
    sizings = telemetry.events("memory_plan")
    if not sizings:
        return None
    short, steps = telemetry.num_short_steps, telemetry.num_steps
    bound = sizings[-1]["overflow_probability"]
    return {
        "bytes": tables.memory_table(sizings[-1]),
        "sizings": tables.sizing_table(sizings[-tables.MAX_SIZINGS :]),
        "num_sizings": len(sizings),
        "bound": "-" if bound is None else f"{bound:.2g}",
        "short": f"{short:,} of {steps:,} steps ({short / max(steps, 1):.2%})",
    }


def _phases(telemetry: Telemetry) -> dict[str, Any] | None:
    counts = tables.phase_counts(telemetry)
    if not counts.rows:
        return None
    return {"counts": counts, "first": tables.phase_table(telemetry)}


def _profile(telemetry: Telemetry) -> dict[str, Any] | None:
    found = profile_of(telemetry.con)
    if found is None or not found.cells:
        return None
    return {"headline": headline(found), "tables": list(titled_tables(found))}


def _state(status: JobStatus) -> str:
    if status.lease is not None:
        return "The job was running when this page was made."
    return "" if status.complete else "The job is not complete; the same command goes on from here."


def _how(spec: Mapping[str, Any], policy: str, facts: EncodeFacts | None) -> list[tuple[str, str]]:
    """What decides how the work was done."""
    if facts is None:
        return [("policy", policy)]
    keys = spec.get("partition_by") or ()
    partitions = [("partitioned by", ", ".join(map(str, keys)))] if keys else []
    return [("task", str(_dig(spec, "task"))), *partitions]


def _dig(spec: Mapping[str, Any], *keys: str) -> Any:
    """A value deep in a spec; a dash when it is not there."""
    found: Any = spec
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return "-" if found is None else found


def _template() -> Any:
    source = files("flows").joinpath("report_page.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source)
