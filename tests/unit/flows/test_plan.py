"""What `flows plan` knows before a model is loaded (C60)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flows.plan import JobPlan, _memory, measured_flops_per_s, plan_lines, render_plan
from flows.prompts import PromptRenderer
from flows.shape import ModelShape, model_shape
from flows.spec import JobSpec
from flows.survey import Survey, histogram, survey
from schedulers.memory import MemoryPlan
from workers.errors import ModelError
from workers.loading.files import ModelFiles

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}  # fmt: skip


class Words:
    """One token a word."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [list(range(len(text.split()))) for text in texts]


def looked_at(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Survey:
    spec = JobSpec.model_validate({"input": "in", "prompt": "say {{ text }}"})
    renderer = PromptRenderer(spec, pa.schema([("text", pa.string())]))
    return survey(rows, renderer, Words())


def files(tmp_path: Path, **config: Any) -> ModelFiles:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"0" * 4000)
    return ModelFiles(
        name="m", folder=tmp_path, config={**SMOLLM2, **config}, weight_files=(weights,),
        generation_config={}, fingerprint="f",
    )  # fmt: skip


def plan(**changes: Any) -> JobPlan:
    found = looked_at([(f"r{i}", {"text": "a " * i if i else None}) for i in range(10)])
    shape = ModelShape(
        dtype="bfloat16", vocab_size=10, max_model_len=100, num_parameters=1_000_000,
        weights_bytes=2**31, kv_bytes_per_token=23_040, activation_bytes_per_token=1,
        logits_bytes_per_seq=1,
    )  # fmt: skip
    memory = MemoryPlan(
        limit_bytes=2**32, weights_bytes=2**31, activation_bytes=2**20, kv_bytes=2**30,
        block_size=16, num_blocks=100, max_batch_tokens=64, max_seqs=32,
    )  # fmt: skip
    values: dict[str, Any] = {
        "num_rows": 1000, "num_shards": 4, "survey": found, "exact": False,
        "max_answer_tokens": 8, "shape": shape, "memory": memory, "flops_per_s": 1e9,
    }  # fmt: skip
    return JobPlan(**{**values, **changes})


def test_c15_plan_counts_prompts_that_are_too_long() -> None:
    found = looked_at([("a", {"text": "w " * 99}), ("b", {"text": "w " * 98})])
    lines = dict(plan_lines(plan(survey=found)))
    assert lines["too long"].startswith("1 of 2 looked at; the model takes 100 tokens")
    assert "too long" not in dict(plan_lines(plan()))


def test_long_example_shows_head_and_tail() -> None:
    console = Console(width=200)
    found = looked_at([("r", {"text": "head " + "x " * 2000 + "tail"})])
    with console.capture() as capture:
        console.print(render_plan(plan(survey=found)))
    assert "say head x" in capture.get()
    assert "characters ...]" in capture.get()
    assert "x tail" in capture.get()


@given(st.lists(st.integers(0, 5000), max_size=60))
def test_every_length_is_in_exactly_one_bin(lengths: list[int]) -> None:
    bins = histogram(lengths)
    assert [item.num_prompts for item in bins] == [
        sum(item.low <= length <= item.high for length in lengths) for item in bins
    ]
    assert sum(item.num_prompts for item in bins) == len(lengths)
    assert all(first.high + 1 == second.low for first, second in pairwise(bins))


def test_c60_survey_finds_lengths_longest_examples_and_rows_without_prompt() -> None:
    rows = [(f"r{i}", {"text": "w " * (i % 300)}) for i in range(600)]
    rows += [("null", {"text": None}), ("odd", {"text": b"\xff"})]
    found = looked_at(rows)
    assert found.num_rows == 602
    assert sorted(found.lengths) == sorted(1 + i % 300 for i in range(600))
    assert found.longest is not None
    assert (found.longest.row_id, found.longest.num_tokens) == ("r299", 300)
    assert [prompt.row_id for prompt in found.examples] == ["r0", "r1", "r2"]
    assert found.without_prompt == {"null_prompt": 1, "invalid_prompt": 1}


def test_c60_plan_of_no_rows_is_a_plan() -> None:
    empty = plan(survey=looked_at([]), num_rows=0, num_shards=0)
    assert empty.prompt_tokens == 0
    assert ("answer tokens", "at most 0") in plan_lines(empty)


def test_c60_sample_is_extrapolated_to_the_rows_and_prompts_of_the_job() -> None:
    job = plan()
    assert job.num_prompts == 900
    assert job.prompt_tokens == round(1000 * sum(1 + i for i in range(1, 10)) / 10)


def test_c60_time_is_an_estimate_with_its_basis() -> None:
    job = plan()
    tokens = job.prompt_tokens + 8 * job.num_prompts
    assert job.seconds(8) == pytest.approx(2 * 1e6 * tokens / (0.5 * 1e9))
    lines = dict(plan_lines(job))
    assert "2 x 1 M parameters per token at 50% of 1 GFLOP/s" in lines["time (estimate)"]
    assert "unknown" in dict(plan_lines(plan(flops_per_s=None, memory=None)))["time (estimate)"]


def test_c60_plan_shows_rows_histogram_longest_three_prompts_and_memory() -> None:
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(render_plan(plan()))
    text = capture.get()
    for expected in (
        "1000 in 4 shards", "from a sample of 10 rows", "null_prompt", "10 tokens: r9", "8-15",
        "r1: 2 tokens", "r2: 3 tokens", "r3: 4 tokens", "2.0 GiB in bfloat16", "22.5 KiB",
        "1,600 tokens",
    ):  # fmt: skip
        assert expected in text, expected


def test_markup_in_prompts_is_shown_and_not_obeyed() -> None:
    console = Console(width=100)
    found = looked_at([("r[/]", {"text": "[bold]x[/nosuch]"})])
    with console.capture() as capture:
        console.print(render_plan(plan(survey=found)))
    assert "[bold]x[/nosuch]" in capture.get()


def test_c60_sizes_come_from_the_configuration(tmp_path: Path) -> None:
    shape = model_shape(files(tmp_path), "bfloat16")
    assert (shape.num_parameters, shape.weights_bytes) == (1000, 2000)
    assert shape.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert model_shape(files(tmp_path, head_dim=128), "float32").kv_bytes_per_token == 92_160
    assert model_shape(files(tmp_path), "auto").dtype == "float32"


@pytest.mark.parametrize("value", [0, -1, "many", 1.5, True, None])
def test_nonsense_in_the_configuration_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        model_shape(files(tmp_path, num_hidden_layers=value), "float32")


def test_measured_rate_is_that_of_a_real_machine() -> None:
    assert 1e8 < measured_flops_per_s(size=128, repeats=1) < 1e15


def test_workers_share_the_machine() -> None:
    spec = JobSpec.model_validate({"input": "a.parquet", "prompt": "x", "engine": {"workers": 4}})
    shape = plan().shape
    whole = _memory(JobSpec.model_validate({"input": "a.parquet", "prompt": "x"}), shape)
    each = _memory(spec, shape)
    left = (each.limit_bytes - shape.weights_bytes) / (whole.limit_bytes - shape.weights_bytes)
    assert left == pytest.approx(1 / 4, rel=0.1)  # free memory changes a little meanwhile
    lines = dict(plan_lines(plan(num_workers=4)))
    assert lines["workers"].startswith("4 processes")
    assert "memory of each worker" in lines
    assert "memory" in dict(plan_lines(plan()))
