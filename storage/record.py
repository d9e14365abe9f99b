"""`job.json`: what a job is, kept with its output. Written once, first of all files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from storage.errors import Difference, LedgerError
from storage.results import ResultColumns
from storage.shards import Shard
from storage.vectors import VectorSpec

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
        grouped: the shards are of the input as it was grouped by its keys (`grouping.py`).
        min_texts: rows that close a superbatch, where rows are encoded; 0: not said.
        max_texts: most rows that are encoded at a time, where rows are encoded; 0: not said.
    """

    job_id: str
    created: str
    spec: Mapping[str, Any]
    generation: Mapping[str, Any]
    output: Mapping[str, Any]
    columns: ResultColumns
    shards: tuple[Shard, ...]
    grouped: bool = False
    min_texts: int = 0
    max_texts: int = 0

    @property
    def total_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    def to_bytes(self) -> bytes:
        plain: dict[str, Any] = {
            "format": FORMAT,
            "job_id": self.job_id,
            "created": self.created,
            "spec": dict(self.spec),
            "generation": dict(self.generation),
            "output": dict(self.output),
            "columns": _columns_to_json(self.columns),
            "shards": [shard.to_json() for shard in self.shards],
        }
        if self.grouped:
            plain["grouped"] = True
        if self.max_texts:
            plain |= {"min_texts": self.min_texts, "max_texts": self.max_texts}
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
            return cls(
                job_id=raw["job_id"],
                created=raw["created"],
                spec=raw["spec"],
                generation=raw["generation"],
                output=raw["output"],
                columns=_columns_from_json(raw["columns"]),
                shards=tuple(Shard.from_json(item) for item in raw["shards"]),
                grouped=raw.get("grouped", False),
                min_texts=raw.get("min_texts", 0),
                max_texts=raw.get("max_texts", 0),
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise LedgerError(f"{where} is damaged ({fault!r}); --overwrite starts anew") from fault


def _columns_to_json(columns: ResultColumns) -> dict[str, Any]:
    """What only jobs with vectors or partitions have is left out of all others' records."""
    plain: dict[str, Any] = {
        "kept": list(columns.kept),
        "logprobs": columns.logprobs,
        "samples": columns.samples,
    }
    if columns.vector is not None:
        plain["vector"] = columns.vector.to_json()
    if columns.partition_by:
        plain["partition_by"] = list(columns.partition_by)
    return plain


def _columns_from_json(raw: Mapping[str, Any]) -> ResultColumns:
    vector = raw.get("vector")
    return ResultColumns(
        kept=tuple(raw["kept"]),
        logprobs=raw["logprobs"],
        samples=raw["samples"],
        vector=None if vector is None else VectorSpec.from_json(vector),
        partition_by=tuple(raw.get("partition_by", ())),
    )


def differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Keys whose values are not the same, in order of the given ones."""
    plain: dict[str, Any] = orjson.loads(orjson.dumps(dict(given)))
    keys = [*plain, *(key for key in stored if key not in plain)]
    return tuple(
        Difference(key, stored.get(key), plain.get(key))
        for key in keys
        if stored.get(key) != plain.get(key)
    )
