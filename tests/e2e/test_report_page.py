"""The report's page in a browser: it renders without a complaint, and shows something."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from flows.report import write_report
from tests.report_encode_jobs import EncodeJob, write_encoded
from tests.report_jobs import shifted_job

pytestmark = pytest.mark.e2e

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WIDTH, HEIGHT = 1200, 4600
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--hide-scrollbars", "--enable-logging=stderr", f"--window-size={WIDTH},{HEIGHT}",
)  # fmt: skip
CONSOLE = ":CONSOLE"
"""Marks what a page says on its console, in Chromium's log."""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The report of a job with two mode switches."""
    return Path(write_report(str(shifted_job(tmp_path / "job"))))


def browse(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Open a page in a browser of its own, which ends when the page is loaded."""
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    profile = page.parent / "profile"
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, page.resolve().as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_browser_complains_about_a_page_that_is_broken(tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text('<!DOCTYPE html><img src="none.png"><script>nothing()</script>')
    assert CONSOLE in browse(broken, "--dump-dom").stderr


def test_the_page_is_without_errors_and_marks_each_switch(page: Path) -> None:
    done = browse(page, "--dump-dom")
    assert [line for line in done.stderr.splitlines() if CONSOLE in line] == []
    for number in (1, 2):
        for figure in ("throughput", "crossover", "tail"):
            assert f'<g id="{figure}-mark-{number}">' in done.stdout
        assert f'<tr id="switch-{number}">' in done.stdout
    assert "mark-3" not in done.stdout


def test_the_page_of_an_encoding_job_is_without_errors(tmp_path: Path) -> None:
    page = Path(write_report(str(write_encoded(tmp_path / "job", EncodeJob()))))
    done = browse(page, "--dump-dom")
    assert [line for line in done.stderr.splitlines() if CONSOLE in line] == []
    figures = ("Texts and tokens encoded over time", "Texts of encode calls over time, and seconds")
    for label in figures:
        assert f'aria-label="{label}' in done.stdout
    assert 'id="superbatches"' in done.stdout
    assert 'id="crossover"' not in done.stdout


def test_the_page_is_not_blank(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(page, f"--screenshot={picture}")
    assert picture.stat().st_size > 100_000
    with Image.open(picture) as image:
        assert image.size == (WIDTH, HEIGHT)
        strips = [image.crop((0, top, WIDTH, top + 460)) for top in range(0, HEIGHT, 460)]
        colours = [len(strip.convert("RGB").getcolors(maxcolors=2**24) or ()) for strip in strips]
    assert min(colours[:8]) > 20, colours
    assert max(colours) > 500, colours
