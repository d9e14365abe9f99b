"""For the tests of storage: many small outputs, none of which has to survive a power cut."""

from __future__ import annotations

import os

import pytest

from storage.durable import FolderSync


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(FolderSync, "sync", lambda _: None)
