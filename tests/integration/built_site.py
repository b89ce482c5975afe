"""The documentation as a site, built once for all tests of a run that look at it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.integration.example_process import ROOT


def build(folder: Path) -> None:
    """Build the site into a folder. In strict mode a dead link or anchor, a page in no menu, or a docstring with
    parameters that its function does not have, ends the build."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    if done.returncode != 0 or "WARNING" in done.stderr:
        pytest.fail(done.stderr)


def pages_of(site: Path) -> list[str]:
    """Every page that a reader can come to, by its path in the site."""
    found = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html"))
    return [page for page in found if page != "404.html"]


@contextmanager
def opened(browser: Browser, page: Path, *, scheme: str = "light", width: int = 1280) -> Iterator[Page]:
    """A page in a browser that has no network."""
    context = browser.new_context(
        offline=True,
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": width, "height": 740},
        reduced_motion="reduce",
    )
    try:
        shown = context.new_page()
        shown.goto(page.as_uri())
        yield shown
    finally:
        context.close()
