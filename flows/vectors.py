"""From what an encoder computed to a block of result rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flows.model import Vectors
from flows.spec_model import JobSpec
from flows.texts import NO_TOKENS, RowFault, Texts
from storage.vectors import VectorErrors, VectorSpec, vectors_table
from workers.encoding import Encoded, EncodeFault
from workers.request import RowError

FAULTS: Mapping[EncodeFault, RowError] = {
    "empty": NO_TOKENS,
    "not_finite": RowError("numerical_error", "the model's numbers for this text are not finite"),
    "out_of_memory": RowError(
        "out_of_memory", "the device's memory does not hold this text, even by itself"
    ),
}


def vector_spec(spec: JobSpec, vectors: Vectors) -> VectorSpec:
    """What the vectors of a job's results are."""
    assert spec.task != "generate"
    return VectorSpec(
        task=spec.task,
        width=vectors.width,
        dtype=spec.encode.vector_dtype,
        labels=vectors.labels,
    )


def block_table(kind: VectorSpec, texts: Texts, encoded: Encoded) -> pa.Table:
    """The computed columns of an encode call's rows, in their order. Without faults the vectors are
    not copied.
    """
    faults = {**texts.faults, **_encode_faults(texts, encoded)}
    num_rows = len(texts.row_ids)
    scored: NDArray[np.int32] | None = None
    if kind.task == "score":
        scored = np.zeros(num_rows, dtype=np.int32)
        scored[texts.where] = texts.packed.num_scored_N
    return vectors_table(
        kind,
        _by_row(kind, texts, encoded),
        row_ids=texts.row_ids,
        prompt_tokens=texts.num_tokens,
        truncated=texts.truncated,
        num_scored_tokens=scored,
        errors=_errors(faults, num_rows) if faults else None,
    )


def _by_row(kind: VectorSpec, texts: Texts, encoded: Encoded) -> NDArray[np.float32]:
    """Vectors [R, width]; NaN where a row has none."""
    vectors = encoded.vectors
    if texts.texts_a_row > 1:
        vectors = _softmax(vectors.reshape(-1, texts.texts_a_row))
    if len(texts.where) == len(texts.row_ids):
        return vectors
    of_rows = np.full((len(texts.row_ids), kind.width), np.nan, dtype=np.float32)
    of_rows[texts.where] = vectors
    return of_rows


def _softmax(logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each row: how likely each choice is among all of them."""
    with np.errstate(invalid="ignore"):
        weights = np.exp(logprobs - logprobs.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)


def _encode_faults(texts: Texts, encoded: Encoded) -> dict[int, RowFault]:
    return {
        int(texts.where[text // texts.texts_a_row]): RowFault("error", FAULTS[fault])
        for text, fault in encoded.faults.items()
    }


def _errors(faults: Mapping[int, RowFault], num_rows: int) -> VectorErrors:
    types: list[str | None] = [None] * num_rows
    messages: list[str | None] = [None] * num_rows
    statuses: dict[str, str] = {}
    for position, fault in faults.items():
        types[position], messages[position] = fault.error
        statuses[fault.error.type] = fault.status
    return VectorErrors(types=types, messages=messages, statuses=statuses)
