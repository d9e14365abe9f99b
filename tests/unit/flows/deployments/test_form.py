"""The form: what Prefect makes of the flows' parameters, and what comes back from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate

from flows.deployments.adhoc import adhoc
from flows.deployments.form import PLACES, form_values, given, job_of, placed
from flows.deployments.nightly import nightly
from flows.errors import SpecError
from flows.spec_model import EncodeSpec, EngineSpec, JobSpec, PromptSpec, SamplingSpec

GROUPS = {
    "prompt": PromptSpec,
    "sampling": SamplingSpec,
    "engine": EngineSpec,
    "encode": EncodeSpec,
}
FILLED_IN = {
    "input": "in.parquet",
    "output": "out/x",
    "prompt": {"template": "{{ text }}"},
}


@pytest.fixture(scope="module", params=[adhoc, nightly], ids=["adhoc", "nightly"])
def schema(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The schema as the server gets it."""
    return parameter_schema(request.param).model_dump_for_openapi()


def fields(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field with its path."""
    yield from schema["properties"].items()
    for group, kind in GROUPS.items():
        for name, field in schema["definitions"][kind.__name__]["properties"].items():
            yield f"{group}.{name}", field


def test_fields_are_those_of_the_spec_in_its_order(schema: dict[str, Any]) -> None:
    properties = schema["properties"]
    assert list(properties) == [*JobSpec.model_fields, "gpu_slots"]
    assert [field["position"] for field in properties.values()] == list(range(len(properties)))
    for group, kind in GROUPS.items():
        inner = schema["definitions"][kind.__name__]["properties"]
        assert list(inner) == list(kind.model_fields), group
        assert [field["position"] for field in inner.values()] == list(range(len(inner))), group


def test_only_input_and_output_are_required(schema: dict[str, Any]) -> None:
    assert schema["required"] == ["input", "output"]


def test_every_field_is_described(schema: dict[str, Any]) -> None:
    assert [name for name, field in fields(schema) if not field.get("description")] == []
    described = {name: field["description"] for name, field in schema["properties"].items()}
    for name in JobSpec.model_fields.keys() - PLACES.keys():
        assert described[name] == JobSpec.model_fields[name].description
    assert [text for text in described.values() if "<" in text] == [], "markdown shows no tags"


def test_it_has_nothing_that_a_form_cannot_draw(schema: dict[str, Any]) -> None:
    for name, field in fields(schema):
        assert "anyOf" not in field, name
        assert "cli" not in field, name
        assert field.get("default", "none") is not None, name
        assert "$ref" in field or "type" in field or "enum" in field, (name, field)


def test_groups_are_one_level_below(schema: dict[str, Any]) -> None:
    refs = {name for name, field in schema["properties"].items() if "$ref" in field}
    assert refs == set(GROUPS)
    assert [name for name, field in fields(schema) if "." in name and "$ref" in field] == []


def test_choices_and_bounds_are_in_it(schema: dict[str, Any]) -> None:
    found = dict(fields(schema))
    assert found["engine.policy"]["enum"] == ["hybrid", "exclusive", "mixed"]
    assert found["task"]["enum"] == ["generate", "embed", "classify", "score"]
    assert found["on_too_long"]["enum"] == ["error", "truncate_left", "truncate_right", "fail"]
    assert (found["max_error_rate"]["minimum"], found["max_error_rate"]["maximum"]) == (0.0, 1.0)
    assert found["limit"]["minimum"] == 1
    assert (found["sampling.top_p"]["exclusiveMinimum"], found["sampling.top_p"]["maximum"]) == (
        0.0, 1.0,
    )  # fmt: skip
    assert found["gpu_slots"]["minimum"] == 0
    assert found["keep_columns"]["items"] == {"type": "string", "minLength": 1}
    assert found["output_schema"]["type"] == "string"


def test_what_the_server_would_take_and_refuse(schema: dict[str, Any]) -> None:
    def faults(**more: Any) -> list[str]:
        return [fault.message for fault in validate({**FILLED_IN, **more}, schema)]

    assert faults() == []
    assert faults(limit=None, prompt={"template": "{{ text }}", "column": None}) == []
    assert faults(max_error_rate=1.5) == ["1.5 is greater than the maximum of 1.0"]
    assert len(faults(engine={"policy": "fastest"})) == 1
    assert len(faults(engine={"polciy": "mixed"})) == 1
    assert len(validate({}, schema)) == len(PLACES)


def test_a_form_with_all_its_defaults_is_the_default_job(schema: dict[str, Any]) -> None:
    def defaults(properties: dict[str, Any]) -> dict[str, Any]:
        return {name: field["default"] for name, field in properties.items() if "default" in field}

    sent = defaults(schema["properties"])
    for group, kind in GROUPS.items():
        sent[group] = defaults(schema["definitions"][kind.__name__]["properties"])
    sent |= {name: FILLED_IN[name] for name in PLACES}
    sent["prompt"]["template"] = "{{ text }}"
    assert job_of(sent) == JobSpec.model_validate(FILLED_IN)


def test_empty_inputs_are_not_given() -> None:
    assert given({"a": "", "b": None, "c": {}, "d": {"e": None}, "f": 0, "g": False, "h": []}) == {
        "f": 0, "g": False, "h": [],
    }  # fmt: skip
    spec = job_of({**FILLED_IN, "id_column": "", "limit": None, "sampling": {"top_k": None}})
    assert spec == JobSpec.model_validate(FILLED_IN)


def test_mistakes_are_told_in_the_users_words() -> None:
    with pytest.raises(SpecError, match="a job needs a prompt"):
        job_of({"input": "in.parquet"})
    with pytest.raises(SpecError, match=r"sampling\.top_p"):
        job_of({**FILLED_IN, "sampling": {"top_p": 2.0}})


def test_a_job_file_becomes_form_values(tmp_path: Path, schema: dict[str, Any]) -> None:
    answers = tmp_path / "answers.json"
    answers.write_text('{"type": "object"}')
    job = {**FILLED_IN, "prompt": "{{ text }}", "output_schema": str(answers)}
    values = form_values(job)
    assert values["prompt"] == {"template": "{{ text }}"}
    assert json.loads(values["output_schema"]) == {"type": "object"}
    assert validate(values, schema) == []
    assert job_of(values).output_schema == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "faulty"),
    [
        ({"input": "/in", "output": "s3://bucket/out"}, None),
        ({"input": "s3://bucket/in", "output": "/out"}, None),
        ({"input": "in.parquet", "output": "/out"}, "input is 'in.parquet'"),
        ({"input": "/data/reviews.parquet"}, "output is 'out/reviews'"),
    ],
)
def test_a_flow_run_takes_no_relative_paths(fields: dict[str, str], faulty: str | None) -> None:
    spec = job_of({"prompt": {"template": "x"}, **fields})
    if faulty is None:
        assert placed(spec) is spec
    else:
        with pytest.raises(SpecError, match=faulty):
            placed(spec)
