"""Services of infra/compose.yaml without containers: the same words, keys and checks, with folders
and ports of this machine in place of volumes and names.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.services.processes import free_ports
from tests.unit.infra.files import BIN, compose, example_environment

START_S = 90.0
"""Patience with a service that starts."""

STOP_S = 5.0
"""Patience with one that is told to end, before it is killed."""

PARTS = ("master", "volume", "filer", "s3")
"""Of the S3 server; each listens on two ports."""


@contextmanager
def running(
    command: list[str], *, log: Path, url: str, env: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """A process, from when its URL answers until the block is left."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
    try:
        _wait_for(process, url, log)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    tail = log.read_text(errors="replace")[-2000:]
    raise AssertionError(f"{url} does not answer (status {process.poll()}):\n{tail}")


# -- S3 --


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedS3:
    """A running S3 server.

    Attributes:
        endpoint: its URL.
        masters: addresses of its master and filer, as `weed shell` takes them.
        bucket: the bucket that its keys reach; `make_bucket` makes it.
    """

    endpoint: str
    masters: tuple[str, str]
    key: str
    secret: str
    bucket: str
    pid: int

    def environment(self) -> dict[str, str]:
        """Variables that bring a client here."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def make_bucket(self) -> int:
        """Run the service `s3-bucket`; its exit status."""
        service = compose()["services"]["s3-bucket"]
        master, filer = self.masters
        (script,) = service["command"]
        script = script.replace("seaweedfs:9333", master).replace("seaweedfs:8888", filer)
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [*service["entrypoint"], script],
            env={**os.environ, "PATH": path},
            check=False,
            timeout=60,
        )
        return done.returncode


@contextmanager
def composed_s3(folder: Path) -> Generator[ComposedS3]:
    """The service `seaweedfs`, with its data in a folder."""
    service, identities = compose()["services"]["seaweedfs"], folder / "s3.json"
    identities.write_text(compose()["configs"]["s3-identities"]["content"])
    (folder / "data").mkdir()
    options = [f"{part}.port{kind}" for part in PARTS for kind in ("", ".grpc")]
    ports = dict(zip(options, free_ports(len(options)), strict=True))
    words = [word for word in service["command"] if not word.startswith("-ip")]
    # The last of two equal options holds, as with the image's own.
    here = [
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.config={identities}",
        *(f"-{option}={port}" for option, port in ports.items()),
    ]
    health = health_url(service, ports["s3.port"])
    with running([str(BIN / "weed"), *words, *here], log=folder / "weed.log", url=health) as weed:
        example = example_environment()
        yield ComposedS3(
            endpoint=f"http://127.0.0.1:{ports['s3.port']}",
            masters=(
                f"127.0.0.1:{ports['master.port']}.{ports['master.port.grpc']}",
                f"127.0.0.1:{ports['filer.port']}.{ports['filer.port.grpc']}",
            ),
            key=example["S3_ACCESS_KEY"],
            secret=example["S3_SECRET_KEY"],
            bucket=example["S3_BUCKET"],
            pid=weed.pid,
        )


def health_url(service: Mapping[str, Any], port: int) -> str:
    """What the service's health check asks, at another port."""
    (url,) = re.findall(r"http://[^\s\"']+", " ".join(service["healthcheck"]["test"]))
    return re.sub(r":\d+/", f":{port}/", url)


# -- Prefect --


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedPrefect:
    """A running Prefect server."""

    api_url: str
    log: Path
    pid: int

    def calls(self) -> dict[str, int]:
        """Requests to the API so far, by method and kind of path, but for health checks."""
        found: dict[str, int] = {}
        text = self.log.read_text(errors="replace")
        for method, path in re.findall(r'"(GET|POST|PATCH|PUT|DELETE) /api(/\S*) HTTP', text):
            kind = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", path.partition("?")[0])
            if kind != "/health":
                found[f"{method} {kind}"] = found.get(f"{method} {kind}", 0) + 1
        return found


@contextmanager
def composed_prefect(folder: Path, database_url: str | None = None) -> Generator[ComposedPrefect]:
    """The service `prefect-server`; on SQLite unless it is given a database."""
    service = compose()["services"]["prefect-server"]
    (port,) = free_ports(1)
    command: list[str] = service["command"]
    start = command[1 : command.index("--host")]
    words = [*start, "--host", "127.0.0.1", "--port", str(port)]
    env = {
        **{name: str(value) for name, value in service["environment"].items()},
        "PREFECT_HOME": str(folder / "prefect-home"),
        "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_LOGGING_LEVEL": "INFO",  # one line a request
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database_url
        or f"sqlite+aiosqlite:///{folder / 'prefect.db'}",
    }
    log, health = folder / "prefect-server.log", health_url(service, port)
    with running([str(BIN / "prefect"), *words], log=log, url=health, env=env) as server:
        yield ComposedPrefect(api_url=f"http://127.0.0.1:{port}/api", log=log, pid=server.pid)
