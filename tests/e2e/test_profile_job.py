"""A short real job with the default model says where its time went, and so does its output."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import duckdb
import pytest

from flows.job_profile import PARTS, read_profile
from storage.objects import ObjectStore
from storage.views import open_views
from tests.e2e.conftest import SAMPLE
from tests.e2e.test_cli_job import PROMPT, Shell, flows
from workers.errors import ModelError
from workers.loading.files import resolve_model

pytestmark = [pytest.mark.alone, pytest.mark.e2e]
__all__ = ["flows"]
FILLED = set(PARTS) - {"device_s", "encoder_s"}
"""Of an engine on a CPU."""


@pytest.fixture(scope="module")
def default_model() -> None:
    try:
        resolve_model("smollm2")
    except ModelError as missing:
        pytest.skip(str(missing))


@pytest.mark.usefixtures("default_model")
def test_the_profile_of_a_real_job(flows: Shell, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = (
        SAMPLE, "--prompt", PROMPT, "--limit", 5, "--max-tokens", 6, "--ignore-eos",
        "--memory", "2GiB", "--output", output, "--local", "--profile",
    )  # fmt: skip
    assert flows("run", *job) == 0
    printed = flows.out[flows.out.index("Profile:") :]
    assert flows("profile", output) == 0
    assert flows.out == printed

    found = read_profile(str(output))
    assert {name for name, seconds in found.steps.parts.items() if seconds > 0} >= FILLED
    assert found.of_kind("prefill").num_steps + found.of_kind("mixed").num_steps >= 1
    assert found.of_kind("decode").num_steps >= 1
    assert min(found.line.values()) > 0
    assert set(found.line) == {
        "imports", "opening the job", "loading the model", "engine and first rows", "finishing",
    }  # fmt: skip
    assert {(work.thread, work.work) for work in found.threads} == {
        ("feeder", "reading"), ("feeder", "templating"), ("feeder", "tokenising"),
        ("outlet", "detokenising"), ("collector", "writing results"),
        ("collector", "telemetry"), ("collector", "catalogue"), ("process", "all threads"),
    }  # fmt: skip
    check_sums(output)

    assert flows("run", *job) == 0
    assert "no profile: this run computed no step" in flows.out


def check_sums(output: Path) -> None:
    """The engine's parts are its time to the nanosecond; the model's and the draw are all but a
    tenth of a call, or a millisecond, of the backend's time.
    """
    with closing(open_views(ObjectStore(str(output)))) as con:
        steps = con.execute(
            "SELECT schedule_s - (plan_s + apply_s + resume_s + account_s), elapsed_s, elapsed_s - "
            "(layout_s + products_s + attention_s + rows_s + head_s + sampling_s + device_s) "
            "FROM steps"
        ).fetchall()
    assert len(steps) >= 6
    for around_s, _, rest_s in steps:
        assert abs(around_s) < 1e-9
        assert rest_s > -1e-6
    assert sum(rest_s for *_, rest_s in steps) <= sum(0.1 * s + 1e-3 for _, s, _ in steps)
    with duckdb.connect(str(output / "job.duckdb"), read_only=True) as con:
        assert con.sql("SELECT count(*) > 0 FROM threads").fetchall() == [(True,)]
