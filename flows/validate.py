"""`flows validate`: everything that can be wrong with a job and be known without running it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flows.model import open_model
from flows.prepare import prepare
from flows.sampling import resolve_sampling
from flows.schema_check import check_schema

if TYPE_CHECKING:
    from flows.spec import JobSpec


def validate_job(spec: JobSpec) -> Iterator[str]:
    """Check step by step; yields what is found to be good. No weights are read.

    Raises:
        SpecError, InputError, OutputMismatch, ModelError: what is wrong.
    """
    yield "options: good"
    job = prepare(spec)
    columns = ", ".join(job.renderer.columns) or "no column"
    yield f"input: {job.dataset.num_rows} rows in {len(job.dataset.files)} files"
    yield f"prompt: reads {columns}"
    if spec.output_schema is not None:
        check_schema(spec)
        yield "output schema: good"
    model = open_model(spec)
    job.renderer.bind(model.load_tokenizer())
    resolve_sampling(spec.sampling, model.generation_config)
    yield f"model: {spec.model}, fingerprint {model.fingerprint}"
