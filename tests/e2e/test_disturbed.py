"""A job of two workers on S3 and Prefect that is disturbed in every way; `disturb.py` does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.disturb import KINDS, disturb
from tests.services.prefect_server import PrefectServer
from tests.services.seaweed import SeaweedServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.long
def test_every_row_is_there_once_whatever_is_killed(
    s3_server: SeaweedServer, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """Each kind once, with short outages; twenty rounds of half a minute are run by hand."""
    hits = disturb(s3_server, prefect_server, tmp_path, rounds=len(KINDS), outage_s=6.0)
    assert sum(hits.values()) >= len(KINDS) - 1
