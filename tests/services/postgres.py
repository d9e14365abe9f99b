"""A PostgreSQL server for tests, from Debian's package: its own data, a free port, no password.

PostgreSQL refuses to run as root, so there it runs as user `postgres`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services.processes import Server, free_port

USER = "postgres"


def postgres_bin() -> Path | None:
    """Where its programs are; None when it is not installed."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name)
    )
    return found[-1] if found else None


@contextmanager
def postgres(log: Path) -> Iterator[str]:
    """A server with a database `prefect`; yields its URL for SQLAlchemy with asyncpg."""
    programs = postgres_bin()
    assert programs is not None, "install the package postgresql"
    # Not below pytest's folders, which another user cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
    data, port = folder / "data", free_port()
    if os.geteuid() == 0:
        account = pwd.getpwnam(USER)
        os.chown(folder, account.pw_uid, account.pw_gid)
    _as_user(
        programs / "initdb", "-D", data, "-U", USER, "-A", "trust", "--no-sync", "-E", "UTF8",
        "--locale", "C",
    )  # fmt: skip
    command = [
        programs / "postgres", "-D", data, "-p", port, "-c", "listen_addresses=127.0.0.1", "-c",
        f"unix_socket_directories={folder}", "-c", "fsync=off", "-c", "max_connections=200",
    ]  # fmt: skip
    server = Server(
        "postgres", _user_command(*command), log=log, env=os.environ,
        is_ready=lambda: _accepts(programs, port), cwd=folder,
    )  # fmt: skip
    server.start()
    try:
        _as_user(programs / "createdb", "-h", "127.0.0.1", "-p", port, "-U", USER, "prefect")
        yield f"postgresql+asyncpg://{USER}@127.0.0.1:{port}/prefect"
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _user_command(*command: object) -> list[str]:
    words = [str(word) for word in command]
    return ["runuser", "-u", USER, "--", *words] if os.geteuid() == 0 else words


def _as_user(*command: object) -> None:
    done = subprocess.run(
        _user_command(*command), capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"


def _accepts(programs: Path, port: int) -> bool:
    """Its port is open a little before it lets anybody in."""
    asked = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    return subprocess.run(asked, check=False).returncode == 0
