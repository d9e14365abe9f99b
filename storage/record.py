"""`job.json`: what a job is, kept with its output. Written once, first of all files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from storage.errors import Difference, LedgerError
from storage.results import ResultColumns
from storage.shards import Shard

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job and its shard plan.

    Attributes:
        job_id: of this output; also the prefix of telemetry.
        created: ISO time.
        spec: the job as the user gave it, for people.
        generation: the fingerprint: what changes generations, by key.
        output: what only changes how results are written, by key.
        columns: optional columns of the results.
        shards: the plan. It stays, whatever a later run says about shard sizes (C10).
    """

    job_id: str
    created: str
    spec: Mapping[str, Any]
    generation: Mapping[str, Any]
    output: Mapping[str, Any]
    columns: ResultColumns
    shards: tuple[Shard, ...]

    @property
    def total_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    def to_bytes(self) -> bytes:
        plain = {
            "format": FORMAT,
            "job_id": self.job_id,
            "created": self.created,
            "spec": dict(self.spec),
            "generation": dict(self.generation),
            "output": dict(self.output),
            "columns": {
                "kept": list(self.columns.kept),
                "logprobs": self.columns.logprobs,
                "samples": self.columns.samples,
            },
            "shards": [shard.to_json() for shard in self.shards],
        }
        return orjson.dumps(plain, option=orjson.OPT_INDENT_2)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> JobRecord:
        """Read a record.

        Raises:
            LedgerError: damaged, or written by another version.
        """
        try:
            raw = orjson.loads(data)
            if raw["format"] != FORMAT:
                raise LedgerError(
                    f"{where} has format {raw['format']}; this version reads {FORMAT}: use the "
                    "version that wrote it, or --overwrite"
                )
            kept = raw["columns"]
            return cls(
                job_id=raw["job_id"],
                created=raw["created"],
                spec=raw["spec"],
                generation=raw["generation"],
                output=raw["output"],
                columns=ResultColumns(
                    kept=tuple(kept["kept"]), logprobs=kept["logprobs"], samples=kept["samples"]
                ),
                shards=tuple(Shard.from_json(item) for item in raw["shards"]),
            )
        except (orjson.JSONDecodeError, KeyError, TypeError) as fault:
            raise LedgerError(f"{where} is damaged ({fault!r}); --overwrite starts anew") from fault


def differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Keys whose values are not the same, in order of the given ones."""
    plain: dict[str, Any] = orjson.loads(orjson.dumps(dict(given)))
    keys = [*plain, *(key for key in stored if key not in plain)]
    return tuple(
        Difference(key, stored.get(key), plain.get(key))
        for key in keys
        if stored.get(key) != plain.get(key)
    )
