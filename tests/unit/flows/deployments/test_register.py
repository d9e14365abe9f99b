"""What is registered: the same by `flows deploy` and by `infra/prefect.yaml`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.deployments.dates import dated
from flows.deployments.form import job_of
from flows.deployments.register import Nightly, make_deployments, read_nightly
from flows.errors import SpecError

ROOT = Path(__file__).parents[4]
JOB = """
input: /data/in/{{ date }}.parquet
output: s3://bucket/out/{{ date }}
prompt: "{{ text }}"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def nightly_of(job: Path | None, *, cron: str = "0 2 * * *", timezone: str = "UTC") -> Nightly:
    return read_nightly(job, cron=cron, timezone=timezone)


def prefect_yaml() -> dict[str, dict[str, Any]]:
    found = yaml.safe_load((ROOT / "infra" / "prefect.yaml").read_text())
    return {item["name"]: item for item in found["deployments"]}


def test_both_are_by_module(job: Path) -> None:
    adhoc, nightly = make_deployments(nightly_of(job))
    assert (adhoc.full_name, adhoc.entrypoint) == (
        "headrace/adhoc", "flows.deployments.adhoc.adhoc",
    )  # fmt: skip
    assert (nightly.full_name, nightly.entrypoint) == (
        "headrace/nightly", "flows.deployments.nightly.nightly",
    )  # fmt: skip


def test_nightly_has_its_job_and_schedule_and_runs_alone(job: Path) -> None:
    asked = nightly_of(job, cron="30 1 * * *", timezone="Europe/Berlin")
    adhoc, nightly = make_deployments(asked)
    assert nightly.parameters["input"] == "/data/in/{{ date }}.parquet"
    assert nightly.parameters["prompt"] == {"template": "{{ text }}"}
    assert nightly.schedules is not None
    (schedule,) = nightly.schedules
    assert (schedule.schedule.cron, schedule.schedule.timezone) == ("30 1 * * *", "Europe/Berlin")
    assert schedule.active
    assert nightly.concurrency_limit == 1
    assert nightly.concurrency_options is not None
    assert nightly.concurrency_options.collision_strategy.value == "CANCEL_NEW"
    assert not adhoc.schedules
    assert adhoc.concurrency_limit is None


def test_nightly_without_a_job_does_not_run_by_itself() -> None:
    _, nightly = make_deployments(nightly_of(None))
    assert nightly.schedules is not None
    assert [schedule.active for schedule in nightly.schedules] == [False]
    assert nightly.parameters == {}


def test_prefect_yaml_says_the_same(job: Path) -> None:
    declared = prefect_yaml()
    for deployment in make_deployments(nightly_of(job)):
        other = declared[deployment.name]
        assert other["entrypoint"] == deployment.entrypoint
        assert other["tags"] == deployment.tags
    nightly = declared["nightly"]
    assert nightly["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert nightly["schedules"] == [
        {"cron": "0 2 * * *", "timezone": "UTC", "slug": "nightly", "active": True}
    ]


def test_job_in_prefect_yaml_is_a_job() -> None:
    at = datetime(2026, 11, 30, 2, tzinfo=UTC)
    spec = job_of(dated(prefect_yaml()["nightly"]["parameters"], at))
    assert spec.input == "s3://reviews/2026-11-29/"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timezone": "Europe/Berlim"}, "the time zone 'Europe/Berlim' is not known"),
        ({"timezone": "../etc"}, "is not known"),
        ({"cron": "every night"}, "the schedule 'every night' is no cron expression"),
    ],
)
def test_a_schedule_that_is_none_is_said(options: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        nightly_of(None, **options)


def test_a_job_that_could_not_run_is_refused_before_its_night(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("input: /in/{{ dtae }}\nprompt: x")
    with pytest.raises(SpecError, match=r"did you mean \{\{ date \}\}\?"):
        nightly_of(path)
    path.write_text("input: /in/{{ date }}")
    with pytest.raises(SpecError, match="a job needs a prompt"):
        nightly_of(path)
    path.write_text("input: /in/{{ date }}\nprompt: x")
    with pytest.raises(SpecError, match=r"output is 'out/20.*give an absolute path or a URL"):
        nightly_of(path)
