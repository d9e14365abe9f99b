"""What a job's results depend on: the identity that a resumed run is compared with (C9, C11, C12).

Values, not digests, so that a mismatch can be explained key by key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flows.spec_model import JobSpec
from flows.specfile import read_schema

Json = Any
"""What `json.dumps` takes."""


class Fingerprint(NamedTuple):
    """Identity of a job's results.

    Attributes:
        generation: changing any of these makes other generations: resuming is refused.
        output: changing these only changes how results are written: generations are kept.
    """

    generation: dict[str, Json]
    output: dict[str, Json]


def fingerprint(spec: JobSpec, *, input_fingerprint: str, model_fingerprint: str) -> Fingerprint:
    """Everything that changes results, and nothing that only changes how fast they come.

    Policy, batch limits, memory, device, shard size, timeouts and error budgets are left out.
    """
    plain = spec.model_dump(mode="json")
    schema = None if spec.output_schema is None else read_schema(spec.output_schema)
    generation: dict[str, Json] = {
        "input": input_fingerprint,
        "id_column": spec.id_column,
        "limit": spec.limit,
        "model": model_fingerprint,
        "task": spec.task,
        **{_PROMPT_KEYS[key]: value for key, value in plain["prompt"].items()},
        **(_generated(plain, schema) if spec.task == "generate" else _encoded(plain)),
        "on_too_long": spec.on_too_long,
        "dtype": spec.engine.dtype,
        "deterministic": spec.engine.deterministic,
    }
    return Fingerprint(generation, {"keep_columns": list(spec.keep_columns)})


def _generated(plain: dict[str, Any], schema: Json) -> dict[str, Json]:
    guided = plain["guided"] if schema is not None else False
    return {**plain["sampling"], "output_schema": schema, "guided": guided}


def _encoded(plain: dict[str, Any]) -> dict[str, Json]:
    kept = ("vector_dtype", "normalize", "pooling", "prompt_name", "choices")
    return {
        **{name: plain["encode"][name] for name in kept},
        "partition_by": plain["partition_by"],
    }


_PROMPT_KEYS = {
    "template": "prompt",
    "column": "prompt_column",
    "messages_column": "messages_column",
    "system": "system",
    "raw": "raw_prompt",
}
