"""Dates in paths: `s3://bucket/reviews/{{ date }}/` is another folder every night.

The date is the one for which a flow run was scheduled, in its schedule's time zone: a run that is
late, or run again, reads what it was meant to read.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol
from uuid import UUID
from zoneinfo import ZoneInfo

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flows.errors import SpecError

DATED = ("input", "output")
"""The fields of a job that may hold placeholders."""

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


class ScheduleLike(Protocol):
    """What is asked of a deployment's schedule."""

    @property
    def id(self) -> UUID: ...
    @property
    def schedule(self) -> Any: ...


def placeholders(at: datetime) -> dict[str, Any]:
    """The names that a path may hold: the date, the day before, and the whole time."""
    return {"date": at.date(), "yesterday": at.date() - timedelta(days=1), "scheduled": at}


def dated(fields: Mapping[str, Any], at: datetime) -> dict[str, Any]:
    """A job's fields with the placeholders in its paths filled in.

    Args:
        fields: of a job, as in a form or a file.
        at: when it was scheduled, in its time zone.

    Raises:
        SpecError: a placeholder that there is not, or that is no template.
    """
    found = dict(fields)
    for name in DATED:
        if isinstance(found.get(name), str):
            found[name] = _render(name, found[name], at)
    return found


def _render(field: str, path: str, at: datetime) -> str:
    """A path with its placeholders filled in.

    Example:
        >>> _render("input", "in/{{ date }}", datetime(2026, 11, 30, 2))
        'in/2026-11-30'
    """
    values = placeholders(at)
    try:
        unknown = meta.find_undeclared_variables(_ENVIRONMENT.parse(path)) - values.keys()
        if not unknown:
            return _ENVIRONMENT.from_string(path).render(values)
    except (TemplateError, AttributeError, TypeError, ValueError, ArithmeticError) as fault:
        raise SpecError(f"{field} {path!r} cannot be filled in: {fault}; {_known()}") from fault
    name = min(unknown)
    close = difflib.get_close_matches(name, values, n=1)
    hint = f"did you mean {{{{ {close[0]} }}}}? " if close else ""
    raise SpecError(f"{field} {path!r} has an unknown placeholder {name!r}; {hint}{_known()}")


def _known() -> str:
    return (
        "there are {{ date }}, {{ yesterday }} and {{ scheduled }}, as in "
        "{{ date.strftime('%Y/%m/%d') }}"
    )


def timezone_of(schedules: Sequence[ScheduleLike], created_by: UUID | None) -> str:
    """The time zone of the schedule that made a flow run; for one that was started by hand that of
    the deployment's schedules, if they agree, else UTC.
    """
    zones = {schedule.id: str(schedule.schedule.timezone or "UTC") for schedule in schedules}
    if created_by is not None and created_by in zones:
        return zones[created_by]
    agreed = set(zones.values())
    return agreed.pop() if len(agreed) == 1 else "UTC"


def in_zone(at: datetime | None, timezone: str) -> datetime:
    """A time as the clocks of a zone show it; now if None."""
    return (at or datetime.now(UTC)).astimezone(ZoneInfo(timezone))
