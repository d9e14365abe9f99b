"""What an encoder computed to result rows, against a way that makes one row at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.fleet.messages import Assign
from flows.model import Vectors
from flows.spec import JobSpec
from flows.texts import RowFault, Texts
from flows.vectors import FAULTS, block_table, vector_spec
from storage.shards import Shard
from storage.vectors import VectorSpec
from workers.encoding import Encoded, PackedTexts
from workers.request import RowError

NULL = RowFault("skipped", RowError("null_prompt", "null"))
LONG = RowFault("error", RowError("prompt_too_long", "long"))
WIDTH = 3


def texts_of(faults: list[RowFault | None], texts_a_row: int = 1) -> Texts:
    """Rows, some of which have a fault; text n of the others has 2 + n tokens."""
    good = [n for n, fault in enumerate(faults) if fault is None]
    count = len(good) * texts_a_row
    first = [1] * count if texts_a_row > 1 else None
    return Texts(
        part=Assign(Shard(0, (), 0), np.arange(len(faults))),
        row_ids=[f"r{n}" for n in range(len(faults))],
        packed=PackedTexts.from_lists([[7] * (2 + n) for n in range(count)], first=first),
        where=np.array(good, dtype=np.int64),
        texts_a_row=texts_a_row,
        num_tokens=np.array([0 if f else 2 + n for n, f in enumerate(faults)], dtype=np.int32),
        truncated=np.array([f is None and n % 2 == 0 for n, f in enumerate(faults)], dtype=bool),
        faults={n: fault for n, fault in enumerate(faults) if fault},
    )


def encoded_of(count: int, width: int, bad: dict[int, Any]) -> Encoded:
    vectors = np.random.default_rng(count).normal(size=(count, width)).astype(np.float32)
    for text, fault in bad.items():
        if fault != "empty" or width > 1:
            vectors[text] = np.nan
    return Encoded(vectors, np.ones(count, dtype=np.bool_), bad)


def kind_of(task: Any, width: int = WIDTH) -> VectorSpec:
    labels = tuple("abcdefgh"[:width]) if task == "classify" else ()
    return VectorSpec(task=task, width=width, labels=labels)


def checked(table: pa.Table, texts: Texts, faults: dict[int, RowFault]) -> list[dict[str, Any]]:
    """Rows, whose common columns have been compared."""
    rows = table.to_pylist()
    assert [row["row_id"] for row in rows] == texts.row_ids
    for n, row in enumerate(rows):
        fault = faults.get(n)
        wanted = ("ok", None, None) if fault is None else (fault.status, *fault.error)
        assert (row["status"], row["error_type"], row["error_message"]) == wanted
        assert row["prompt_tokens"] == texts.num_tokens[n]
        assert row["truncated"] == texts.truncated[n]
    return rows


ROW_FAULTS = st.lists(st.sampled_from([None, None, NULL, LONG]), max_size=9)
TEXT_FAULTS = st.dictionaries(st.integers(0, 30), st.sampled_from(sorted(FAULTS)), max_size=4)


@given(faults=ROW_FAULTS, bad=TEXT_FAULTS)
def test_embeddings_stand_at_their_rows(faults, bad) -> None:
    texts = texts_of(faults)
    bad = {text: fault for text, fault in bad.items() if text < len(texts.packed)}
    encoded = encoded_of(len(texts.packed), WIDTH, bad)
    rows_bad = {int(texts.where[n]): RowFault("error", FAULTS[fault]) for n, fault in bad.items()}
    all_faults = {**texts.faults, **rows_bad}
    rows = checked(block_table(kind_of("embed"), texts, encoded), texts, all_faults)
    given_ = {
        int(n): vector.tolist() for n, vector in zip(texts.where, encoded.vectors, strict=True)
    }
    for n, row in enumerate(rows):
        assert row["embedding"] == (None if n in all_faults else given_[n])


def test_embeddings_of_rows_without_faults_are_not_copied() -> None:
    encoded = encoded_of(4, WIDTH, {})
    table = block_table(kind_of("embed"), texts_of([None] * 4), encoded)
    column = table["embedding"].chunk(0).flatten()
    assert column.buffers()[1].address == encoded.vectors.ctypes.data


@given(faults=ROW_FAULTS, bad=TEXT_FAULTS, num_choices=st.integers(2, 5))
def test_choices_get_the_softmax_of_their_likelihoods(faults, bad, num_choices) -> None:
    texts = texts_of(faults, num_choices)
    bad = {text: fault for text, fault in bad.items() if text < len(texts.packed)}
    encoded = encoded_of(len(texts.packed), 1, bad)
    encoded.vectors[:] *= 300  # so that exp by itself would leave the range
    rows_bad = {
        int(texts.where[n // num_choices]): RowFault("error", FAULTS[fault])
        for n, fault in bad.items()
    }
    all_faults = {**texts.faults, **rows_bad}
    kind = kind_of("classify", num_choices)
    rows = block_table(kind, texts, encoded).to_pylist()
    sums = encoded.vectors.astype(float).reshape(-1, num_choices).tolist()
    of_rows = dict(zip(texts.where.tolist(), sums, strict=True))
    for n, row in enumerate(rows):
        assert (row["status"] == "ok") == (n not in all_faults)
        if n in all_faults:
            assert row["scores"] is row["label"] is row["score"] is None
            continue
        top = max(of_rows[n])
        weights = [math.exp(value - top) for value in of_rows[n]]
        wanted = [weight / sum(weights) for weight in weights]
        assert row["scores"] == pytest.approx(wanted, abs=1e-4)
        assert row["label"] == kind.labels[wanted.index(max(wanted))]
        assert sum(row["scores"]) == pytest.approx(1, abs=1e-5)


def test_scores_count_what_was_scored() -> None:
    texts = texts_of([None, NULL, None, LONG, None])
    rows = checked(
        block_table(kind_of("score", 1), texts, encoded_of(3, 1, {})), texts, texts.faults
    )
    given_ = encoded_of(3, 1, {}).vectors[:, 0].tolist()
    assert [row["logprob"] for row in rows] == [
        pytest.approx(given_[0]), None, pytest.approx(given_[1]), None, pytest.approx(given_[2])
    ]  # fmt: skip
    scored = [row["num_scored_tokens"] for row in rows]
    assert [scored[0], scored[2], scored[4]] == [1, 2, 3]  # of 2, 3 and 4 tokens
    assert rows[2]["perplexity"] == pytest.approx(math.exp(-given_[1] / 2))


def test_what_the_vectors_are_comes_from_job_and_model() -> None:
    fields = {"input": "in", "prompt": "{{ text }}", "model": "m"}
    spec = JobSpec.model_validate(
        {**fields, "task": "embed", "encode": {"vector_dtype": "float16"}}
    )
    kind = vector_spec(spec, Vectors(5))
    assert (kind.task, kind.width, kind.dtype) == ("embed", 5, "float16")
    spec = JobSpec.model_validate({**fields, "task": "classify"})
    assert vector_spec(spec, Vectors(2, ("x", "y"))).labels == ("x", "y")
