"""`flows report`: the numbers are the telemetry's, every section is there, and text stays text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import numpy as np
import pytest

from flows.cli import main
from flows.report import render_report, time_axis
from flows.report_data import Telemetry
from flows.report_figures import empirical_hazard
from flows.report_svg import inlined
from flows.report_tables import cost_table, policy_sentence
from storage.objects import ObjectStore
from storage.views import open_views
from tests.report_jobs import (
    SPEC,
    look,
    phase,
    prices,
    shifted_job,
    sizing,
    step,
    switch,
    write_record,
    write_results,
    write_table,
)

SECTIONS = [
    "headline", "throughput", "crossover", "costs", "lengths", "tail", "rows", "memory",
    "phases", "cost-model", "profile",
]  # fmt: skip
HOSTILE = "<script>alert('x')</script>\"&$\\frac{1}{0}$"


class Page(HTMLParser):
    """What a browser would find in a page: elements, ids, references and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.sections: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids[value or ""] += 1
                if tag == "section":
                    self.sections.append(value or "")
            if name in {"href", "src", "xlink:href", "action", "data", "srcset"}:
                self.references.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


@contextmanager
def telemetry(output: Path) -> Iterator[Telemetry]:
    con = open_views(ObjectStore(str(output)))
    try:
        yield Telemetry(con)
    finally:
        con.close()


def small_job(folder: Path, *, reason: str = "margin is up") -> Path:
    """Ten rows; two runs of 4 s and 2 s; a switch in each."""
    rows = [{"prompt_tokens": 100, "completion_tokens": n} for n in range(1, 11)]
    output = write_results(folder, rows)
    first = [
        step(1, 0.0, 1.0, phase="prefill", num_prefill_tokens=600, num_decode_tokens=0),
        step(2, 1.0, 1.0, num_finished=5),
        step(3, 2.0, 2.0, num_finished=4, policy_mode="exclusive", num_suspended=2),
    ]
    second = [
        step(1, 500.0, 1.0, policy_mode="exclusive"),
        step(2, 501.0, 1.0, num_finished=1, phase="mixed", num_prefill_tokens=30),
    ]
    write_table(output, "steps", "run-1", first)
    write_table(output, "steps", "run-2", second)
    write_table(output, "crossover", "run-1", [
        look(1, 0.0), switch(3, 2.0, "mixed", "exclusive", reason),
    ])  # fmt: skip
    write_table(output, "crossover", "run-2", [switch(2, 501.0, "exclusive", "mixed", "calm")])
    write_table(output, "costs", "run-1", [
        prices(1, 0.0, "calibration", alpha_d=0.5, beta_d=0.0, gamma=0.0, alpha_p=1.0, beta_p=0.0),
        prices(3, 2.0, "online", alpha_d=1.0, beta_d=0.0, gamma=0.0),
    ])  # fmt: skip
    write_table(output, "memory_plan", "run-1", [sizing(1, 0.0)])
    write_table(output, "phases", "run-1", [
        phase(1, 0.0, "idle", "prefill", "start"), phase(2, 1.0, "prefill", "decode", "full"),
    ])  # fmt: skip
    return output


def test_every_section_is_there_in_order(tmp_path: Path) -> None:
    page = Page(render_report(str(small_job(tmp_path))))
    assert page.sections == SECTIONS
    assert page.tags["svg"] == 5
    assert "10 of 10" in page.text
    assert "org/model" in page.text and "in.parquet" in page.text and "adaptive" in page.text
    assert "1 of 5 steps (20.00%)" in page.text
    assert "2.0 GiB" in page.text and "16,000" in page.text
    assert "idle -> prefill" in page.text


def test_runs_are_laid_end_to_end(tmp_path: Path) -> None:
    with telemetry(small_job(tmp_path)) as job:
        assert [(run.number, run.run_id, run.start_s, run.duration_s) for run in job.runs] == [
            (1, "run-1", 0.0, 4.0),
            (2, "run-2", 4.0, 2.0),
        ]
        assert job.total_s == 6.0
        assert [found["time_s"] for found in job.switches()] == [2.0, 5.0]
        assert job.modes() == [
            (0, 2, "mixed"),
            (2, 4, "exclusive"),
            (4, 5, "exclusive"),
            (5, 6, "mixed"),
        ]
        axis = time_axis(job, job.switches())
        assert axis.borders_s == [4.0]
        assert axis.marks[0].text == "1: 2.00 s, mixed -> exclusive: margin is up"


def test_the_sentence_says_what_the_policy_did(tmp_path: Path) -> None:
    with telemetry(small_job(tmp_path)) as job:
        assert policy_sentence("adaptive", job, job.switches()) == (
            "2 mode switches in 3 looks at the crossover: at 2.0 s mixed -> exclusive because "
            "margin is up; at 5.0 s exclusive -> mixed because calm."
        )


def test_every_switch_has_a_mark_and_a_row_that_lead_to_each_other(tmp_path: Path) -> None:
    page = Page(render_report(str(small_job(tmp_path))))
    for number in (1, 2):
        for figure in ("throughput", "crossover", "tail"):
            assert page.ids[f"{figure}-mark-{number}"] == 1
        assert page.ids[f"switch-{number}"] == 1
        assert f"#switch-{number}" in page.references
    assert page.ids["switch-3"] == 0


def test_tokens_are_shared_out_over_the_bins_of_a_step(tmp_path: Path) -> None:
    with telemetry(small_job(tmp_path)) as job:
        bins = job.bins()
        width_s = job.total_s / len(bins["at_s"])
        assert bins["prefill"].sum() * width_s == pytest.approx(630)
        assert bins["decode"].sum() * width_s == pytest.approx(40)
        assert bins["prefill"][bins["at_s"] < 1] == pytest.approx(600)
        assert bins["decode"][(bins["at_s"] > 2) & (bins["at_s"] < 4)] == pytest.approx(5)
        assert bins["kv_use"] == pytest.approx(0.75)
        shares = job.phase_shares()
        assert shares["prefill"][shares["at_s"] < 0.98] == pytest.approx(1)
        assert shares["mixed"][shares["at_s"] > 5.02] == pytest.approx(1)


def test_the_tail_is_the_time_from_a_share_of_the_rows_to_the_last(tmp_path: Path) -> None:
    output = small_job(tmp_path)
    with telemetry(output) as job:
        assert job.finished_at() == {0.5: 2.0, 0.9: 4.0, 0.99: 6.0, 1.0: 6.0}
        finished = job.finished()
        assert (finished["at_s"].tolist(), finished["finished"].tolist()) == ([2, 4, 6], [5, 9, 10])
    assert "last 10 % of the rows took 2.0 s (33.3% of the time)" in render_report(str(output))


def test_predictions_use_the_coefficients_in_force(tmp_path: Path) -> None:
    with telemetry(small_job(tmp_path)) as job:
        errors = {row["kind"]: row for row in job.cost_errors()}
        assert errors.keys() == {"prefill", "decode"}  # the second run has no cost model
        assert errors["prefill"]["median_error"] == 0.0
        assert errors["decode"]["num_steps"] == 2
        assert errors["decode"]["median_error"] == pytest.approx(0.5)
        assert errors["decode"]["bias"] == pytest.approx(-0.5)
        table = cost_table(job)
    assert table is not None
    assert next(row[1:3] for row in table.rows if row[0] == "alpha_d") == ("500", "1,000")


def test_the_hazard_is_ends_per_token_reached() -> None:
    rng = np.random.default_rng(3)
    lengths = np.sort(rng.geometric(0.04, 3000))
    middles, hazards, weights = empirical_hazard(lengths)
    last = int(np.quantile(lengths, 0.95))
    reached = sum(int((lengths >= t).sum()) for t in range(1, last + 1))
    assert weights.sum() == reached
    assert (hazards * weights).sum() == pytest.approx((lengths <= last).sum())
    assert np.average(hazards, weights=weights) == pytest.approx(0.04, rel=0.1)
    assert (np.diff(middles) > 0).all()


@pytest.mark.parametrize("lengths", [[], [1], [5, 5, 5], [1, 400]])
def test_odd_lengths_have_a_hazard_between_0_and_1(lengths: list[int]) -> None:
    _, hazards, _ = empirical_hazard(np.array(lengths, np.int64))
    assert ((hazards >= 0) & (hazards <= 1)).all()


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    spec = {"input": HOSTILE, "model": HOSTILE, "engine": {"policy": HOSTILE}}
    rows = [{"finish_reason": HOSTILE, "completion_tokens": n, "text": HOSTILE} for n in (3, 9)]
    output = write_results(tmp_path, rows, spec=spec)
    changes = {"reason": HOSTILE, "phase": HOSTILE, "policy_mode": HOSTILE}
    write_table(output, "steps", "run-1", [step(1, 0.0, 1.0, num_finished=2, **changes)])
    write_table(output, "crossover", "run-1", [switch(1, 0.0, "mixed", HOSTILE, HOSTILE)])
    write_table(output, "phases", "run-1", [phase(1, 0.0, HOSTILE, HOSTILE, HOSTILE)])
    write_table(output, "memory_plan", "run-1", [sizing(1, 0.0, form=HOSTILE, reason=HOSTILE)])
    html = render_report(str(output))
    page = Page(html)
    assert page.tags["script"] == 0
    assert page.sections == SECTIONS
    assert page.text.count(HOSTILE) > 10
    assert "<script" not in html.lower()


def test_nothing_is_fetched_and_ids_are_unique(tmp_path: Path) -> None:
    html = render_report(str(shifted_job(tmp_path)))
    page = Page(html)
    assert [id_ for id_, count in page.ids.items() if count > 1] == []
    assert re.findall(r"https?://|@import", html) == []
    assert re.findall(r"url\((?!#)", html) == []
    inside = [r.removeprefix("#") for r in page.references if r.startswith("#")]
    assert [r for r in page.references if not r.startswith("#")] == ["data:,"]
    assert [target for target in inside if target not in page.ids] == []
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= page.ids.keys()
    assert len(html) < 1_500_000


@pytest.mark.parametrize("missing", ["crossover", "phases", "memory_plan", "costs", "steps"])
def test_a_table_may_be_missing(missing: str, tmp_path: Path) -> None:
    output = small_job(tmp_path)
    for file in (output / "telemetry" / missing).iterdir():
        file.unlink()
    page = Page(render_report(str(output)))
    assert page.sections == SECTIONS
    said = {
        "crossover": "never compared exclusive with mixed batching",
        "phases": "No phase switch has been recorded",
        "memory_plan": "No memory plan has been recorded",
        "costs": "No step has a prediction",
        "steps": "no step has been recorded",
    }
    assert said[missing] in page.text


def test_a_job_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    page = Page(render_report(str(write_record(tmp_path / "out"))))
    assert page.sections == SECTIONS
    assert page.tags["svg"] == 0
    assert "No row has a result yet" in page.text


def test_results_without_text_have_no_lengths(tmp_path: Path) -> None:
    rows = [{"status": "error", "finish_reason": None, "error_type": "null_prompt"}]
    page = Page(render_report(str(write_results(tmp_path, rows))))
    assert "No committed row has text yet" in page.text
    assert "1 error" in page.text


def test_the_mode_that_never_changed_is_named(tmp_path: Path) -> None:
    output = write_results(tmp_path, [{"completion_tokens": 3}])
    write_table(output, "steps", "run-1", [step(1, 0.0, 1.0)])
    write_table(output, "crossover", "run-1", [look(1, 0.0)])
    page = Page(render_report(str(output)))
    assert "No mode switch: 1 look at the crossover, and the mode stayed mixed." in page.text


def test_a_file_of_an_older_version_may_lack_columns(tmp_path: Path) -> None:
    output = write_results(tmp_path, [{"completion_tokens": 3}])
    place = output / "telemetry" / "steps" / "run-0-00001.parquet"
    place.parent.mkdir(parents=True)
    columns = {**step(1, 0.0, 2.0), "run_id": "run-0"}
    del columns["policy_mode"], columns["schedule_s"]
    values = ", ".join(f"{value!r} AS {name}" for name, value in columns.items())
    duckdb.sql(f"COPY (SELECT {values}) TO '{place}'")
    with telemetry(output) as job:
        assert (job.total_s, job.modes()) == (2.0, [(0.0, 2.0, "")])
    assert Page(render_report(str(output))).sections == SECTIONS


def test_a_long_job_has_a_short_page(tmp_path: Path) -> None:
    output = write_results(tmp_path, [{"completion_tokens": n} for n in range(1, 30)])
    columns = {**step(0, 0.0, 0.001), "run_id": "run-1"}
    columns |= {"step": "range", "started_s": "range * 0.001", "num_finished": "range % 2"}
    columns |= {"elapsed_s": "0.0005 + 0.0004 * random()", "policy_mode": "'mixed'"}
    columns |= {"phase": "if(range % 7 = 0, 'prefill', 'decode')", "reason": "''"}
    columns |= {"run_id": "'run-1'", "num_prefill_tokens": "if(range % 7 = 0, 100, 0)"}
    values = ", ".join(f"{value} AS {name}" for name, value in columns.items())
    place = output / "telemetry" / "steps" / "run-1-00001.parquet"
    place.parent.mkdir(parents=True)
    duckdb.sql(f"COPY (SELECT {values} FROM range(200000)) TO '{place}'")
    looks = [look(n, n / 20, contention=1e-5 * (n % 9)) for n in range(4000)]
    write_table(output, "crossover", "run-1", [*looks, switch(4001, 199.9, "a", "b", "late")])
    fits = [prices(100 * n, n / 10, "online") for n in range(2000)]
    write_table(output, "costs", "run-1", fits)
    html = render_report(str(output))
    assert len(html) < 1_500_000
    assert "200.0 s" in html or "3 min 20 s" in html
    assert 'id="throughput-mark-1"' in html


def test_a_remote_output_has_a_report(tmp_path: Path) -> None:
    output = small_job(tmp_path)
    remote = fsspec.filesystem("memory")
    remote.put(str(output), "/report-job", recursive=True)
    try:
        assert render_report("memory://report-job") == render_report(str(output))
    finally:
        remote.rm("/report-job", recursive=True)


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out.strip(), err.strip()


def test_the_command_writes_the_page_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = small_job(tmp_path)
    assert run(capsys, "report", output) == (0, f"{output}/report.html", "")
    page = (output / "report.html").read_text()
    elsewhere = tmp_path / "page.html"
    assert run(capsys, "report", output, "--to", elsewhere) == (0, str(elsewhere), "")
    assert elsewhere.read_text() == page


@pytest.mark.parametrize(
    ("args", "said"),
    [(["nowhere"], "holds no job"), (["out", "--to", "no/page.html"], "cannot be written")],
)
def test_mistakes_are_one_line(
    args: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "out")
    code, out, err = run(capsys, "report", *args)
    assert (code, out) == (2, "")
    assert said in err and len(err.splitlines()) == 1


def test_a_figure_keeps_its_ids_to_itself() -> None:
    svg: Any = inlined(
        '<?xml version="1.0"?><!DOCTYPE svg PUBLIC "x" "http://x"><svg xmlns="http://x" '
        'width="9pt" viewBox="0 0 9 9"><style>*{}</style><g id="a"><g id="b"><use '
        'xlink:href="#p9f"/></g><path id="p9f"/><path clip-path="url(#p9f)"/>'
        '<a xlink:href="#switch-1" target="_blank"/></g></svg>',
        "fig",
        '"label"',
        {"a": "<b>"},
    )
    assert svg == (
        '<svg role="img" aria-label="&quot;label&quot;" viewBox="0 0 9 9"><g id="fig-a">'
        '<title>&lt;b&gt;</title><g><use xlink:href="#fig-0"/></g><path id="fig-0"/>'
        '<path clip-path="url(#fig-0)"/><a xlink:href="#switch-1"/></g></svg>'
    )


def test_the_spec_may_lack_everything(tmp_path: Path) -> None:
    assert SPEC["model"] == "org/model"
    page = Page(render_report(str(write_record(tmp_path / "out", {}))))
    assert page.sections == SECTIONS
