"""The job spec as the parameters of a flow, and so as the form of the Prefect UI.

One parameter for each field of `JobSpec`, in its order, described and bounded as there; groups
(prompt, sampling, engine) are one level below. The UI shows descriptions as markdown. What a form
cannot draw well is left out of the schema: the choice "or null" of an optional field, whose empty
input already says it, and objects for the output schema, which a form takes as JSON text.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Field, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import MISSING, CoreSchema

from flows.errors import SpecError
from flows.spec_model import JobSpec
from flows.specfile import build, read_schema

PLACES = {
    "input": "Parquet file, glob or directory, as an absolute path, or a URL: s3://bucket/folder/.",
    "output": "Directory of the results, as an absolute path, or a URL: s3://bucket/folder/.",
}
"""Both must be given: a flow run has no folder of its own that would last."""

GPU_SLOTS = "gpu_slots"
SLOTS_HELP = (
    "Slots of the Prefect server's global concurrency limit 'gpu' to wait for, and to hold while "
    "the job computes; 0: none."
)


class Drawn:
    """Annotates a parameter: its JSON schema as forms draw it, a group field by field. Without null
    choices, a single choice as a choice, and without what only the CLI needs.
    """

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        group = handler.resolve_ref_schema(schema)
        if "properties" not in group:
            return _drawn(schema)
        for name, field in group["properties"].items():
            group["properties"][name] = _drawn(field)
        return schema


def _drawn(field: Mapping[str, Any]) -> dict[str, Any]:
    """A field's schema as a form draws it."""
    drawn = {key: value for key, value in field.items() if key not in ("anyOf", "const", "cli")}
    if "anyOf" in field:
        (choice,) = (item for item in field["anyOf"] if item.get("type") != "null")
        drawn = {**choice, **drawn}
    if "const" in field:
        drawn["enum"] = [field["const"]]
    if drawn.get("default", MISSING) is None:
        del drawn["default"]
    return drawn


def job_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function of `**fields` the parameters of a job, for Prefect to make a form of.

    Put it under `@flow(validate_parameters=False)`: `job_of` checks them, in a user's words.
    """
    parameters = [_parameter(name, info) for name, info in JobSpec.model_fields.items()]
    parameters.append(_slots())
    descriptions = {name: str(info.description) for name, info in JobSpec.model_fields.items()}
    descriptions |= {**PLACES, GPU_SLOTS: SLOTS_HELP}
    described = "\n".join(f"    {name}: {line}" for name, line in descriptions.items())
    function.__doc__ = f"{inspect.getdoc(function)}\n\nArgs:\n{described}\n"
    function.__dict__["__signature__"] = inspect.Signature(parameters)
    return function


def _parameter(name: str, info: FieldInfo) -> inspect.Parameter:
    kind, default = info.annotation, info.default
    is_group = inspect.isclass(kind) and issubclass(kind, BaseModel)
    if name in PLACES:
        default = inspect.Parameter.empty
    elif is_group or default is None:
        default = MISSING
    annotation = Annotated[(_plain(kind), *info.metadata, Drawn())]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _plain(kind: Any) -> Any:
    """A type without null; of several choices the last, which is the text."""
    if get_origin(kind) in (Union, types.UnionType):
        return [choice for choice in get_args(kind) if choice is not type(None)][-1]
    return kind


def _slots() -> inspect.Parameter:
    annotation = Annotated[int, Field(ge=0, le=1024)]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(GPU_SLOTS, kind, default=0, annotation=annotation)


# -- from a form to a job, and from a job file to a form --


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What was filled in: forms send an empty input as nothing, null, or empty text."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        kept = given(value) if isinstance(value, Mapping) else value
        if kept is not MISSING and kept not in (None, "", {}):
            found[name] = kept
    return found


def job_of(fields: Mapping[str, Any]) -> JobSpec:
    """The job that a flow run's parameters describe.

    Raises:
        SpecError: what is wrong with it, in the user's words.
    """
    return build({name: value for name, value in given(fields).items() if name != GPU_SLOTS})


def placed(spec: JobSpec) -> JobSpec:
    """The job, if its paths mean the same wherever a flow run happens to be.

    Prefect workers give each run a folder of its own and delete it afterwards, results and all.

    Raises:
        SpecError: input or output is a relative path.
    """
    for name, path in (("input", spec.input), ("output", spec.output)):
        if "://" not in path and not Path(path).is_absolute():
            raise SpecError(
                f"{name} is {path!r}, and a flow run has no folder to look there from; give an "
                "absolute path or a URL such as s3://bucket/folder/"
            )
    return spec


def form_values(job: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job file as the parameters of a deployment: a bare prompt in its group, a
    schema's file as its text, since a flow run may be on another machine.

    Raises:
        SpecError: the schema cannot be read.
    """
    values = dict(job)
    if isinstance(values.get("prompt"), str):
        values["prompt"] = {"template": values["prompt"]}
    if values.get("output_schema") is not None:
        values["output_schema"] = json.dumps(read_schema(values["output_schema"]))
    return values
