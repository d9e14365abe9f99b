"""Registers the deployments with a Prefect server: `flows deploy` and `flows serve`.

    headrace/adhoc    no schedule; its form is the job spec
    headrace/nightly  a cron schedule; one run at a time, and a new one is cancelled while one runs

`infra/prefect.yaml` says the same for `prefect deploy`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import DeploymentApplyError, RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.schedules import Cron
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from flows.deployments.adhoc import adhoc
from flows.deployments.dates import dated, in_zone
from flows.deployments.form import form_values, job_of, placed
from flows.deployments.nightly import nightly
from flows.errors import ServerError, SpecError
from flows.prefect_server import check_server
from flows.specfile import read_job

TAGS = ("headrace",)
SLUG = "nightly"
"""Of the schedule, so that registering again replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nightly:
    """What `nightly` is registered with.

    Attributes:
        job: the parameters of its runs; None: it has no job yet, and its schedule stays off.
        cron: when it runs.
        timezone: in which `cron` is meant, and dates in paths are.
    """

    job: Mapping[str, Any] | None
    cron: str
    timezone: str


def read_nightly(job: Path | None, *, cron: str, timezone: str) -> Nightly:
    """The nightly job of a job file, checked as far as that can be done before its night.

    Raises:
        SpecError: the file is no job, or time zone or schedule are none.
    """
    try:
        ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as fault:
        raise SpecError(
            f"the time zone {timezone!r} is not known; give a name such as Europe/Berlin or UTC"
        ) from fault
    try:
        Cron(cron)
    except ValueError as fault:
        raise SpecError(
            f"the schedule {cron!r} is no cron expression ({fault}); give five fields such as "
            "'0 2 * * *' for two o'clock every night"
        ) from fault
    if job is None:
        return Nightly(job=None, cron=cron, timezone=timezone)
    values = form_values(read_job(job))
    placed(job_of(dated(values, in_zone(datetime.now(UTC), timezone))))
    return Nightly(job=values, cron=cron, timezone=timezone)


def make_deployments(asked: Nightly) -> tuple[RunnerDeployment, RunnerDeployment]:
    """Both deployments, by module, so that a flow run needs the package and no file."""
    schedule = Cron(asked.cron, timezone=asked.timezone, active=asked.job is not None, slug=SLUG)
    return (
        _deployment(adhoc, "adhoc"),
        _deployment(
            nightly,
            "nightly",
            schedule=schedule,
            parameters=dict(asked.job or {}),
            concurrency_limit=ConcurrencyLimitConfig(
                limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW
            ),
        ),
    )


def _deployment(run: Flow[..., Any], name: str, **options: Any) -> RunnerDeployment:
    return RunnerDeployment.from_flow(
        run, name, tags=list(TAGS), entrypoint_type=EntrypointType.MODULE_PATH, **options
    )


def deploy(job: Path | None, *, work_pool: str, cron: str, timezone: str) -> Iterator[str]:
    """Register both deployments in a work pool; yields what was done, line by line.

    A work pool that there is not is made, for Prefect workers that run processes.

    Raises:
        ServerError: the server does not answer, or refuses.
        SpecError: see `read_nightly`.
    """
    check_server()
    asked = read_nightly(job, cron=cron, timezone=timezone)
    if _make_pool(work_pool):
        yield f"work pool {work_pool}: made, for processes"
    for deployment in make_deployments(asked):
        try:
            deployment.apply(work_pool_name=work_pool)
        except DeploymentApplyError as fault:
            said = " ".join(str(fault).split())
            raise ServerError(
                f"the Prefect server refused {deployment.full_name}: {said}"
            ) from fault
        yield f"{deployment.full_name}: registered in work pool {work_pool}"
    yield _schedule_line(asked)
    yield f"run them with: prefect worker start --pool {work_pool}"


def serve(job: Path | None, *, cron: str, timezone: str, limit: int) -> Iterator[str]:
    """Register both deployments and run them here, until it is told to stop; needs no work pool.

    Raises:
        ServerError, SpecError: as `deploy`.
    """
    from prefect import serve as serve_here

    url = check_server()
    asked = read_nightly(job, cron=cron, timezone=timezone)
    deployments = make_deployments(asked)
    _refuse_pooled(deployments)
    yield f"serving {', '.join(item.full_name for item in deployments)} for {url}"
    yield _schedule_line(asked)
    serve_here(*deployments, limit=limit, print_starting_message=False)


def _schedule_line(asked: Nightly) -> str:
    when = f"{asked.cron} ({asked.timezone})"
    if asked.job is None:
        return f"schedule of nightly: {when}, off, as it has no job; give one with --job FILE"
    return f"schedule of nightly: {when}"


def _refuse_pooled(deployments: Sequence[RunnerDeployment]) -> None:
    """Prefect leaves a deployment in its work pool, where nobody would run what is served here."""
    with get_client(sync_client=True) as client:
        for deployment in deployments:
            try:
                found = client.read_deployment_by_name(deployment.full_name)
            except ObjectNotFound:
                continue
            if found.work_pool_name is not None:
                name, pool = deployment.full_name, found.work_pool_name
                raise ServerError(
                    f"{name} is registered in work pool {pool!r}, and its runs go there; start a "
                    f"worker (prefect worker start --pool {pool}), or first delete it (prefect "
                    f"deployment delete {name})"
                )


def _make_pool(name: str) -> bool:
    """Whether the work pool had to be made."""
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            pool = WorkPoolCreate(
                name=name,
                type=ProcessWorker.type,
                base_job_template=ProcessWorker.get_default_base_job_template(),
            )
        else:
            return False
        try:
            client.create_work_pool(pool)
        except ObjectAlreadyExists:
            return False
    return True
