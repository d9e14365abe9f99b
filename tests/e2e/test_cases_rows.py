"""Bad rows, outputs and determinism: the cases of sections B and E, on whole jobs."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.errors import JobFailed
from flows.feeder import PromptTooLong
from flows.model import Model, open_model
from flows.runner import run_job
from tests.e2e.cases import Witness, make_spec, results, statuses, write_table
from tests.e2e.jobs import WordTokenizer, comparable, fake_model
from workers.backends.fake import FakeBackend, FakeFaults
from workers.kernels.decoder import is_available

pytestmark = pytest.mark.e2e

LONGEST = 4096


def test_c15_one_over_long_row_in_10000(tmp_path: Path) -> None:
    texts = [f"row {index}" for index in range(10_000)]
    texts[5000] = "word " * 5000
    source = write_table(tmp_path / "in.parquet", text=texts)
    spec = make_spec(tmp_path, input=source, sampling={"max_tokens": 2})
    summary = run_job(spec, model=fake_model(check_slots=False))
    assert summary.by_status == {"ok": 9999, "error": 1}
    assert summary.exit_code(spec.max_error_rate) == 0
    rows = results(spec)
    assert len(rows) == 10_000
    assert (rows[5000]["error_type"], rows[5000]["text"]) == ("prompt_too_long", None)
    assert "5000 tokens" in rows[5000]["error_message"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_c15_truncation_leaves_room_and_keeps_the_other_side(tmp_path: Path, side: str) -> None:
    words = [f"w{index}" for index in range(5000)]
    source = write_table(tmp_path / "in.parquet", text=["a b", " ".join(words), "c d"])
    witness = Witness()
    spec = make_spec(tmp_path, input=source, on_too_long=f"truncate_{side}")
    summary = run_job(spec, model=fake_model(on_execute=witness))
    assert summary.by_status == {"ok": 3}
    room = LONGEST - spec.sampling.max_tokens
    prompt = list(witness.prompts["in.parquet:1"])
    assert 0.9 * room < len(prompt) <= room
    (whole,) = WordTokenizer().encode_batch([" ".join(words)], add_special_tokens=False)
    # The cut may go through a word; the words next to it are whole.
    if side == "left":
        assert prompt[1:] == whole[1 - len(prompt) :]
    else:
        assert prompt[:-1] == whole[: len(prompt) - 1]


def test_c15_on_too_long_fail_ends_the_job_and_names_the_row(tmp_path: Path) -> None:
    source = write_table(tmp_path / "in.parquet", text=["a b", "word " * 5000, "c d"])
    spec = make_spec(tmp_path, input=source, on_too_long="fail")
    with pytest.raises(PromptTooLong, match=r"in\.parquet:1.*5000 tokens") as failed:
        run_job(spec, model=fake_model())
    assert isinstance(failed.value, JobFailed), "the command line shows it as a line"


def utf8_faults() -> pa.Array:
    """Strings with bytes that are no UTF-8, and with a lone surrogate."""
    return pa.array([b"good", b"bad \xff\xfe", b"half \xed\xa0\x80", None]).view(pa.string())


def exact(column: pa.Array) -> list[str]:
    """Values so that they can be compared: NaN equals itself, and text need not be UTF-8."""
    if pa.types.is_string(column.type):
        column = column.view(pa.binary())
    return [repr(value) for value in column.to_pylist()]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([None, "a", None], pa.string()), ["skipped", "ok", "skipped"]),
        (pa.nulls(2), ["skipped", "skipped"]),
        (pa.array(["", "a", ""]), ["error", "ok", "error"]),
        (pa.array([" ", "\n\t ", "a", "\u00a0\u2003"]), ["error", "error", "ok", "error"]),
        (pa.array([7, None, -1]), ["ok", "skipped", "ok"]),
        (pa.array([b"text", b"\xff\xfe", b"", None]), ["ok", "error", "error", "skipped"]),
        (pa.array([1.5, math.nan, None]), ["ok", "skipped", "skipped"]),
        (utf8_faults(), ["ok", "error", "error", "skipped"]),
    ],
    ids=["null", "all-null", "empty", "whitespace", "int", "bytes", "nan", "invalid-utf8"],
)
def test_c17_odd_values_are_rows_with_a_status(
    tmp_path: Path, column: pa.Array, expected: Sequence[str]
) -> None:
    source = write_table(tmp_path / "in.parquet", odd=column)
    spec = make_spec(tmp_path, input=source, prompt={"column": "odd"}, keep_columns=["odd"])
    assert run_job(spec, model=fake_model()).complete
    rows = pq.read_table(tmp_path / "out" / "results")
    assert rows["status"].to_pylist() == expected
    assert exact(rows["odd"].combine_chunks()) == exact(column), "kept as it was"
    for status, error, message in zip(
        expected, rows["error_type"].to_pylist(), rows["error_message"].to_pylist(), strict=True
    ):
        assert (error is None) == (message is None) == (status == "ok")


def test_c18_null_in_null_out_and_the_row_is_kept(tmp_path: Path) -> None:
    source = write_table(tmp_path / "in.parquet", text=["a", None, "b", None])
    spec = make_spec(tmp_path, input=source)
    summary = run_job(spec, model=fake_model())
    rows = results(spec)
    assert [row["row_id"] for row in rows] == [f"in.parquet:{index}" for index in range(4)]
    assert [row["text"] is None for row in rows] == [False, True, False, True]
    assert summary.by_status == {"ok": 2, "skipped": 2}
    assert summary.exit_code(0.0) == 0, "a skipped row is no error"


class CharTokenizer(WordTokenizer):
    """One token a character, so that a fake model can write any text."""

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        return ["".join(chr(token) for token in ids if token) for ids in batch]


def model_that_says(texts: Sequence[str]) -> Model:
    """Row i is answered with `texts[i]`."""

    def script(request_id: str, sample_index: int, position: int) -> int:
        text = texts[int(request_id.rpartition(":")[2])]
        return ord(text[position]) if position < len(text) else 0

    return replace(
        fake_model(), load_tokenizer=CharTokenizer, load_backend=lambda: FakeBackend(script=script)
    )


SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip


def test_c23_c24_broken_json_is_kept_and_never_called_valid(tmp_path: Path) -> None:
    answers = [
        '{"a": 1, "b": "x"}',
        '{"a": 1, "b": "x',
        '{"a": 1}',
        '{"a": "1", "b": "x"}',
        "no json",
        '{"a": 1, "b": "a string that is longer than the answer may be"}',
        " " * 60,
        '{"a": 2, "b": ""}',
    ]
    source = write_table(tmp_path / "in.parquet", text=["give json"] * len(answers))
    spec = make_spec(
        tmp_path, input=source, output_schema=SCHEMA, guided=False, sampling={"max_tokens": 40}
    )
    summary = run_job(spec, model=model_that_says(answers))
    rows = results(spec)
    good = [index for index, row in enumerate(rows) if row["status"] == "ok"]
    assert good == [0, 7]
    assert [row["text"] for row in rows] == [answer[:40] for answer in answers]
    assert {row["status"] for row in rows} == {"ok", "invalid_output"}
    assert all(row["error_message"] for row in rows if row["status"] != "ok")
    assert [index for index, row in enumerate(rows) if row["finish_reason"] == "length"] == [5, 6]
    assert summary.by_status == {"ok": 2, "invalid_output": 6}
    assert summary.exit_code(spec.max_error_rate) == 1


def test_c25_exit_status_follows_the_rows(tmp_path: Path) -> None:
    every = frozenset(f"in-200.parquet:{index}" for index in range(200))
    spec = make_spec(tmp_path)
    summary = run_job(spec, model=fake_model(faults=FakeFaults(nan_request_ids=every)))
    assert (summary.complete, summary.by_status) == (True, {"error": 200})
    assert summary.exit_code(spec.max_error_rate) == 1
    assert summary.exit_code(1.0) == 0

    few = frozenset(f"in-200.parquet:{index}" for index in range(10))
    other = make_spec(tmp_path, output=str(tmp_path / "few"))
    summary = run_job(other, model=fake_model(faults=FakeFaults(nan_request_ids=few)))
    assert summary.error_rate == 0.05
    assert (summary.exit_code(0.05), summary.exit_code(0.049)) == (0, 1)


def test_c55_finish_reasons_are_counted(tmp_path: Path) -> None:
    source = write_table(tmp_path / "in.parquet", text=["x"] * 6 + ["", None])
    spec = make_spec(tmp_path, input=source, sampling={"max_tokens": 5, "stop": ["<99>"]})
    answers = ["abc", "abcdefgh", "a", "ab", "abcd", "abcdefghi", "", ""]
    summary = run_job(spec, model=model_that_says(answers))
    rows = results(spec)
    assert [row["finish_reason"] for row in rows] == [
        "stop", "length", "stop", "stop", "stop", "length", "error", None,
    ]  # fmt: skip
    assert summary.by_finish_reason == {"stop": 4, "length": 2, "error": 1}
    assert ("finish length", "2") in list(summary.lines())


def test_samples_are_n_and_counted(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 40, sampling={"max_tokens": 12, "temperature": 1.0, "n": 3})
    summary = run_job(spec, model=fake_model())
    assert summary.by_status == {"ok": 40}
    for row in results(spec):
        assert len(row["samples"]) == 3
        assert row["samples"][0]["text"] == row["text"]
        total = sum(sample["completion_tokens"] for sample in row["samples"])
        assert row["completion_tokens"] == total
    assert len({tuple(s["text"] for s in row["samples"]) for row in results(spec)}) > 30


# -- with a small real model ---------------------------------------------------------------------


def real_spec(folder: Path, model: Path, source: str, name: str, **fields: Any):
    """A job of the small real model; `engine` is merged into its settings."""
    engine = {"memory": "64MiB", "dtype": "float32", **fields.pop("engine", {})}
    return make_spec(
        folder, input=source, model=str(model), output=str(folder / name), id_column="id",
        engine=engine, **fields,
    )  # fmt: skip


def shuffled(folder: Path, texts: Sequence[str], seed: int | None) -> str:
    order = list(range(len(texts)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    ids, rows = [f"r{i}" for i in order], [texts[i] for i in order]
    return write_table(folder / f"rows-{seed}.parquet", id=ids, text=rows)


def by_id(spec: Any, *columns: str) -> dict[str, Any]:
    return {row["row_id"]: [row[column] for column in columns] for row in results(spec)}


def test_c52_sampled_text_depends_on_seed_and_row_alone(
    tiny_model: Path, tmp_path: Path, sample_texts: list[str]
) -> None:
    texts = sample_texts[:60]
    sampling = {"max_tokens": 16, "temperature": 1.0, "seed": 5}
    one = real_spec(
        tmp_path, tiny_model, shuffled(tmp_path, texts, None), "one", sampling=sampling,
        engine={"max_seqs": 32},
    )  # fmt: skip
    two = real_spec(
        tmp_path, tiny_model, shuffled(tmp_path, texts, 1), "two", sampling=sampling,
        engine={"max_seqs": 5, "policy": "mixed"}, shard_tokens=700,
    )  # fmt: skip
    other_seed = real_spec(
        tmp_path, tiny_model, shuffled(tmp_path, texts, None), "three",
        sampling={**sampling, "seed": 6},
    )  # fmt: skip
    for spec in (one, two, other_seed):
        assert run_job(spec).complete
    assert by_id(one, "text") == by_id(two, "text")
    assert by_id(one, "text") != by_id(other_seed, "text")


@pytest.mark.parametrize(
    ("dtype", "deterministic"), [("bfloat16", True), ("bfloat16", False), ("int8", False)]
)
def test_c52_bfloat16_and_int8_are_bit_equal(
    dtype: str, deterministic: bool, tiny_model: Path, tmp_path: Path, sample_texts: list[str]
) -> None:
    """Log-probabilities and all, whatever the order, the batch and the shard: with the native
    decoder always, without it in deterministic mode.
    """
    if not (deterministic or is_available()):
        pytest.skip("this processor has no native decoder")
    texts = sample_texts[:30]
    sampling = {"max_tokens": 12, "temperature": 0.8, "logprobs": 1}
    found = []
    for name, seed, engine in (
        ("one", None, {"max_seqs": 16}),
        ("two", 1, {"max_seqs": 3, "policy": "mixed"}),
        ("three", 2, {"max_seqs": 7}),
    ):
        spec = real_spec(
            tmp_path, tiny_model, shuffled(tmp_path, texts, seed), name, sampling=sampling,
            shard_tokens=1000, engine={**engine, "dtype": dtype, "deterministic": deterministic},
        )  # fmt: skip
        assert run_job(spec).by_status == {"ok": 30}
        found.append(by_id(spec, "text", "cumulative_logprob", "logprobs"))
    assert found[0] == found[1] == found[2]


def test_c54_logprobs_are_there_when_asked(
    tiny_model: Path, tmp_path: Path, sample_texts: list[str]
) -> None:
    source = shuffled(tmp_path, sample_texts[:10], None)
    sampling = {"max_tokens": 8, "logprobs": 2}
    spec = real_spec(tmp_path, tiny_model, source, "with", sampling=sampling)
    run_job(spec)
    for row in results(spec):
        drawn = row["logprobs"]
        assert len(drawn) in (row["completion_tokens"], row["completion_tokens"] - 1)
        assert row["cumulative_logprob"] == pytest.approx(sum(item["logprob"] for item in drawn))
        for item in drawn:
            assert len(item["top"]) == 2
            best, second = (top["logprob"] for top in item["top"])
            assert 0 >= best >= second
            assert item["token_id"] == item["top"][0]["token_id"], "greedy"
    plain = real_spec(tmp_path, tiny_model, source, "without", sampling={"max_tokens": 8})
    run_job(plain)
    assert "logprobs" not in results(plain)[0]
    assert comparable(results(plain))[0]["text"] == results(spec)[0]["text"]


def test_c37_two_models_after_each_other_in_one_process(
    tiny_model: Path, tmp_path: Path, sample_texts: list[str]
) -> None:
    """The first one's memory, weights and 256 MiB of KV, is back before the second is loaded."""
    source = shuffled(tmp_path, sample_texts[:20], None)
    backends: list[weakref.ref[Any]] = []
    resident: list[int] = []
    for name in ("warm-up", "one", "two", "three"):
        spec = real_spec(
            tmp_path, tiny_model, source, name, engine={"memory": "256MiB"},
            sampling={"max_tokens": 4},
        )  # fmt: skip
        model = open_model(spec)

        def load_backend(model: Model = model) -> Any:
            backend = model.load_backend()
            backends.append(weakref.ref(backend))
            return backend

        assert run_job(spec, model=replace(model, load_backend=load_backend)).complete
        del load_backend, model
        gc.collect()
        assert [ref() for ref in backends] == [None] * len(backends)
        resident.append(psutil.Process().memory_info().rss)
    assert max(resident[1:]) - resident[0] < 100 << 20
    assert statuses(spec) == {"ok": 20}
