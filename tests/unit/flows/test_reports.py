"""A worker's signs of life come now and then, whatever it does."""

from __future__ import annotations

from itertools import pairwise

from flows.busy import BusyTimes
from flows.fleet.messages import Event, Report
from flows.fleet.reports import REPORT_S, WORKS_S, Reporter
from schedulers.load import Load


def test_reports_come_at_their_pace_and_works_at_theirs() -> None:
    now, said, asked = [0.0], list[Event](), list[float]()
    busy = BusyTimes(clock=lambda: now[0])
    with busy.meter("feeder")("reading"):
        pass
    reporter = Reporter(said.append, busy, clock=lambda: now[0])

    def load() -> Load:
        asked.append(now[0])
        return Load(len(asked), 0.0, 0.0)

    told: list[float] = []
    for tick in range(1, 251):  # 25 s, in tenths
        now[0] = tick / 10
        before = len(said)
        reporter.report(load)
        told.extend([now[0]] * (len(said) - before))
    reports = [event for event in said if isinstance(event, Report)]
    assert len(reports) == len(said) == len(asked)  # the load is asked for only when it is told
    gaps = [b - a for a, b in pairwise(told)]
    assert min(gaps) + 1e-9 >= REPORT_S
    assert max(gaps) <= REPORT_S + 0.11
    with_works = [at for at, report in zip(told, reports, strict=True) if report.works]
    assert len(with_works) == int(25 / WORKS_S)
    assert [report.load.num_rows for report in reports] == list(range(1, len(reports) + 1))
