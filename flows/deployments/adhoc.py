"""The flow for jobs that somebody starts by hand: its form is the job spec."""

from __future__ import annotations

from typing import Any, cast

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from flows.deployments.form import GPU_SLOTS, job_form, job_of, placed
from flows.prefect_flow import TASKS_IN_FLIGHT, job_runner, run_in_flow
from flows.prefect_text import model_name
from flows.spec_model import input_stem

FLOW = "headrace"
"""The name of both flows; their deployments tell them apart."""


def run_name() -> str:
    """`reviews with smollm2`, from what the run was given."""
    parameters = cast("dict[str, Any]", flow_run.parameters)
    stem = input_stem(str(parameters.get("input", "")))
    model = parameters.get("model")
    return f"{stem} with {model_name(str(model))}" if model else stem


@flow(
    name=FLOW,
    description="A model over every row of a Parquet dataset, one result per row.",
    flow_run_name=run_name,
    task_runner=cast("Any", ThreadPoolTaskRunner(max_workers=TASKS_IN_FLIGHT)),
    validate_parameters=False,
    persist_result=False,
)
@job_form
def adhoc(**fields: Any) -> State[Any]:
    """Run a job, or go on with it."""
    slots = int(fields.get(GPU_SLOTS) or 0)
    return run_in_flow(placed(job_of(fields)), job_runner, gpu_slots=slots)
