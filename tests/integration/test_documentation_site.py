"""The documentation as a site: it builds without a warning, and the API reference lacks no public name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.control.observe.browser import launch_options, needs_chromium

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("control", "dataplane", "torchstore", "tensor_engine")
PATIENCE_MS = 30_000
FETCHED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?P<src>[^"]*)"|<link\b[^>]*\bhref="(?P<href>[^"]*)"')


def public_names() -> dict[str, list[str]]:
    """What each package says is public, read without an import."""
    found: dict[str, list[str]] = {}
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("__init__.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and [getattr(each, "id", "") for each in node.targets] == ["__all__"]:
                    found[".".join(("skipper", *path.parent.relative_to(ROOT).parts))] = ast.literal_eval(node.value)
    return found


def test_the_reference_has_every_public_name(site: Path) -> None:
    names = public_names()
    assert {"skipper.control.rpc", *(f"skipper.{floor}" for floor in FLOORS)} <= names.keys()
    for package, public in names.items():
        page = (site / "reference" / f"{package}.html").read_text()
        missing = [name for name in public if f'id="{package}.{name}"' not in page]
        assert missing == [], package


def test_the_reference_says_what_a_name_is(site: Path) -> None:
    page = (site / "reference" / "skipper.control.html").read_text()
    described = page.partition('id="skipper.control.endpoint"')[2].partition(
        'id="skipper.control.concurrent_endpoint"'
    )[0]
    assert "Mark a method" in described  # the decorator, not the module of that name
    assert (
        'href="#skipper.control.Port"' in described
    )  # a name in a docstring, or in a signature, leads to what it means


@pytest.mark.parametrize(
    ("page", "target"),
    [
        ("skipper.torchstore", "#skipper.torchstore.shutdown"),  # `shutdown`, of which control has one, too
        ("skipper.dataplane", "#skipper.dataplane.configure"),  # likewise
        ("skipper.control.rpc", "skipper.control.html#skipper.control.idempotent"),  # `control.idempotent`
    ],
)
def test_a_name_in_a_docstring_means_that_of_its_room(page: str, target: str, site: Path) -> None:
    described = (site / "reference" / f"{page}.html").read_text()
    links = re.findall(r'<a class="autorefs[^>]*\bhref="([^"]*)"', described.replace("\n", " "))
    assert target in links


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        fetched = [found["src"] or found["href"] or "" for found in FETCHED.finditer(page.read_text())]
        assert fetched
        assert [url for url in fetched if "//" in url] == [], page
        files = [site / url[1:] if url.startswith("/") else page.parent / url for url in fetched if url]
        assert [file for file in files if not file.exists()] == [], page


@needs_chromium
def test_the_site_can_be_searched_without_a_server_or_a_network(site: Path) -> None:
    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**launch_options())
        page = browser.new_context(offline=True).new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith("file:") else faults.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.fill("input.md-search__input", "BufferDroppedError")
        page.wait_for_selector("a.md-search-result__link", state="attached", timeout=PATIENCE_MS)
        found = [link.get_attribute("href") or "" for link in page.query_selector_all("a.md-search-result__link")]
        browser.close()
    assert any("skipper.dataplane.html" in link for link in found)
    assert faults == []


def test_the_fault_table_names_tests_that_there_are() -> None:
    named = re.findall(r"`([\w/]+/test_\w+\.py)(?:::(\w+))?`", (ROOT / "docs" / "reference" / "faults.md").read_text())
    assert len(named) > 40
    missing = []
    for path, test in named:
        file = ROOT / "tests" / path
        if not file.exists() or (test and f"def {test}(" not in file.read_text()):
            missing.append(f"{path}::{test}")
    assert missing == []
