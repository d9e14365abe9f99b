"""The flow for a job that runs on a schedule: `adhoc` with dates in its paths."""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.runtime import deployment
from prefect.task_runners import ThreadPoolTaskRunner

from flows.deployments.adhoc import FLOW
from flows.deployments.dates import dated, in_zone, timezone_of
from flows.deployments.form import GPU_SLOTS, given, job_form, job_of, placed
from flows.prefect_flow import TASKS_IN_FLIGHT, job_runner, run_in_flow


def scheduled_at() -> datetime:
    """When this flow run was to begin, in the time zone of its schedule."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    run = context.flow_run
    return in_zone(run.expected_start_time, _timezone(run))


def _timezone(run: FlowRun) -> str:
    if run.deployment_id is None:
        return "UTC"
    with get_client(sync_client=True) as client:
        found = client.read_deployment(run.deployment_id)
    return timezone_of(found.schedules, run.created_by.id if run.created_by else None)


def _name() -> str:
    """Of the deployment: its artifacts have a history over the nights."""
    return deployment.name or "nightly"


def run_name() -> str:
    """`nightly 2026-11-30`."""
    return f"{_name()} {scheduled_at().date()}"


@flow(
    name=FLOW,
    description=(
        "A model over every row of a Parquet dataset, one result per row. Input and output may "
        "name the date that a run is scheduled for."
    ),
    flow_run_name=run_name,
    task_runner=cast("Any", ThreadPoolTaskRunner(max_workers=TASKS_IN_FLIGHT)),
    validate_parameters=False,
    persist_result=False,
)
@job_form
def nightly(**fields: Any) -> State[Any]:
    """Run the job of a night, or go on with it."""
    at = scheduled_at()
    spec = placed(job_of(dated(given(fields), at)))
    get_run_logger().info("scheduled for %s: %s -> %s", at.isoformat(), spec.input, spec.output)
    slots = int(fields.get(GPU_SLOTS) or 0)
    return run_in_flow(spec, job_runner, key=_name(), gpu_slots=slots)
