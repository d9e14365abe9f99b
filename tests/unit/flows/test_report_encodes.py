"""`flows report` and its neighbours of jobs that encode: what the superbatches were, and no word of
what an encoder does not have.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from flows.errors import SpecError
from flows.job_profile import read_profile
from flows.profile_tables import headline, titled_tables
from flows.recording import read_recording
from flows.report import render_report
from flows.report_data import Telemetry
from flows.report_encodes import EncodeFacts, encode_facts
from flows.report_tables import superbatch_sentence, superbatch_table
from flows.status import status_lines
from schedulers.sizes import SizeStats
from storage.ledger import JOB
from storage.objects import ObjectStore
from storage.record import JobRecord
from storage.status import read_status
from storage.views import open_views
from tests.report_encode_jobs import (
    SIZES,
    TOKENS,
    EncodeJob,
    encode_step,
    write_encoded,
)
from tests.report_jobs import shifted_job, write_table
from tests.unit.flows.test_report import HOSTILE, Page

SECTIONS = ["headline", "throughput", "superbatches", "lengths", "tail", "rows", "profile"]
JOB_S = 8 * 0.05 + sum(SIZES) * 0.001


@contextmanager
def opened(output: Path) -> Generator[tuple[EncodeFacts, Telemetry]]:
    store = ObjectStore(str(output))
    record = JobRecord.from_bytes(store.read(JOB), JOB)
    con = open_views(store)
    try:
        telemetry = Telemetry(con)
        facts = encode_facts(record, store, telemetry)
        assert facts is not None
        yield facts, telemetry
    finally:
        con.close()


def facts_of(output: Path) -> EncodeFacts:
    with opened(output) as (facts, _):
        return facts


def sentence_of(output: Path) -> str:
    return superbatch_sentence(facts_of(output))


def test_sections_are_those_that_an_encoder_has(tmp_path: Path) -> None:
    page = Page(render_report(str(write_encoded(tmp_path, EncodeJob()))))
    assert page.sections == SECTIONS
    assert page.tags["svg"] == 4
    nonsense = "crossover|completion|decode|prefill|KV|policy|prompt|hybrid|memory|hazard"
    assert re.findall(nonsense, page.text, re.IGNORECASE) == []
    assert "org/encoder" in page.text and "embed" in page.text and "552 ok" in page.text
    assert "20.0 tokens in the mean, the longest 20; 6 were cut" in page.text


def test_the_facts_are_the_plans_and_the_machines(tmp_path: Path) -> None:
    facts = facts_of(write_encoded(tmp_path, EncodeJob()))
    assert (facts.num_shards, facts.num_calls, facts.num_slices) == (6, 8, 3)
    assert (facts.min_texts, facts.max_texts) == (40, 120)
    assert facts.stats == SizeStats.of(SIZES)
    assert facts.fit is not None and facts.fit.is_identified
    assert facts.fit.call_s == pytest.approx(0.05)
    assert facts.fit.cost.text_s == pytest.approx(0.001)
    advice = facts.advice
    assert advice is not None and advice.pays
    calls_s, texts_s = 11 * 0.05, sum(SIZES) * 0.001
    assert advice.phi == pytest.approx(calls_s / (calls_s + texts_s))
    assert advice.speed_up == pytest.approx((calls_s + texts_s) / JOB_S)


def test_the_sentence_says_whether_it_paid(tmp_path: Path) -> None:
    gathered = "11 partitions in 6 superbatches, 8 encode calls; coefficient of variation of the"
    said = sentence_of(write_encoded(tmp_path / "dear", EncodeJob()))
    assert said.startswith(f"{gathered} sizes (CV) 1.66. By what this job's calls cost, phi is 49")
    assert "speed-up against a call for each partition 1.16. Superbatching pays:" in said
    said = sentence_of(write_encoded(tmp_path / "cheap", EncodeJob(call_s=0.0001)))
    assert said.startswith(gathered)
    assert "phi is 0.2%" in said and "Superbatching does not pay:" in said


def test_what_the_calls_do_not_tell_is_not_claimed(tmp_path: Path) -> None:
    few = write_encoded(tmp_path / "few", EncodeJob(num_done=2))
    assert "is not known, as 2 calls are too few" in sentence_of(few)
    assert facts_of(few).advice is None
    page = Page(render_report(str(few)))
    assert "2 calls are too few" in page.text and "not complete" in page.text
    none = write_encoded(tmp_path / "none", EncodeJob(num_done=0))
    assert "No encode call has been recorded" in sentence_of(none)
    page = Page(render_report(str(none)))
    assert page.sections == SECTIONS
    assert page.tags["svg"] == 0


def test_the_table_adds_the_calls_up(tmp_path: Path) -> None:
    with opened(write_encoded(tmp_path, EncodeJob())) as (facts, telemetry):
        rows = superbatch_table(facts, telemetry).rows
    named = {row[0]: row[1] for row in rows if row[0]}
    assert named == {
        "encode calls": "8", "slices": "3", "model's batches": "8", "texts of a call": "69.0",
        "partitions of a call": "1.6", "texts of a partition": "50.2",
        "texts/s": f"{sum(SIZES) / JOB_S:,.1f}", "c": "50 ms", "t": "1 ms",
        "error of the fit": "0.0%",
    }  # fmt: skip
    assert [row[1] for row in rows if not row[0]] == ["100", "3", "300"]


def test_the_thresholds_are_shown(tmp_path: Path) -> None:
    page = render_report(str(write_encoded(tmp_path, EncodeJob())))
    assert "lower threshold, 40<" in page and "upper threshold, 120<" in page


def test_without_partitions_there_is_no_advice(tmp_path: Path) -> None:
    output = write_encoded(tmp_path, EncodeJob(partitioned=False))
    facts = facts_of(output)
    assert (facts.num_calls, facts.num_slices, facts.stats, facts.advice) == (5, 5, None, None)
    assert sentence_of(output) == "No partitions: 1 shard in 5 encode calls of at most 120 texts."
    page = Page(render_report(str(output)))
    assert page.sections == SECTIONS
    assert "partitions of a call" not in page.text


def test_calls_are_placed_on_the_axis_of_all_runs(tmp_path: Path) -> None:
    output = write_encoded(tmp_path, EncodeJob())
    again = {"started_s": 7000.0, "elapsed_s": 1.0, "interval_s": 1.0, "shard": 5, "num_texts": 8}
    write_table(output, "encodes", "run-2", [{**again, "num_tokens": 160, "num_partitions": 1}])
    with opened(output) as (_, telemetry):
        assert [run.number for run in telemetry.runs] == [1, 2]
        calls = telemetry.encode_calls()
        assert calls["at_s"][:2] == pytest.approx([0.0, 0.05 + 0.047])
        assert calls["at_s"][-1] == pytest.approx(JOB_S)
        assert telemetry.total_s == pytest.approx(JOB_S + 1.0)
        bins = telemetry.bins()
        width_s = telemetry.total_s / len(bins["at_s"])
        assert bins["seqs"].sum() * width_s == pytest.approx(sum(SIZES))
    assert Page(render_report(str(output))).sections == SECTIONS


def test_a_remote_output_has_the_same_report(tmp_path: Path) -> None:
    output = write_encoded(tmp_path, EncodeJob())
    remote = fsspec.filesystem("memory")
    remote.put(str(output), "/report-encoded", recursive=True)
    try:
        assert render_report("memory://report-encoded") == render_report(str(output))
    finally:
        remote.rm("/report-encoded", recursive=True)


def test_a_long_job_has_a_short_page(tmp_path: Path) -> None:
    output = write_encoded(tmp_path, EncodeJob())
    many = [
        {"started_s": 9000.0 + n, "elapsed_s": 0.9, "interval_s": 1.0 + n % 7, "shard": 0,
         "num_texts": 1 + n % 90, "num_tokens": 900, "num_partitions": 3}
        for n in range(9000)
    ]  # fmt: skip
    write_table(output, "encodes", "run-2", many)
    assert len(render_report(str(output))) < 1_500_000


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    output = write_encoded(tmp_path, EncodeJob())
    record = JobRecord.from_bytes((output / JOB).read_bytes(), JOB)
    spec = {**record.spec, "model": HOSTILE, "task": HOSTILE, "partition_by": [HOSTILE]}
    (output / JOB).write_bytes(replace(record, spec=spec).to_bytes())
    page = Page(render_report(str(output)))
    assert page.tags["script"] == 0
    assert page.text.count(HOSTILE) >= 3


# -- beside the report --


def test_the_profile_names_the_encoder_and_hides_what_means_nothing(tmp_path: Path) -> None:
    found = read_profile(str(write_encoded(tmp_path, EncodeJob())))
    assert found.encodes
    assert found.steps.parts["encoder_s"] == pytest.approx(JOB_S)
    assert found.steps.parts["backend_s"] == 0
    assert found.steps.overhead_s == pytest.approx(0.0, abs=1e-9)
    assert headline(found) == f"1 run, 8 batches, {sum(SIZES) * TOKENS:,} text tokens, 0.95 s"
    tables = {title: table for title, table, _ in titled_tables(found)}
    assert list(tables) == ["Where the time went"]
    rows = {row[0]: row[1] for row in tables["Where the time went"].rows}
    assert {name for name, seconds in rows.items() if float(seconds)} == {
        "encoder", "batches together", "all",
    }  # fmt: skip


def test_a_profile_of_generating_steps_has_no_encoder(tmp_path: Path) -> None:
    output = shifted_job(tmp_path)
    write_table(output, "steps", "run-2", [encode_step(1, 0.0, 1.0, 8)])
    timed = read_profile(str(output))
    assert timed.encodes and timed.num_untimed == 1800


def test_the_status_tells_text_tokens(tmp_path: Path) -> None:
    lines = dict(status_lines(read_status(str(write_encoded(tmp_path, EncodeJob(num_done=1))))))
    assert lines["text tokens"] == f"{47 * TOKENS}"
    assert "prompt tokens" not in lines and "completion tokens" not in lines


def test_simulating_it_is_refused_in_one_line(tmp_path: Path) -> None:
    output = write_encoded(tmp_path, EncodeJob())
    with pytest.raises(SpecError) as told:
        read_recording(str(output))
    said = str(told.value)
    assert str(output) in said and "task embed" in said and "--synthetic" in said
    assert "\n" not in said
