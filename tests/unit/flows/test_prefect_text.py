"""What a job says in the Prefect UI."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flows import prefect_text as text
from flows.shard_run import ShardRun
from flows.summary import JobSummary
from storage.shards import Shard, Span

RUN = ShardRun(
    index=7, num_rows=1000, est_tokens=250_000, prompt_tokens=200_000, completion_tokens=51_322,
    workers=("worker-0",), queued_s=0.4, run_s=12.3,
)  # fmt: skip
SUMMARY = JobSummary(
    total_rows=10, by_status={"ok": 9, "error": 1}, by_finish_reason={"stop": 9}, prompt_tokens=70,
    completion_tokens=40, elapsed_s=2.0, tokens_per_s=20.0, output="out/x", complete=True,
)  # fmt: skip

ENCODED = replace(RUN, prompt_tokens=20_322, completion_tokens=None, num_partitions=12)
"""A superbatch."""


def shard(index: int) -> Shard:
    return Shard(index, (Span(0, 0, 0, 1000, 0),), 250_000)


def test_task_run_of_one_shard_is_named_before_and_after() -> None:
    assert text.begun_label([shard(7)]) == "shard-00007 (1,000 rows, about 250,000 tokens)"
    assert text.done_label([RUN]) == "shard-00007 (1,000 rows, 251,322 tokens, worker-0, 12.3 s)"
    assert text.done_message([RUN]) == (
        "1,000 rows, 200,000 prompt and 51,322 completion tokens on worker-0; "
        "waited 0.4 s, ran 12.3 s"
    )


def test_task_run_of_several_shards_says_so() -> None:
    shards = [shard(7), shard(8)]
    assert text.begun_label(shards) == (
        "shards 00007-00008 (2 shards, 2,000 rows, about 500,000 tokens)"
    )
    later = replace(RUN, index=8, workers=("worker-1",), queued_s=10.0, run_s=5.0)
    assert text.done_label([RUN, later]) == (
        "shards 00007-00008 (2 shards, 2,000 rows, 502,644 tokens, worker-0, worker-1, 14.6 s)"
    )


def test_a_superbatch_has_partitions_and_no_completions() -> None:
    assert text.done_label([ENCODED]) == (
        "shard-00007 (1,000 rows of 12 partitions, 20,322 tokens, worker-0, 12.3 s)"
    )
    assert text.done_message([ENCODED]) == (
        "1,000 rows of 12 partitions, 20,322 text tokens on worker-0; waited 0.4 s, ran 12.3 s"
    )
    single = replace(ENCODED, index=8, num_partitions=1)
    assert text.done_message([ENCODED, single]) == (
        "2 shards, 2,000 rows of 13 partitions, 40,644 text tokens on worker-0; "
        "waited 0.4 s, ran 12.3 s"
    )
    unpartitioned = replace(ENCODED, num_partitions=None)
    assert text.done_message([unpartitioned]).startswith("1,000 rows, 20,322 text tokens on")
    assert text.shard_table([ENCODED]) == [
        {
            "shard": "shard-00007", "rows": 1000, "partitions": 12, "text tokens": 20_322,
            "worker": "worker-0", "waited, s": 0.4, "ran, s": 12.3,
        }
    ]  # fmt: skip
    assert text.shard_table([unpartitioned])[0].keys().isdisjoint({"partitions", "prompt tokens"})


def test_events_tell_what_a_shard_has() -> None:
    generated, encoded = text.event_payload(RUN), text.event_payload(ENCODED)
    assert generated.keys() ^ encoded.keys() == {"completion_tokens", "num_partitions"}
    assert (generated["completion_tokens"], encoded["num_partitions"]) == (51_322, 12)
    summary = replace(SUMMARY, rows_per_s=12.34567, completion_tokens=0)
    assert text.job_payload(SUMMARY)["completion_tokens"] == 40
    assert "completion_tokens" not in text.job_payload(summary)
    assert text.job_payload(summary)["rows_per_s"] == 12.346


def test_page_of_an_encoding_job_is_about_superbatches() -> None:
    page = text.summary_page(replace(SUMMARY, rows_per_s=5.0), "10 ok", "It pays.")
    assert page.endswith("## Superbatches\n\nIt pays.")
    assert "completion" not in page and "Prefill" not in page
    assert "| text tokens | 70 |" in page


def test_shards_that_do_not_follow_each_other_are_no_range() -> None:
    label = text.begun_label([shard(9), shard(2), shard(4)])
    assert label.startswith("shards 00002 to 00009 (3 shards, 3,000 rows")


def test_shards_together_reach_from_the_first_start_to_the_last_end() -> None:
    other = replace(RUN, queued_s=0.1, run_s=1.0)
    whole = text.together([RUN, other])
    assert (whole.queued_s, whole.run_s) == (0.1, pytest.approx(12.6))


@pytest.mark.parametrize(
    ("given", "key"),
    [("Nightly Reviews!", "nightly-reviews"), ("s3://B_u/x=1", "s3-b-u-x-1"), ("---", "")],
)
def test_slug(given: str, key: str) -> None:
    assert text.slug(given) == key


@pytest.mark.parametrize("output", ["out/reviews", "s3://bucket/Reviews 2026/", "out/\u00e4", "/"])
def test_key_of_an_output_is_what_prefect_takes(output: str) -> None:
    assert re.fullmatch(r"[a-z0-9-]+", text.output_key(output))
    assert text.output_key(output) != text.output_key(f"{output}x")


def test_table_has_a_row_a_shard_up_to_a_thousand() -> None:
    assert text.shard_table([RUN]) == [
        {
            "shard": "shard-00007", "rows": 1000, "prompt tokens": 200_000,
            "completion tokens": 51_322, "worker": "worker-0", "waited, s": 0.4, "ran, s": 12.3,
        }
    ]  # fmt: skip
    many = [replace(RUN, index=index) for index in range(1500)]
    assert len(text.shard_table(many)) == 1000
    assert text.table_description(many).startswith("1,500 shards of this run, the first 1,000")


def test_page_shows_counts_and_decisions_and_no_markup_of_its_own_making() -> None:
    page = text.summary_page(
        replace(SUMMARY, output="out/a_b|c"), "9 ok, 1 error of 10 rows", "mixed <b> *why*"
    )
    assert page.startswith("# 9 ok, 1 error of 10 rows\n")
    assert "| rows | 10 of 10 |" in page
    assert r"out/a\_b\|c" in page
    assert page.endswith(r"mixed \<b\> \*why\*")
    assert "## Prefill" not in text.summary_page(SUMMARY, "why", None)


def test_links_are_urls() -> None:
    assert text.link_to("s3://bucket/out") == "s3://bucket/out"
    assert text.link_to("/tmp/out put") == "file:///tmp/out%20put"


@pytest.mark.parametrize(
    ("model", "name"),
    [("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("/models/tiny/", "tiny"), ("./a.gguf", "a.gguf")],
)
def test_a_model_in_a_word(model: str, name: str) -> None:
    assert text.model_name(model) == name
