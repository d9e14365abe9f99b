"""The product as a team runs it: deployed to a Prefect server on PostgreSQL, started through its
API as the UI does, run by a Prefect worker on two workers from `s3://` to `s3://`, and looked at in
a browser.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow.parquet as pq
import pytest
import yaml

from flows.deployments.form import PLACES
from flows.spec_model import EngineSpec, JobSpec, PromptSpec, SamplingSpec
from tests.e2e.conftest import SAMPLE
from tests.e2e.jobs import read_results
from tests.services.browser import browser, has_browser, whole_page
from tests.services.prefect_server import ROOT, PrefectServer
from tests.services.processes import wait_until
from tests.services.seaweed import SeaweedServer, client

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

POOL = "nights"
ZONE = "Pacific/Kiritimati"
"""14 hours ahead: mostly another day than UTC's."""
NUM_ROWS = 8
PROMPT = "Say in five words what this is for: {{ description }}"


@dataclass(frozen=True)
class Deployed:
    """A server with both deployments, and the bucket of the nightly job's data."""

    server: PrefectServer
    s3: SeaweedServer
    bucket: str
    folder: Path

    def url_of(self, run: dict[str, Any]) -> str:
        """The output of a night."""
        at = datetime.fromisoformat(run["expected_start_time"]).astimezone(ZoneInfo(ZONE))
        return f"s3://{self.bucket}/out-{at.date()}"

    def output_of(self, run: dict[str, Any]) -> Path:
        """A copy of a night's output."""
        copy = self.folder / str(run["id"])
        if not copy.exists():
            with client(self.s3.endpoint) as fs:
                fs.get(f"{self.url_of(run)}/", f"{copy}/", recursive=True)
        return copy


def command(server: PrefectServer, *args: str) -> subprocess.CompletedProcess[str]:
    """A `flows` or `prefect` command against the server."""
    module = {"flows": "flows.cli", "prefect": "prefect"}[args[0]]
    return subprocess.run(
        [sys.executable, "-m", module, *args[1:]],
        cwd=ROOT, env=server.env(), capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def deployed(
    prefect_server: PrefectServer,
    s3_process: SeaweedServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployed]:
    """Both deployments, registered by `flows deploy`, and a Prefect worker."""
    folder = tmp_path_factory.mktemp("nightly")
    s3_process.start()
    bucket = s3_process.new_bucket()
    pq.write_table(pq.read_table(SAMPLE).slice(0, NUM_ROWS), folder / "in.parquet")
    now = datetime.now(UTC).astimezone(ZoneInfo(ZONE))
    with client(s3_process.endpoint) as fs:
        for day in {now.date(), (now + timedelta(hours=1)).date()}:
            fs.put_file(str(folder / "in.parquet"), f"{bucket}/in-{day}.parquet")
    job = {
        "input": f"s3://{bucket}/in-{{{{ date }}}}.parquet",
        "output": f"s3://{bucket}/out-{{{{ date }}}}",
        "prompt": PROMPT,
        "id_column": "package",
        "shard_tokens": 400,
        "sampling": {"max_tokens": 8},
        "engine": {"memory": "3GiB", "workers": 2},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    done = command(
        prefect_server, "flows", "deploy", "--job", str(folder / "job.yaml"), "--work-pool", POOL,
        "--cron", "30 1 * * *", "--timezone", ZONE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"work pool {POOL}: made, for processes",
        f"headrace/adhoc: registered in work pool {POOL}",
        f"headrace/nightly: registered in work pool {POOL}",
        f"schedule of nightly: 30 1 * * * ({ZONE})",
        f"run them with: prefect worker start --pool {POOL}",
    ]
    with prefect_server.worker(POOL, **s3_process.environment()):
        yield Deployed(prefect_server, s3_process, bucket, folder)


@pytest.fixture(scope="module")
def night(deployed: Deployed) -> dict[str, Any]:
    """A run of nightly with the embedded model, started as the UI's Run button does."""
    run_id = deployed.server.trigger("headrace/nightly", {})
    return deployed.server.wait_for(
        run_id, "COMPLETED", "FAILED", "CRASHED", "CANCELLED", patience_s=200
    )


# -- what is registered --


def test_deployments_are_registered(deployed: Deployed) -> None:
    adhoc = deployed.server.deployment("headrace/adhoc")
    assert adhoc["entrypoint"] == "flows.deployments.adhoc.adhoc"
    assert adhoc["schedules"] == []
    assert (adhoc["path"], adhoc["pull_steps"]) == (None, [])
    nightly = deployed.server.deployment("headrace/nightly")
    assert nightly["entrypoint"] == "flows.deployments.nightly.nightly"
    assert nightly["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    assert nightly["global_concurrency_limit"]["limit"] == 1
    (schedule,) = nightly["schedules"]
    assert schedule["active"]
    assert (schedule["schedule"]["cron"], schedule["schedule"]["timezone"]) == ("30 1 * * *", ZONE)
    assert nightly["parameters"]["prompt"] == {"template": PROMPT}


def test_deploying_again_changes_what_is_there(deployed: Deployed) -> None:
    before = deployed.server.deployment("headrace/nightly")
    done = command(
        deployed.server, "flows", "deploy", "--job", str(deployed.folder / "job.yaml"),
        "--work-pool", POOL, "--cron", "45 1 * * *", "--timezone", ZONE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "made, for processes" not in done.stdout
    after = deployed.server.deployment("headrace/nightly")
    assert after["id"] == before["id"]
    (schedule,) = after["schedules"]
    assert schedule["schedule"]["cron"] == "45 1 * * *"


def test_serving_what_is_in_a_work_pool_is_refused(deployed: Deployed) -> None:
    done = command(deployed.server, "flows", "serve")
    assert done.returncode == 2
    assert f"error: headrace/adhoc is registered in work pool '{POOL}'" in done.stderr
    assert "prefect deployment delete headrace/adhoc" in done.stderr


def test_prefect_deploy_reads_prefect_yaml(prefect_server: PrefectServer) -> None:
    made = command(
        prefect_server, "prefect", "work-pool", "create", "headrace", "--type", "process"
    )
    assert made.returncode == 0, made.stdout + made.stderr
    before = prefect_server.deployment("headrace/nightly")
    try:
        done = command(
            prefect_server, "prefect", "--no-prompt", "deploy", "--all", "--prefect-file",
            "infra/prefect.yaml",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        nightly = prefect_server.deployment("headrace/nightly")
        assert nightly["parameters"]["input"] == "s3://reviews/{{ (yesterday) }}/"
        assert nightly["parameters"]["prompt"] == {
            "template": "Summarise in one sentence: {{ (text) }}"
        }
        assert nightly["parameter_openapi_schema"] == before["parameter_openapi_schema"]
        assert nightly["work_pool_name"] == "headrace"
        assert nightly["pull_steps"] in ([], None)
    finally:
        restored = {
            key: before[key] for key in ("parameters", "work_pool_name", "entrypoint", "tags")
        }
        restored["schedules"] = [
            {key: item[key] for key in ("schedule", "active", "slug")}
            for item in before["schedules"]
        ]
        answer = prefect_server.api.patch(f"/deployments/{before['id']}", json=restored)
        assert answer.is_success, answer.text
        adhoc = prefect_server.deployment("headrace/adhoc")
        prefect_server.api.patch(f"/deployments/{adhoc['id']}", json={"work_pool_name": POOL})


def test_automations_are_taken_by_the_server(prefect_server: PrefectServer) -> None:
    files = sorted((ROOT / "infra" / "automations").glob("*.yaml"))
    assert len(files) == 2
    for file in files:
        done = command(prefect_server, "prefect", "automation", "create", "--from-file", str(file))
        assert done.returncode == 0, done.stdout + done.stderr
    found = {item["name"]: item for item in prefect_server.post("/automations/filter")}
    zombies = found["headrace-crash-zombies"]
    assert zombies["trigger"]["within"] == 540
    assert zombies["actions"][0]["state"] == "CRASHED"
    assert found["headrace-error-rate"]["trigger"]["expect"] == ["headrace.job.error-rate-exceeded"]
    for item in found.values():
        prefect_server.api.delete(f"/automations/{item['id']}").raise_for_status()


# -- what a night leaves --


def test_night_is_complete_and_says_its_counts(deployed: Deployed, night: dict[str, Any]) -> None:
    message = f"{NUM_ROWS} ok of {NUM_ROWS} rows"
    assert (night["state_type"], night["state"]["message"]) == ("COMPLETED", message)
    day = deployed.url_of(night).partition("/out-")[2]
    assert night["name"] == f"nightly {day}"
    assert {"headrace", "model:smollm2", "task:generate"} <= set(night["tags"])
    assert f"out-{day}" in deployed.server.logs(night["id"])


def test_rows_are_those_of_the_day_in_order(deployed: Deployed, night: dict[str, Any]) -> None:
    rows = read_results(deployed.output_of(night))
    packages = pq.read_table(SAMPLE)["package"].slice(0, NUM_ROWS).to_pylist()
    assert [row["row_id"] for row in rows] == packages
    assert all(row["status"] == "ok" and row["text"] for row in rows)


def test_task_runs_say_rows_tokens_worker_and_time(
    deployed: Deployed, night: dict[str, Any]
) -> None:
    output = deployed.output_of(night)
    files = sorted((output / "results").glob("*.parquet"))
    assert len(files) > 1
    tasks = deployed.server.task_runs(night["id"], len(files))
    for index, (task, file) in enumerate(zip(tasks, files, strict=True)):
        table = pq.read_table(file, columns=["prompt_tokens", "completion_tokens"])
        tokens = sum(sum(column.to_pylist()) for column in table.columns)
        rows = f"{table.num_rows} row{'s' if table.num_rows > 1 else ''}"
        name = rf"shard-{index:05d} \({rows}, {tokens:,} tokens, (worker-[01](?:, )?)+, [\d.]+ s\)"
        assert re.fullmatch(name, task["name"]), task["name"]
        message = rf"{rows}, .* completion tokens on (worker-[01](?:, )?)+; waited .* s, ran .* s"
        assert re.fullmatch(message, task["state"]["message"]), task["state"]


def test_artifacts_show_the_job(deployed: Deployed, night: dict[str, Any]) -> None:
    shown = deployed.server.artifacts(night["id"])
    assert {item["key"] for item in shown.values()} == {
        f"headrace-nightly-{name}" for name in ("progress", "shards", "summary", "report", "output")
    }
    assert shown["progress"]["data"] == 100.0
    rows = json.loads(shown["shards"]["data"])
    assert sum(row["rows"] for row in rows) == NUM_ROWS
    page = shown["summary"]["data"]
    assert page.startswith(f"# {NUM_ROWS} ok of {NUM_ROWS} rows")
    assert "## Prefill and decode: apart or together" in page
    assert (deployed.output_of(night) / "report.html").exists()
    url = deployed.url_of(night)
    assert shown["report"]["data"] == f"[report of the job]({url}/report.html)"
    assert shown["output"]["data"] == f"[{url}]({url})"


def test_events_tell_of_shards_and_the_job(deployed: Deployed, night: dict[str, Any]) -> None:
    record = json.loads((deployed.output_of(night) / "job.json").read_text())
    resource = f"headrace.job.{record['job_id']}"
    server = deployed.server
    wait_until(
        lambda: bool(server.events("headrace.job.done", resource=resource)), 30, "no event came"
    )
    (done,) = server.events("headrace.job.done", resource=resource)
    assert done["payload"]["by_status"] == {"ok": NUM_ROWS}
    assert f"prefect.flow-run.{night['id']}" in {
        item["prefect.resource.id"] for item in done["related"]
    }
    shards = server.events("headrace.shard.done", resource=f"{resource}.shard.")
    indices = sorted(event["payload"]["index"] for event in shards)
    assert indices == list(range(len(record["shards"])))
    assert server.events("headrace.job.error-rate-exceeded", resource=resource) == []


def test_adhoc_over_its_error_rate_fails_and_says_so(
    deployed: Deployed, tiny_model: Path, tmp_path: Path
) -> None:
    import pyarrow as pa

    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["fine", "", " ", "good"]}), source)
    parameters = {
        "input": str(source), "output": str(tmp_path / "out"), "model": str(tiny_model),
        "prompt": {"column": "text"}, "sampling": {"max_tokens": 4},
        "engine": {"memory": "1GiB"}, "limit": None, "id_column": None,
    }  # fmt: skip
    run_id = deployed.server.trigger("headrace/adhoc", parameters)
    run = deployed.server.wait_for(run_id, "COMPLETED", "FAILED", "CRASHED")
    assert run["state_type"] == "FAILED"
    assert run["state"]["message"] == (
        "2 ok, 2 error of 4 rows (error rate 50.0%, at most 5.0% is allowed)"
    )
    resource = f"headrace.job.{json.loads((tmp_path / 'out/job.json').read_text())['job_id']}"
    wait_until(
        lambda: bool(
            deployed.server.events("headrace.job.error-rate-exceeded", resource=resource)
        ),
        30, "no event came",
    )  # fmt: skip


def test_a_mistake_in_the_form_is_one_line_in_the_state(deployed: Deployed) -> None:
    run_id = deployed.server.trigger("headrace/adhoc", {"input": "/in", "output": "/out"})
    run = deployed.server.wait_for(run_id, "COMPLETED", "FAILED", "CRASHED")
    assert run["state_type"] == "FAILED"
    assert "a job needs a prompt; give one of prompt" in run["state"]["message"]


def test_the_server_refuses_what_is_out_of_bounds(deployed: Deployed) -> None:
    path = f"/deployments/{deployed.server.deployment('headrace/adhoc')['id']}/create_flow_run"
    answer = deployed.server.api.post(
        path, json={"parameters": {"input": "/in", "output": "/out", "max_error_rate": 2}}
    )
    assert answer.status_code == 409
    assert "max_error_rate" in answer.text


# -- what people see --


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures of pages go: a folder of pytest's, or `HEADRACE_PICTURES`."""
    chosen = os.environ.get("HEADRACE_PICTURES")
    folder = Path(chosen) if chosen else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not has_browser():
        pytest.skip("chromium and chromium-driver are not installed")
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def expected_labels() -> list[str]:
    """The labels of the form, from top to bottom."""
    groups = {"prompt": PromptSpec, "sampling": SamplingSpec, "engine": EngineSpec}
    labels: list[str] = []
    for name in JobSpec.model_fields:
        labels.append(name if name in PLACES else f"{name} (Optional)")
        if name in groups:
            inner = groups[name].model_fields.values()
            labels += [f"{info.title} (Optional)" for info in inner]
    return [*labels, "gpu_slots (Optional)"]


def texts(page: Any, selector: str) -> list[str]:
    """What elements of a page say, from top to bottom."""
    return [item.text for item in page.find_elements("css selector", selector) if item.text]


def whole_text(page: Any) -> str:
    """All that a page says; nothing before it is drawn."""
    return "\n".join(texts(page, "body"))


def draw_form(deployed: Deployed, page: Any, ui: str) -> dict[str, Any]:
    """Open the form of adhoc; returns its deployment."""
    adhoc = deployed.server.deployment("headrace/adhoc")
    page.get(f"{deployed.server.ui_url}{ui}/deployments/deployment/{adhoc['id']}/run")
    last = expected_labels()[-1]
    wait_until(lambda: last in texts(page, "label"), 30, "no form", lambda: whole_text(page))
    return adhoc


@pytest.mark.parametrize("ui", ["/v2", ""], ids=["v2", "v1"])
def test_the_form_shows_every_field_described_in_order(
    deployed: Deployed, page: Any, pictures: Path, ui: str
) -> None:
    """In Prefect's user interface of today, and in the one before, which it still serves."""
    adhoc = draw_form(deployed, page, ui)
    time.sleep(1.0)
    whole_page(page, pictures / f"form-{ui.strip('/') or 'v1'}.png")
    wanted = expected_labels()
    shown = texts(page, "label")
    assert [label for label in shown if label in wanted] == wanted
    text = whole_text(page)
    described = adhoc["parameter_openapi_schema"]["properties"].values()
    assert [item["description"] for item in described if item["description"] not in text] == []
    assert "None" not in text, "a choice of null"


def test_choices_are_offered(deployed: Deployed, page: Any, pictures: Path) -> None:
    draw_form(deployed, page, "/v2")
    label = next(
        item
        for item in page.find_elements("css selector", "label")
        if item.text == "Policy (Optional)"
    )
    chooser = page.find_element("id", label.get_attribute("for"))
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chooser)
    page.execute_script("arguments[0].click()", chooser)
    wait_until(
        lambda: {"hybrid", "exclusive", "mixed"} <= set(texts(page, "[role=option]")),
        10, "no choices", lambda: whole_text(page),
    )  # fmt: skip
    page.save_screenshot(str(pictures / "choices.png"))


def test_the_run_page_shows_the_night(
    deployed: Deployed, night: dict[str, Any], page: Any, pictures: Path
) -> None:
    page.set_window_size(1400, 1200)
    page.get(f"{deployed.server.ui_url}/v2/runs/flow-run/{night['id']}")

    def shows(*words: str) -> bool:
        return all(word in whole_text(page) for word in words)

    wait_until(
        lambda: shows(night["name"], "Completed", f"{NUM_ROWS} ok of {NUM_ROWS} rows"),
        30, "the run is not shown", lambda: whole_text(page),
    )  # fmt: skip
    for tab, words in (("Task Runs", ["shard-00000 ("]), ("Artifacts", ["headrace-nightly-"])):
        found = [
            item for item in page.find_elements("css selector", "[role=tab]") if item.text == tab
        ]
        assert found, texts(page, "[role=tab]")
        found[0].click()
        wait_until(
            lambda words=words: shows(*words), 20, f"{tab} shows no {words}",
            lambda: whole_text(page),
        )  # fmt: skip
        page.save_screenshot(str(pictures / f"run-{tab.lower().replace(' ', '-')}.png"))
