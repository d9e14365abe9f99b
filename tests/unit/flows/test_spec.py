"""The job spec: one meaning in the CLI, the job file and the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from flows.errors import SpecError
from flows.fingerprint import fingerprint
from flows.sampling import resolve_sampling
from flows.spec import EngineSpec, JobSpec, SamplingSpec, build, load
from flows.spec_model import PolicyName
from flows.specfile import spec_options
from schedulers.policies import POLICIES

BASE = {"input": "in.parquet", "prompt": "{{ text }}"}


def keys(data: dict[str, Any], **flat: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return fingerprint(build(data, flat), input_fingerprint="i", model_fingerprint="m")


def test_policies_of_the_spec_are_those_of_the_table() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES)


def test_every_field_is_described_and_placed_for_the_form() -> None:
    options = spec_options()
    assert len({option.key for option in options}) == len(options)
    for option in options:
        assert option.info.title and option.info.description, option.key
        assert isinstance(option.info.json_schema_extra, dict), option.key
        assert "position" in option.info.json_schema_extra, option.key


def test_a_part_has_at_most_20_fields_of_its_own() -> None:
    for kind in (JobSpec, SamplingSpec, EngineSpec):
        own = [field for field in kind.model_fields.values() if not is_part(field.annotation)]
        assert len(own) <= 20


def is_part(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def test_spec_survives_the_record() -> None:
    spec = build(BASE, {"stop": ["a"], "keep_columns": ["x", "y"], "temperature": 0.5, "n": 3})
    assert JobSpec.model_validate(json.loads(spec.model_dump_json())) == spec
    assert JobSpec.model_validate(json.loads(json.dumps(spec.model_dump(mode="json")))) == spec


@pytest.mark.parametrize(
    ("path", "output"),
    [
        ("data/reviews.parquet", "out/reviews"),
        ("s3://bucket/reviews/", "out/reviews"),
        ("data/*.parquet", "out/data"),
        ("*.parquet", "out/job"),
        ("./", "out/job"),
    ],
)
def test_output_is_named_after_the_input(path: str, output: str) -> None:
    assert build({**BASE, "input": path}).output == output


def test_options_win_over_the_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("input: in\nprompt: '{{ a }}'\nsampling: {max_tokens: 9, seed: 3}\nlimit: 5\n")
    assert load(path).sampling.max_tokens == 9
    spec = build({"input": "in", "prompt": "{{ a }}", "sampling": {"seed": 3}}, {"max_tokens": 2})
    assert (spec.sampling.max_tokens, spec.sampling.seed) == (2, 3)


def test_prompt_option_replaces_the_prompt_of_the_job_file_but_not_its_system() -> None:
    data = {"input": "in", "prompt": {"template": "{{ a }}", "system": "S"}}
    spec = build(data, {"prompt_column": "b"})
    assert (spec.prompt.template, spec.prompt.column, spec.prompt.system) == (None, "b", "S")
    assert build(BASE, {"system": "S"}).prompt.template == "{{ text }}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"modle": "x"}, "modle is no field of a job; did you mean 'model'"),
        ({"sampling": {"tempratur": 1}}, "sampling.tempratur is no field.*'temperature'"),
        ({"sampling": {"top_p": 2}}, r"sampling.top_p \(--top-p\) is 2"),
        ({"sampling": {"max_tokens": 0}}, r"--max-tokens\) is 0"),
        ({"sampling": {"temperature": float("nan")}}, "--temperature"),
        ({"sampling": {"stop": [""]}}, r"--stop\)"),
        ({"engine": {"policy": "fifo"}}, "'exclusive' or 'mixed'"),
        ({"engine": {"memory": "lots"}}, "4GiB"),
        ({"engine": {"memory": "120%"}}, "at most 100%"),
        ({"input": ""}, r"input \(PATH\)"),
        ({"max_error_rate": 1.5}, "--max-error-rate"),
    ],
)
def test_bad_field_is_named_with_its_value(data: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build({**BASE, **data})


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"prompt_column": "b", "messages_column": "c"}, "give only one"),
        ({"raw_prompt": True, "system": "S"}, "raw_prompt"),
        ({"raw_prompt": True, "messages_column": "c"}, "raw_prompt"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9 and max_tokens 3"),
        ({"temperature": 0, "top_p": 0.5}, "top_p has no effect"),
        ({"temperature": 0, "n": 4}, "all samples are the same"),
        ({"max_seqs": 64, "max_batch_tokens": 32}, "max_seqs is 64, but max_batch_tokens 32"),
        ({"device": "cpu", "dtype": "float16"}, "float16"),
        ({"retry_errors": True, "overwrite": True}, "overwrite"),
        ({"keep_columns": ["a", "b", "a"]}, "twice"),
        ({"output": "./in.parquet/"}, "output and input"),
        ({"output_schema": '{"type": "object"}', "ignore_eos": True}, "ignore_eos"),
        ({"output_schema": '{"type": "object"}', "min_tokens": 5}, "min_tokens"),
    ],
)
def test_c31_contradiction_is_refused_with_the_way_out(flat: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(BASE, flat)


ENCODING: list[tuple[dict[str, Any], str]] = [
    ({"partition_by": ["a"]}, "partition_by is for the tasks embed, classify and score"),
    ({"encode": {"min_texts": 5}}, "encode.min_texts is for the tasks embed"),
    ({"encode": {"choices": ["a", "b"]}}, "encode.choices is for the tasks embed"),
    ({"encode": {"normalize": False}}, "encode.normalize is for the tasks embed"),
    ({"task": "embed", "sampling": {"max_tokens": 3}}, "sampling is for the task generate"),
    ({"task": "score", "sampling": {"seed": 3}}, "leave it out with task score"),
    ({"task": "embed", "output_schema": "{}"}, "output_schema is for the task generate"),
    ({"task": "embed", "partition_by": ["a", "b", "a"]}, "partition_by names a column twice"),
    ({"task": "embed", "encode": {"min_texts": 9, "max_texts": 8}}, "9 and max_texts 8"),
    ({"task": "embed", "encode": {"min_texts": 0}}, "min_texts"),
    ({"task": "embed", "encode": {"max_texts": -1}}, "max_texts"),
    ({"task": "embed", "encode": {"vector_dtype": "int8"}}, "vector_dtype"),
    ({"task": "embed", "encode": {"pooling": "first"}}, "pooling"),
    ({"task": "embed", "encode": {"prompt_name": ""}}, "prompt_name"),
    ({"task": "score", "encode": {"vector_dtype": "float16"}}, "vector_dtype is for"),
    ({"task": "score", "encode": {"normalize": False}}, "normalize is for the task embed"),
    ({"task": "classify", "encode": {"pooling": "cls"}}, "pooling is for the task embed"),
    ({"task": "score", "encode": {"prompt_name": "q"}}, "prompt_name is for the task embed"),
    ({"task": "embed", "prompt": {"column": "a", "system": "S"}}, "takes a text"),
    ({"task": "score", "prompt": {"messages_column": "a"}}, "takes a text"),
    ({"task": "embed", "encode": {"choices": ["a", "b"]}}, "choices are for the task classify"),
    ({"task": "classify", "encode": {"choices": ["a"]}}, "only 'a'; give at least two"),
    ({"task": "classify", "encode": {"choices": ["a", "b", "a"]}}, "choices names one twice"),
    ({"task": "classify", "encode": {"choices": ["a", ""]}}, "choices"),
    ({"task": "classify", "encode": {"choices": ["a", " "]}}, "choices has a blank one"),
    ({"task": "classify"}, "smollm2 has no classification head"),
    ({"task": "summarise"}, "task"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), ENCODING)
def test_what_an_encoding_job_cannot_be_is_refused_with_the_way_out(
    data: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        build({**BASE, **data})


@pytest.mark.parametrize(
    "data",
    [
        {"task": "embed", "partition_by": ["a", "b"], "encode": {"min_texts": 8, "max_texts": 8}},
        {"task": "embed", "encode": {"normalize": True, "pooling": "cls", "prompt_name": "q"}},
        {
            "task": "classify",
            "encode": {"choices": ["a", "b"]},
            "prompt": {"column": "a", "system": "S"},
        },
        {"task": "classify", "model": "org/with-a-head", "partition_by": ["a"]},
        {"task": "score", "encode": {"max_texts": 3}},
    ],
)  # fmt: skip
def test_what_an_encoding_job_can_be_is_taken_and_survives_the_record(data: dict[str, Any]) -> None:
    spec = build({**BASE, **data})
    assert JobSpec.model_validate(json.loads(spec.model_dump_json())) == spec


def test_defaults_go_by_the_task() -> None:
    tasks = {
        task: build({**BASE, "task": task, "encode": encode})
        for task, encode in (
            ("generate", {}), ("embed", {}), ("score", {}), ("classify", {"choices": ["a", "b"]})
        )
    }  # fmt: skip
    assert {task: spec.model for task, spec in tasks.items()} == {
        "generate": "smollm2", "embed": "minilm", "score": "smollm2", "classify": "smollm2"
    }  # fmt: skip
    assert {task: spec.on_too_long for task, spec in tasks.items()} == {
        "generate": "error", "embed": "truncate_right", "score": "error", "classify": "error"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "refuses"),
    [
        ({"partition_by": ["b"]}, True),
        ({"encode": {"vector_dtype": "float16"}}, True),
        ({"encode": {"normalize": False}}, True),
        ({"encode": {"pooling": "max"}}, True),
        ({"encode": {"prompt_name": "q"}}, True),
        ({"on_too_long": "error"}, True),
        ({"encode": {"min_texts": 7}}, False),
        ({"encode": {"max_texts": 70}}, False),
    ],
)
def test_what_makes_the_vectors_is_the_jobs_identity_and_how_they_are_gathered_is_not(
    changed: dict[str, Any], refuses: bool
) -> None:
    base = {**BASE, "task": "embed", "partition_by": ["a"]}
    first, then = (keys(data) for data in (base, {**base, **changed}))
    assert (first != then) == refuses


def test_c31_job_without_prompt_says_what_to_give() -> None:
    with pytest.raises(SpecError, match="prompt_column, messages_column"):
        build({"input": "in"})


@pytest.mark.parametrize("flat", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"n": 2}])
def test_c31_filters_of_a_greedy_model_are_refused(flat: dict[str, Any]) -> None:
    sampling = build(BASE, flat).sampling
    with pytest.raises(SpecError, match="--temperature"):
        resolve_sampling(sampling, {})
    assert resolve_sampling(sampling, {"do_sample": True}).temperature == 1.0


@pytest.mark.parametrize("choice", ["error", "truncate_left", "truncate_right", "fail"])
def test_c15_every_way_with_long_prompts_can_be_chosen(choice: str) -> None:
    assert build(BASE, {"on_too_long": choice}).on_too_long == choice


@pytest.mark.parametrize(
    ("flat", "key"),
    [
        ({"prompt": "{{ other }}"}, "prompt"),
        ({"system": "S"}, "system"),
        ({"raw_prompt": True}, "raw_prompt"),
        ({"max_tokens": 7}, "max_tokens"),
        ({"temperature": 0.7}, "temperature"),
        ({"seed": 1}, "seed"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": 0}, "logprobs"),
        ({"id_column": "id"}, "id_column"),
        ({"limit": 3}, "limit"),
        ({"on_too_long": "truncate_left"}, "on_too_long"),
        ({"output_schema": '{"type": "object"}'}, "output_schema"),
        ({"dtype": "float32"}, "dtype"),
    ],
)
def test_c11_what_changes_results_changes_its_key_alone(flat: dict[str, Any], key: str) -> None:
    before, after = keys(BASE).generation, keys(BASE, **flat).generation
    differing = {name for name in before if before[name] != after[name]}
    assert differing == ({key} if key != "output_schema" else {key, "guided"})
    assert keys(BASE, **flat).output == keys(BASE).output


@pytest.mark.parametrize(
    "flat",
    [
        {"policy": "mixed"}, {"device": "cpu"}, {"memory": "1GiB"}, {"max_batch_tokens": 64},
        {"max_seqs": 4}, {"shard_tokens": 10}, {"checkpoint_s": 1}, {"row_timeout_s": 9},
        {"max_error_rate": 0.5}, {"retry_errors": True}, {"overwrite": True},
        {"output": "elsewhere"}, {"model": "another-name-of-the-same"}, {"keep_columns": ["a"]},
        {"output": "s3://b/out", "credentials": "aws-credentials/prod"},
    ],
)  # fmt: skip
def test_c11_what_only_changes_how_is_no_part_of_the_identity(flat: dict[str, Any]) -> None:
    assert keys(BASE).generation == keys(BASE, **flat).generation


def test_c12_kept_columns_are_an_output_key() -> None:
    assert keys(BASE, keep_columns=["a"]).output == {"keep_columns": ["a"]}


def test_c11_every_field_has_been_decided_upon() -> None:
    """A new field must be put on one of the two sides."""
    left_out = {
        "output", "policy", "device", "memory", "max_batch_tokens", "max_seqs", "shard_tokens",
        "checkpoint_s", "row_timeout_s", "max_error_rate", "retry_errors", "overwrite", "revision",
        "overflow_probability", "sizing", "workers", "cluster", "credentials", "start_timeout_s",
        "superbatch_min", "superbatch_max",
    }  # fmt: skip
    generation, output = keys(BASE)
    encoding = keys(BASE, task="embed").generation
    renamed = {"stop_token_id": "stop_token_ids", "choice": "choices"}
    fields = {renamed.get(option.key, option.key) for option in spec_options()}
    assert fields == generation.keys() | encoding.keys() | output.keys() | left_out


def test_c22_schema_is_read_into_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "object"}')
    from_file = build(BASE, {"output_schema": str(path)})
    assert from_file.output_schema == {"type": "object"}
    assert from_file == build(BASE, {"output_schema": '{"type": "object"}'})


@pytest.mark.parametrize(
    ("schema", "message"),
    [("nosuch.json", "nosuch.json.*cannot be read"), ("{", "valid JSON")],
)
def test_c22_schema_that_cannot_be_read_is_refused(schema: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(BASE, {"output_schema": schema})


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n", "mapping"), ("a: [\n", "no valid YAML"), (None, "cannot be read")],
)
def test_job_file_that_cannot_be_read_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "job.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (None, None), ("4GiB", 4 * 2**30), ("800MB", 800_000_000), ("50%", 500), ("1.5kib", 1536),
        ("100 %", 1000),
    ],
)  # fmt: skip
def test_memory_is_a_size_or_a_share(memory: str | None, expected: int | None) -> None:
    assert EngineSpec(memory=memory).memory_bytes(1000) == expected


def test_sampling_follows_the_job_then_the_model_then_greedy() -> None:
    model = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert resolve_sampling(SamplingSpec(), {}).greedy
    assert resolve_sampling(SamplingSpec(), {"temperature": 0.6, "top_k": 5}).top_k == 0
    recommended = resolve_sampling(SamplingSpec(), model)
    assert (recommended.temperature, recommended.top_k) == (0.6, 20)
    greedy = resolve_sampling(SamplingSpec(temperature=0.0), model)
    assert (greedy.temperature, greedy.top_k, greedy.repetition_penalty) == (0.0, 0, 1.1)
    assert resolve_sampling(SamplingSpec(temperature=1.0, top_k=3), model).top_k == 3


@pytest.mark.parametrize("value", ["hot", True, [1]])
def test_model_with_nonsense_defaults_is_refused(value: object) -> None:
    with pytest.raises(SpecError, match="generation_config"):
        resolve_sampling(SamplingSpec(), {"do_sample": True, "temperature": value})
    with pytest.raises(SpecError, match="generation_config"):
        resolve_sampling(SamplingSpec(), {"do_sample": True, "top_p": 7.0})
