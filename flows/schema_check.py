"""Is the job's output schema usable? Known before a model is loaded (C22)."""

from __future__ import annotations

from flows.errors import SpecError
from flows.spec import JobSpec, read_schema


def check_schema(spec: JobSpec) -> None:
    """Refuse an output schema that no answer could be held to.

    Raises:
        SpecError: it is no JSON schema, or (guided) it uses what cannot be enforced.
        ModelError: guided, and the library for it is not installed.
    """
    if spec.output_schema is None:
        return
    schema = read_schema(spec.output_schema)
    if not schema:
        raise SpecError(
            'output_schema is empty and would allow anything; say at least {"type": "object"}'
        )
    _check_meta(schema)
    if spec.guided:
        from workers.guided import check_json_schema

        try:
            check_json_schema(schema)
        except ValueError as fault:
            raise SpecError(f"output_schema: {fault}") from fault


def _check_meta(schema: dict[str, object]) -> None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as fault:
        raise SpecError(
            f"output_schema is no JSON schema at {fault.json_path}: {fault.message}"
        ) from fault
