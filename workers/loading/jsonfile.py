"""JSON files of a model folder, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from workers.errors import ModelError


def read_json(path: Path, *, wanted_for: str) -> dict[str, object]:
    """The JSON object in a file.

    Raises:
        ModelError: the file is missing, unreadable, no JSON, or no object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing; it is needed for {wanted_for}. Copy the whole model folder again"
        ) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise ModelError(f"{path} cannot be read ({fault}); copy the model again") from fault
    return parse_object(text, where=str(path))


def read_optional_json(path: Path, *, wanted_for: str) -> dict[str, object]:
    """As `read_json`, but a missing file is an empty object."""
    return read_json(path, wanted_for=wanted_for) if path.exists() else {}


def parse_object(text: str | bytes, *, where: str) -> dict[str, object]:
    """A JSON object without repeated keys.

    Raises:
        ModelError: `text` is no such thing.
    """
    value = _parse(text, where)
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ModelError(f"{where} holds a JSON {kind}, where an object is expected")
    return cast("dict[str, object]", value)


def parse_list(text: str | bytes, *, where: str) -> list[object]:
    """A JSON array.

    Raises:
        ModelError: `text` is no such thing.
    """
    value = _parse(text, where)
    if not isinstance(value, list):
        kind = type(value).__name__
        raise ModelError(f"{where} holds a JSON {kind}, where an array is expected")
    return cast("list[object]", value)


def _parse(text: str | bytes, where: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as fault:
        raise ModelError(f"{where} is not valid JSON ({fault}); copy the model again") from fault


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return found
