"""The nightly schedule of cron and systemd: units that systemd reads, commands that take a day."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from cronsim import CronSim

from flows.cli import USAGE
from flows.specfile import build, read_job
from tests.unit.infra.files import INFRA, run_recorded, unit_options

SYSTEMD = INFRA / "systemd"
UNITS = ("headrace@.service", "headrace-nightly.service", "headrace-nightly.timer")
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd is not installed")


def cron_line() -> tuple[str, str, str]:
    """Schedule, user and command of the crontab's one line."""
    (line,) = (
        line
        for line in (INFRA / "cron" / "headrace").read_text().splitlines()
        if line and not line.startswith("#") and not re.match(r"[A-Z_]+=", line)
    )
    *schedule, user, command = line.split(maxsplit=6)
    return " ".join(schedule), user, command.replace(r"\%", "%")


def test_common_job_is_a_job_once_it_has_a_day() -> None:
    flat = {"input": "s3://bucket/reviews/date=2026-11-30/", "output": "s3://bucket/x/"}
    assert build(read_job(INFRA / "nightly.example.yaml"), flat).prompt.template


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_unit_is_valid(name: str, tmp_path: Path) -> None:
    """As systemd reads it, on a machine where the programs are."""
    folder = tmp_path / "units"
    folder.mkdir()
    for unit in UNITS:
        text = (SYSTEMD / unit).read_text().replace("/opt/headrace/bin/flows", "/bin/true")
        (folder / unit).write_text(text.replace("User=headrace", "User=root"))
    instance = name.replace("@.", "@2026-11-30.")
    if instance != name:
        (folder / instance).symlink_to(name)
    done = subprocess.run(
        [str(ANALYZE), "verify", "--man=no", "--recursive-errors=no", str(folder / instance)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"SYSTEMD_UNIT_PATH": f"{folder}:"},
    )
    ours = [line for line in done.stderr.splitlines() if "headrace" in line]
    assert (done.returncode, ours) == (0, [])


@needs_systemd
def test_timer_is_every_night() -> None:
    (calendar,) = unit_options("headrace-nightly.timer")["Timer", "OnCalendar"]
    done = subprocess.run(
        [str(ANALYZE), "calendar", "--iterations=2", calendar],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert len(re.findall(r"02:00:00|0[01]:00:00 UTC", done.stdout)) >= 2


def test_service_gives_flows_time_and_goes_on_after_failures() -> None:
    options = unit_options("headrace@.service")
    assert options["Service", "KillMode"] == ["mixed"]
    assert int(options["Service", "TimeoutStopSec"][0]) >= 60
    assert options["Service", "Restart"] == ["on-failure"]
    assert options["Service", "RestartPreventExitStatus"] == [str(USAGE)]
    assert options["Service", "User"] == ["headrace"]


def test_nightly_unit_starts_the_day(tmp_path: Path) -> None:
    (start,) = unit_options("headrace-nightly.service")["Service", "ExecStart"]
    before = datetime.now().astimezone().date()
    (argv,) = run_recorded(start.replace("%%", "%"), tmp_path, ["systemctl"])
    after = datetime.now().astimezone().date()
    assert argv[:3] == ["systemctl", "start", "--no-block"]
    assert argv[3] in {f"headrace@{before}.service", f"headrace@{after}.service"}


def test_crontab_is_every_night_and_never_overlaps() -> None:
    schedule, user, command = cron_line()
    start = datetime(2026, 11, 30)  # noqa: DTZ001 cron's own, without a zone
    first, second = (next(CronSim(schedule, start + timedelta(days=n))) for n in (0, 1))
    assert second - first == timedelta(days=1)
    assert user == "headrace"
    assert "flock --nonblock" in command


def test_crontab_runs_the_day_with_the_environment(tmp_path: Path) -> None:
    _, _, command = cron_line()
    (tmp_path / "env").write_text(f"RECORD={tmp_path / 'other-record'}\n")
    script = (
        command.replace("/etc/headrace/env", str(tmp_path / "env"))
        .replace("/var/cache/headrace/lock", str(tmp_path / "lock"))
        .replace("/opt/headrace/bin/flows", "flows")
    )
    before = datetime.now().astimezone().date()
    assert run_recorded(script, tmp_path, ["flows"]) == [], "the environment file was not read"
    (line,) = (tmp_path / "other-record").read_text().splitlines()
    argv = line.removesuffix("\0").split("\0")
    days = set(re.findall(r"date=([\d-]+)/", " ".join(argv)))
    assert days <= {str(before), str(datetime.now().astimezone().date())}
    assert len(days) == 1
    assert argv[:2] == ["flows", "run"]
