"""Dates in paths, and whose clock they are of."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from flows.deployments.dates import dated, in_zone, timezone_of
from flows.errors import SpecError

AT = datetime(2026, 3, 1, 2, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("path", "filled_in"),
    [
        ("s3://b/{{ date }}/", "s3://b/2026-03-01/"),
        ("s3://b/{{ (date) }}/", "s3://b/2026-03-01/"),
        ("in/{{ yesterday }}.parquet", "in/2026-02-28.parquet"),
        (
            "y={{ date.year }}/m={{ date.strftime('%m') }}/h={{ scheduled.strftime('%H') }}",
            "y=2026/m=03/h=02",
        ),
        ("in/*.parquet", "in/*.parquet"),
    ],
)
def test_paths_are_filled_in(path: str, filled_in: str) -> None:
    assert dated({"input": path, "output": path, "limit": 3}, AT) == {
        "input": filled_in, "output": filled_in, "limit": 3,
    }  # fmt: skip


def test_a_prompt_keeps_its_columns() -> None:
    prompt = {"template": "{{ date }} {{ text }}"}
    assert dated({"input": "in", "prompt": prompt}, AT)["prompt"] == prompt


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("in/{{ dat }}", r"unknown placeholder 'dat'; did you mean \{\{ date \}\}\? there are"),
        ("in/{{ text }}", "unknown placeholder 'text'; there are"),
        ("in/{{ date", "input 'in/{{ date' cannot be filled in"),
        ("in/{{ date.decade }}", "cannot be filled in"),
        ("in/{{ date / 0 }}", "cannot be filled in"),
        ("in/{{ date.__class__ }}", "cannot be filled in"),
    ],
)  # fmt: skip
def test_what_is_no_placeholder_is_said(path: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        dated({"input": path}, AT)


@dataclass
class Scheduled:
    id: UUID
    schedule: Any


def schedules(*zones: str | None) -> list[Scheduled]:
    return [Scheduled(uuid4(), SimpleNamespace(timezone=zone)) for zone in zones]


def test_the_zone_is_that_of_the_schedule_that_made_the_run() -> None:
    found = schedules("Europe/Berlin", "Asia/Tokyo")
    assert timezone_of(found, found[1].id) == "Asia/Tokyo"


def test_a_run_by_hand_is_of_the_zone_that_schedules_agree_on() -> None:
    assert timezone_of(schedules("Europe/Berlin", "Europe/Berlin"), None) == "Europe/Berlin"
    assert timezone_of(schedules("Europe/Berlin", "Asia/Tokyo"), uuid4()) == "UTC"
    assert timezone_of(schedules(None), None) == "UTC"
    assert timezone_of([], None) == "UTC"


def test_the_day_is_that_of_the_zone() -> None:
    late = datetime(2026, 11, 29, 23, 30, tzinfo=UTC)
    assert in_zone(late, "Europe/Berlin").date().isoformat() == "2026-11-30"
    assert in_zone(late, "America/New_York").date().isoformat() == "2026-11-29"
    assert in_zone(None, "UTC").tzinfo is not None
