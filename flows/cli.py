"""The command `flows`. Imports nothing heavy: what a command needs is imported when it runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.errors import FlowsError, ServerError, SpecError
from flows.options import with_some_spec_options, with_spec_options
from flows.spec_model import JobSpec
from flows.specfile import build, read_job

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="flows",
    help="A model over every row of a Parquet dataset, one result per row.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JobFile = Annotated[
    Path | None, typer.Option("--job", help="YAML file with the job; options win over it.")
]
UsePrefect = Annotated[
    bool | None,
    typer.Option(
        "--prefect/--local",
        help="As a Prefect flow, or without; by default as one when PREFECT_API_URL is set.",
    ),
]
WithProfile = Annotated[
    bool, typer.Option("--profile", help="Show at the end where the time of the run went.")
]
Budget = Annotated[float, typer.Option("--budget", help="Seconds for measuring.")]
Credentials = Annotated[
    str | None,
    typer.Option(
        "--credentials",
        help="Prefect block for an s3:// URL, such as aws-credentials/prod; by default the AWS "
        "chain.",
    ),
]
NightlyJob = Annotated[
    Path | None,
    typer.Option(
        "--job",
        help="YAML file with the nightly job; its input and output may hold {{ date }}. "
        "Without one the schedule is off.",
    ),
]
NIGHTLY_CRON = "0 2 * * *"
CronOption = Annotated[str, typer.Option("--cron", help="When nightly runs.")]
ZoneOption = Annotated[
    str, typer.Option("--timezone", help="In which --cron is meant, and dates in paths are.")
]
CALIBRATED = ("model", "revision", "dtype", "device", "memory", "max_batch_tokens", "max_seqs")
"""Options of a job that step costs depend on."""
OK, FAILED, USAGE = 0, 1, 2


@app.command()
@with_spec_options
def run(
    flat: dict[str, Any],
    context: typer.Context,
    job: JobFile = None,
    prefect: UsePrefect = None,
    profile: WithProfile = False,
) -> None:
    """Run a job, or go on with it: exit status 0 done, 1 not done or too many bad rows, 2 usage."""
    spec = _spec(flat, job)
    console = _console(stderr=True)
    console.print(headline(spec), highlight=False, markup=False, soft_wrap=True)
    with_prefect = bool(os.environ.get("PREFECT_API_URL")) if prefect is None else prefect
    if with_prefect:
        code = _run_prefect(spec)
        if profile:
            _show_profile(spec.output, last_run=True, credentials=spec.credentials)
    else:
        code = _run_local(spec, console, began_s=context.obj, profile=profile)
    raise typer.Exit(code)


@app.command()
@with_spec_options
def plan(flat: dict[str, Any], job: JobFile = None) -> None:
    """Show what a job would do, without running the model: rows, tokens, prompts, memory, time."""
    from flows.plan import plan_of, render_plan

    spec = _spec(flat, job)
    console = _console()
    console.print(headline(spec), highlight=False, markup=False, soft_wrap=True)
    console.print(render_plan(plan_of(spec)))


@app.command()
@with_spec_options
def validate(flat: dict[str, Any], job: JobFile = None) -> None:
    """Check a job without loading its model: options, input, columns, template, schema, output."""
    from flows.validate import validate_job

    for line in validate_job(_spec(flat, job)):
        typer.echo(line)


@app.command()
@with_some_spec_options(*CALIBRATED)
def calibrate(flat: dict[str, Any], budget: Budget = 60.0) -> None:
    """Measure what steps of a model cost on this machine, for a minute, and keep it."""
    from flows.calibrate import ProgressLines, render_calibration, run_calibration, spec_of

    def tell(line: str) -> None:
        typer.echo(line, err=True)

    done = run_calibration(spec_of(flat), budget_s=budget, on_progress=ProgressLines(tell))
    _console().print(render_calibration(done))


@app.command()
def status(
    output: Annotated[str, typer.Argument(help="The job's output directory or URL.")],
    credentials: Credentials = None,
) -> None:
    """Show where a job stands, also while it runs."""
    from flows.credentials import storage_options
    from flows.status import render_status
    from storage.status import read_status

    options = storage_options(credentials, output)
    _console().print(render_status(read_status(output, storage_options=options)))


@app.command()
def report(
    output: Annotated[str, typer.Argument(help="The job's output directory or URL.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="Where to write it; by default OUTPUT/report.html.")
    ] = None,
    credentials: Credentials = None,
) -> None:
    """Write an HTML page that shows what a job did and why."""
    from flows.report import write_report

    typer.echo(write_report(output, to, credentials=credentials))


@app.command()
def profile(
    output: Annotated[str, typer.Argument(help="The job's output directory or URL.")],
    credentials: Credentials = None,
) -> None:
    """Show where the time of a job went, also while it runs."""
    _show_profile(output, credentials=credentials)


@app.command()
def simulate(
    output: Annotated[
        str | None, typer.Argument(help="The output of a job, to be replayed.")
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            "--synthetic", metavar="PROMPT:OUTPUT", help="Made-up rows of these mean tokens."
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", help="Number of made-up rows [default: 1000]")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", help="Requests in flight; by default all at once."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="A policy, or all; by default the job's, else hybrid."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="What steps cost: job (its own steps), calibration (of this machine), h200, "
            "h200-e2e, rtx-pro-6000, rtx-pro-6000-e2e; by default job, else h200.",
        ),
    ] = None,
    max_seqs: Annotated[
        int | None, typer.Option("--max-seqs", help="Most sequences that hold KV memory.")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option("--max-batch-tokens", help="Most tokens computed in one step.")
    ] = None,
    capacity_tokens: Annotated[
        int | None, typer.Option("--capacity-tokens", help="Tokens that KV memory holds.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of the made-up rows [default: 0]")
    ] = None,
    credentials: Credentials = None,
) -> None:
    """Say what a job would take under another policy, or on other hardware, without running it."""
    from flows.simulate import run_simulation
    from flows.simulate_options import SimulateOptions
    from flows.simulate_tables import render_simulation

    asked = SimulateOptions(
        output=output,
        synthetic=synthetic,
        rows=rows,
        concurrency=concurrency,
        policy=policy,
        hardware=hardware,
        max_seqs=max_seqs,
        max_batch_tokens=max_batch_tokens,
        capacity_tokens=capacity_tokens,
        seed=seed,
        credentials=credentials,
    )
    _console().print(render_simulation(run_simulation(asked)))


@app.command()
def deploy(
    job: NightlyJob = None,
    work_pool: Annotated[
        str, typer.Option("--work-pool", help="Work pool of the runs; made if there is none.")
    ] = "headrace",
    cron: CronOption = NIGHTLY_CRON,
    timezone: ZoneOption = "UTC",
) -> None:
    """Register adhoc and nightly with the Prefect server, to be run by Prefect workers."""
    from flows.deployments.register import deploy as register

    for line in register(job, work_pool=work_pool, cron=cron, timezone=timezone):
        typer.echo(line)


@app.command()
def serve(
    job: NightlyJob = None,
    cron: CronOption = NIGHTLY_CRON,
    timezone: ZoneOption = "UTC",
    limit: Annotated[int, typer.Option("--limit", help="Most runs at a time.", min=1)] = 1,
) -> None:
    """Register adhoc and nightly with the Prefect server, and run them here: no work pool."""
    from flows.deployments.register import serve as serve_here

    for line in serve_here(job, cron=cron, timezone=timezone, limit=limit):
        typer.echo(line)


@app.command()
def version() -> None:
    """Show the version."""
    typer.echo(f"headrace {metadata.version('headrace')}")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; always raises SystemExit."""
    began_s = time.monotonic()
    if args is None:  # called by the shell: what the process has done so far was for this
        began_s -= time.process_time()
    try:
        app(args=args, obj=began_s)
    except Exception as fault:
        if not isinstance(fault, _known_errors()):
            raise
        typer.echo(f"error: {' '.join(str(fault).split())}", err=True)
        sys.exit(USAGE if isinstance(fault, _usage_errors()) else FAILED)


def headline(spec: JobSpec) -> str:
    """What will be done, in a line: printed before anything heavy is imported."""
    rows = f", first {spec.limit} rows" if spec.limit is not None else ""
    return f"{spec.input} -> {spec.output}: {spec.task} with {spec.model}{_how(spec)}{rows}"


def _how(spec: JobSpec) -> str:
    if spec.task == "generate":
        most = spec.sampling.max_tokens
        return f", policy {spec.engine.policy}, at most {most} tokens a row"
    if spec.partition_by:
        return f", a file for each {', '.join(spec.partition_by)}"
    return ""


def _spec(flat: dict[str, Any], job: Path | None) -> JobSpec:
    data = {} if job is None else read_job(job)
    if "input" not in flat and "input" not in data:
        raise SpecError("no input; give PATH, or a job file with 'input: ...' (--job)")
    return build(data, flat)


def _run_local(spec: JobSpec, console: Console, *, began_s: float, profile: bool) -> int:
    from flows.display import console_progress, shown, summary_table
    from flows.runner import run_job
    from flows.signals import StopOnSignal

    with StopOnSignal() as signals, shown(console_progress(console), console) as progress:
        summary = run_job(spec, progress=progress, on_start=signals.attach, began_s=began_s)
    _console().print(summary_table(summary))
    if profile and summary.num_steps:
        _show_profile(spec.output, last_run=True, credentials=spec.credentials)
    elif profile:
        typer.echo("no profile: this run computed no step")
    return summary.exit_code(spec.max_error_rate)


def _run_prefect(spec: JobSpec) -> int:
    from flows.prepare import prepare

    prepare(spec)  # the user's mistakes show before a server is waited for
    from flows.prefect_server import check_server, server_url

    if server_url() is not None:  # else Prefect starts one of its own
        check_server()
    from flows.prefect_flow import run_as_flow

    return run_as_flow(spec)


def _show_profile(output: str, *, last_run: bool = False, credentials: str | None = None) -> None:
    from flows.job_profile import read_profile
    from flows.profile_tables import WIDTH, render_profile

    console = _console()
    profile = read_profile(output, last_run=last_run, credentials=credentials)
    found = render_profile(profile)
    console.print(found, width=max(console.width, WIDTH), crop=False)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def _known_errors() -> tuple[type[Exception], ...]:
    """Errors whose message is enough: a traceback would only bury it."""
    from schedulers.memory import NotEnoughMemory
    from storage.errors import StorageError
    from workers.errors import WorkerError

    return (FlowsError, StorageError, WorkerError, NotEnoughMemory)


def _usage_errors() -> tuple[type[Exception], ...]:
    """Those that the user mends in the command or in its files."""
    from schedulers.memory import NotEnoughMemory
    from storage.errors import InputError, OutputError, OutputInUse, OutputMismatch
    from workers.errors import ModelError

    ours = (SpecError, ServerError, ModelError, NotEnoughMemory)
    return (*ours, InputError, OutputError, OutputInUse, OutputMismatch)


if __name__ == "__main__":
    main()
