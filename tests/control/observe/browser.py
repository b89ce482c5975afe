"""A real headless browser for the tests of the dashboard: Debian's chromium, steered by playwright."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = shutil.which("chromium")
PATIENCE_MS = 20_000

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (tests/debian-packages.txt)")


def launch_options() -> dict[str, Any]:
    """For playwright's ``chromium.launch``."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it does not let root have one
    return {"executable_path": CHROMIUM, "args": sandbox}


def browsers() -> Iterator[Browser]:
    """One browser; it ends with the iteration."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**launch_options())
        try:
            yield browser
        finally:
            browser.close()
