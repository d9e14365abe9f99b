"""A Prefect server for tests, on PostgreSQL, that can be killed and started again in its place."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.services.processes import Server, free_port, wait_until

ROOT = Path(__file__).parents[2]
QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}


class PrefectServer:
    """A server of our own, and its API as the UI uses it.

    Args:
        folder: for its settings and log.
        database_url: of SQLAlchemy, with asyncpg.
    """

    def __init__(self, folder: Path, database_url: str) -> None:
        self._folder = folder
        port = free_port()
        self.ui_url = f"http://127.0.0.1:{port}"
        self.api_url = f"{self.ui_url}/api"
        self.api = httpx.Client(base_url=self.api_url, timeout=30.0)
        self._server = Server(
            "prefect server",
            [
                sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1",
                "--port", str(port),
            ],
            log=folder / "prefect-server.log",
            env={
                **_clean(os.environ), **QUIET,
                "PREFECT_HOME": str(folder / "server-home"),
                "PREFECT_SERVER_DATABASE_CONNECTION_URL": database_url,
                "PREFECT_SERVER_UI_API_URL": self.api_url,
                "PREFECT_API_URL": self.api_url,
                "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            },
            is_ready=self._is_healthy,
            cwd=folder,
        )  # fmt: skip

    def start(self) -> None:
        """Start it, on the same port and data as before, and wait until it answers."""
        self._server.start()

    def kill(self) -> None:
        """End it at once, as a machine that fails would."""
        self._server.kill()

    def stop(self) -> None:
        """Tell it to end."""
        self._server.stop()
        self.api.close()

    def log(self) -> str:
        """The end of what it said."""
        return self._server.tail()

    def _is_healthy(self) -> bool:
        try:
            return self.api.get("/health").is_success
        except httpx.HTTPError:
            return False

    # -- what its users need --

    def env(self, **more: str) -> dict[str, str]:
        """The environment of a client: commands, Prefect workers, flow runs."""
        return {
            **_clean(os.environ), **QUIET,
            "PREFECT_HOME": str(self._folder / "client-home"),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",
            "PREFECT_CLI_COLORS": "false",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
            **more,
        }  # fmt: skip

    @contextmanager
    def worker(self, pool: str, **env: str) -> Iterator[Server]:
        """A Prefect worker that runs flow runs of a pool as processes."""
        command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process"]
        yield from self._running("prefect worker", [*command, "--pool", pool], env)

    @contextmanager
    def serving(self, *args: str, **env: str) -> Iterator[Server]:
        """`flows serve`."""
        command = [sys.executable, "-m", "flows.cli", "serve", *args]
        yield from self._running("flows serve", command, env)

    def _running(self, name: str, command: list[str], env: Mapping[str, str]) -> Iterator[Server]:
        folder = self._folder / f"{name.replace(' ', '-')}-{time.monotonic_ns()}"
        folder.mkdir()
        server = Server(name, command, log=folder / "log", env=self.env(**env), cwd=folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()

    # -- its API --

    def get(self, path: str) -> Any:
        """What a GET returns."""
        return self.api.get(path).raise_for_status().json()

    def post(self, path: str, **body: Any) -> Any:
        """What a POST returns; waits for a server that is coming back."""
        answer = self.api.post(path, json=body)
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def deployment(self, name: str) -> dict[str, Any]:
        """A deployment by `flow/name`."""
        return self.get(f"/deployments/name/{name}")

    def trigger(self, name: str, parameters: Mapping[str, Any], **more: Any) -> str:
        """Start a deployment with parameters, with the request that the UI sends; the run's id."""
        path = f"/deployments/{self.deployment(name)['id']}/create_flow_run"
        state = {"type": "SCHEDULED", "message": "Run from the Prefect UI with defaults"}
        return self.post(path, parameters=dict(parameters), state=state, **more)["id"]

    def cancel(self, run_id: str) -> None:
        """Cancel a run, with the request that the UI sends."""
        state = {"type": "CANCELLING", "name": "Cancelling", "message": "Cancelled from the UI"}
        answer = self.post(f"/flow_runs/{run_id}/set_state", state=state)
        assert answer["status"] == "ACCEPT", answer

    def run(self, run_id: str) -> dict[str, Any]:
        """A flow run."""
        return self.get(f"/flow_runs/{run_id}")

    def run_of(self, output: str) -> dict[str, Any]:
        """The last run of the flow `infer` over an output."""
        runs = self.post("/flow_runs/filter", sort="START_TIME_DESC", limit=50)
        return next(
            run for run in runs if run["parameters"].get("spec", {}).get("output") == output
        )

    def state(self, run_id: str) -> str:
        """The type of a run's state: RUNNING, COMPLETED and so on."""
        return str(self.run(run_id)["state_type"])

    def wait_for(self, run_id: str, *types: str, patience_s: float = 120.0) -> dict[str, Any]:
        """A flow run, once its state is one of these."""
        wait_until(
            lambda: self.state(run_id) in types,
            patience_s,
            f"the run is not {' or '.join(types)}",
            lambda: f"{self.run(run_id)['state']}\n{self.logs(run_id)}",
        )
        return self.run(run_id)

    def logs(self, run_id: str) -> str:
        """A run's log."""
        found = self.post(
            "/logs/filter", logs={"flow_run_id": {"any_": [run_id]}}, limit=200,
            sort="TIMESTAMP_ASC",
        )  # fmt: skip
        return "\n".join(line["message"] for line in found)

    def artifacts(self, run_id: str) -> dict[str, dict[str, Any]]:
        """A run's artifacts, by the last word of their keys."""
        found = self.post("/artifacts/filter", artifacts={"flow_run_id": {"any_": [run_id]}})
        return {item["key"].rpartition("-")[2]: item for item in found}

    def task_runs(self, run_id: str, expected: int) -> list[dict[str, Any]]:
        """A run's task runs by name, once as many are final: the server learns of them later."""
        found: list[dict[str, Any]] = []

        def all_final() -> bool:
            found[:] = self.post(
                "/task_runs/filter", flow_runs={"id": {"any_": [run_id]}}, limit=200
            )
            final = [item for item in found if item["end_time"] is not None]
            return len(found) == len(final) == expected

        wait_until(
            all_final, 60.0, f"not {expected} final task runs",
            lambda: str([(item["name"], item["state_name"]) for item in found]),
        )  # fmt: skip
        return sorted(found, key=lambda item: item["name"])

    def events(self, *names: str, resource: str) -> list[dict[str, Any]]:
        """Events of these names, of resources whose id begins so; the first 50."""
        wanted = {"event": {"name": list(names)}, "resource": {"id_prefix": [resource]}}
        return self.post("/events/filter", filter={**wanted, "order": "ASC"}, limit=50)["events"]


@contextmanager
def prefect_server(folder: Path, database_url: str) -> Iterator[PrefectServer]:
    """A server while the block runs."""
    server = PrefectServer(folder, database_url)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _clean(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without settings of another Prefect."""
    return {name: value for name, value in env.items() if not name.startswith("PREFECT_")}
