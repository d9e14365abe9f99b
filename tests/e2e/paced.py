"""The flow `adhoc` over a fake model that takes its time, whatever else the machine is doing."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, cast

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.task_runners import ThreadPoolTaskRunner

from flows.deployments.adhoc import FLOW, run_name
from flows.deployments.form import job_form, job_of, placed
from flows.model import Model
from flows.prefect_flow import TASKS_IN_FLIGHT, Runner, run_in_flow
from flows.progress import Progress
from flows.runner import JobRunner
from flows.spec import JobSpec
from tests.e2e.jobs import fake_model

STEP_S = 0.06


def paced_model(spec: JobSpec) -> Model:
    """The model of every worker process."""
    return fake_model(on_execute=lambda _: time.sleep(STEP_S))


def paced_runner(spec: JobSpec, progress: Progress) -> AbstractContextManager[Runner]:
    return JobRunner(spec, find_model=paced_model, progress=progress)


@flow(
    name=FLOW,
    flow_run_name=run_name,
    task_runner=cast("Any", ThreadPoolTaskRunner(max_workers=TASKS_IN_FLIGHT)),
    validate_parameters=False,
    persist_result=False,
)
@job_form
def adhoc(**fields: Any) -> State[Any]:
    """Run a job, step by step."""
    return run_in_flow(placed(job_of(fields)), paced_runner)
