"""Errors of the storage, by who must act.

StorageError
|-- InputError      the user: the input is missing, is no Parquet, or lacks a column
|-- OutputMismatch  the user: the output belongs to another job; names the keys that differ
|-- OutputInUse     the user: another run is writing to this output
|-- OutputError     the user or the machine: the output cannot be written, or not be read
`-- LedgerError     us: rows in and rows out do not match, or a file is not what its marker says
"""

from __future__ import annotations

from typing import Any, NamedTuple


class StorageError(Exception):
    """Root of the tree."""


class InputError(StorageError):
    """The input cannot be used. The message says what, with which value, and what to do."""


class Difference(NamedTuple):
    """A key of the job's fingerprint that is not what it was."""

    key: str
    stored: Any
    given: Any

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.stored)} in the output, {_short(self.given)} now"


class OutputMismatch(StorageError):
    """The output belongs to another job.

    Attributes:
        differences: the keys that differ, with both values.
    """

    def __init__(self, output: str, differences: tuple[Difference, ...]) -> None:
        self.differences = differences
        lines = "; ".join(map(str, differences))
        super().__init__(
            f"{output} belongs to another job ({lines}). Give another --output, the same job, or "
            "--overwrite to start anew"
        )


class OutputInUse(StorageError):
    """Another run holds the output's lease."""


class OutputError(StorageError):
    """The output cannot be written, or not be read."""


class LedgerError(StorageError):
    """A broken promise of the ledger; please file a bug."""


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
