"""A headless Chromium for tests of pages, driven over WebDriver; Debian's chromium-driver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webdriver import WebDriver

WIDTH = 1400


def has_browser() -> bool:
    """Whether Chromium and its driver are installed."""
    return None not in (shutil.which("chromium"), shutil.which("chromedriver"))


@contextmanager
def browser(profile: Path, *, height: int = 1000) -> Iterator[WebDriver]:
    """A browser while the block runs."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--force-device-scale-factor=1", f"--window-size={WIDTH},{height}",
        f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        yield driver
    finally:
        driver.quit()


def whole_page(driver: WebDriver, picture: Path) -> None:
    """A picture of all of the page, as tall as it is."""
    height = driver.execute_script(
        "return Math.max(...[...document.querySelectorAll('*')].map(e => e.scrollHeight))"
    )
    driver.set_window_size(WIDTH, min(int(height) + 200, 12_000))
    driver.save_screenshot(str(picture))
