"""Everything about a job that can be known, and can be wrong, before a model is loaded.

Used by `flows run`, `flows plan` and `flows validate` alike, so a mistake has one message whichever
command finds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from flows.credentials import storage_options
from flows.fingerprint import Fingerprint, fingerprint
from flows.model import Model
from flows.prompts import PromptRenderer, check_columns
from flows.schema_check import check_schema
from flows.spec import JobSpec
from storage.objects import ObjectStore
from storage.remote import is_s3
from storage.rows import check_unique_ids
from storage.source import Dataset, open_dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job whose input has been looked at.

    Attributes:
        spec: the job.
        dataset: the input's files, schema and fingerprint.
        renderer: prompts without the chat template; `bind` it to a tokenizer.
    """

    spec: JobSpec
    dataset: Dataset
    renderer: PromptRenderer

    def fingerprint(self, model: Model) -> Fingerprint:
        """The job's identity with its model."""
        return fingerprint(
            self.spec,
            input_fingerprint=self.dataset.fingerprint,
            model_fingerprint=model.fingerprint,
        )


def prepare(spec: JobSpec) -> PreparedJob:
    """Look at the input and check the job against it.

    Raises:
        InputError: the input cannot be read.
        OutputError: the output is on S3, and cannot be reached.
        SpecError: the job does not fit it, or its credentials cannot be had.
    """
    dataset = open_dataset(
        spec.input,
        id_column=spec.id_column,
        storage_options=storage_options(spec.credentials, spec.input),
    )
    if is_s3(spec.output):  # whether it can be reached; a model may have to be downloaded first
        ObjectStore(spec.output, storage_options=storage_options(spec.credentials, spec.output))
    check_columns(spec, dataset.schema)
    renderer = PromptRenderer(spec, dataset.schema)
    check_schema(spec)
    if spec.id_column is not None:
        check_unique_ids(dataset)
    return PreparedJob(spec=spec, dataset=dataset, renderer=renderer)
