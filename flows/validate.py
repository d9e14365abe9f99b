"""`flows validate`: everything that can be wrong with a job and be known without running it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from flows.credentials import storage_options
from flows.model import open_model
from flows.prepare import prepare
from flows.sampling import resolve_sampling

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
    yield f"input: {job.dataset.num_rows} rows, files: {len(job.dataset.files)}"
    yield f"prompt: reads {columns}"
    if spec.output_schema is not None:
        yield "output schema: good"
    model = open_model(spec)
    job.renderer.bind(model.load_tokenizer())
    resolve_sampling(spec.sampling, model.generation_config)
    yield f"model: {spec.model}, fingerprint {model.fingerprint}"
    yield f"output: {_output(spec, job.fingerprint(model).generation)}"


def _output(spec: JobSpec, generation: Mapping[str, object]) -> str:
    """What running the job would do to the output.

    Raises:
        OutputMismatch: it belongs to another job, and is not to be overwritten.
    """
    from storage.errors import OutputMismatch
    from storage.ledger import JOB
    from storage.objects import ObjectStore
    from storage.record import JobRecord, differences

    options = storage_options(spec.credentials, spec.output)
    store = ObjectStore(spec.output, storage_options=options)
    data = store.read_or_none(JOB)
    if data is None:
        return f"{spec.output} is new"
    if spec.overwrite:
        return f"{spec.output} will be deleted and written anew"
    found = differences(JobRecord.from_bytes(data, store.path(JOB)).generation, generation)
    if found:
        raise OutputMismatch(store.url, found)
    return f"{spec.output} belongs to this job and will be gone on with"
