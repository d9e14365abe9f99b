"""For all tests: no model hub, no analytics, and `gpu` tests only where there is a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.services.seaweed import SeaweedServer

# Set before anything imports huggingface_hub, tokenizers or prefect, which read them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ.pop("PREFECT_API_URL", None)

# How long an example takes says something of the machine, and nothing of the code.
hypothesis.settings.register_profile(
    "headrace", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("headrace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; torch is asked only if some test needs one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


@pytest.fixture(scope="session")
def s3_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """An S3 server for all tests of a session; take `s3_server`."""
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def s3_server(s3_process: SeaweedServer) -> SeaweedServer:
    """The session's S3 server, running, whatever the test before did to it."""
    s3_process.start()
    return s3_process


@pytest.fixture
def s3_bucket(s3_server: SeaweedServer) -> Iterator[str]:
    """A fresh bucket on it."""
    name = s3_server.new_bucket()
    yield name
    s3_server.start()
    s3_server.delete_bucket(name)


@pytest.fixture
def s3_environment(s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> SeaweedServer:
    """The AWS chain of this process finds the server."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server
