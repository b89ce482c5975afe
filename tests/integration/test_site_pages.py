"""Every page can be read by everybody: contrast, headings, texts for pictures, small screens, weight.

Axe looks for what the Web Content Accessibility Guidelines 2.1 ask for at level AA, in a real browser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Request

from tests.control.observe.browser import browsers, needs_chromium
from tests.integration.built_site import opened, pages_of

PHONE_PX = 360
HEAVIEST_NBYTES = 1_600_000  # as Lighthouse counts: what takes a slow phone ten seconds
GUIDELINES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"]}
LOOKED_AT = [
    "index",
    "install",
    "cli",
    "performance",
    "tutorials/surviving_failures",
    "howto/call_actors",
    "explanation/store",
    "reference/errors",
    "reference/skipper.control.rpc",
    "repository/examples/index",
]
"""One page of each kind: text, code, tables, pictures, generated ones."""


WRITTEN_BY_RUNS = "repository/benchmarks/results/"
"""Pages of figures, whose pictures have their names."""


class Outline(HTMLParser):
    """What a page says about itself, without a browser."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.language: str | None = None
        self.described = False
        self.tags: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if tag == "html":
            self.language = given.get("lang")
        elif tag == "img":
            self.pictures.append(given)
        elif tag == "meta" and given.get("name") == "viewport":
            self.described = True


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsers()


def test_every_page_has_a_language_one_headline_and_a_main_part(site: Path) -> None:
    pages = pages_of(site)
    assert len(pages) > 100
    for page in pages:
        outline = Outline(site / page)
        assert outline.language == "en", page
        assert outline.described, page
        assert outline.tags.count("h1") == 1, page
        assert outline.tags.count("main") == 1, page
        assert "nav" in outline.tags, page


def test_every_picture_says_what_it_shows(site: Path) -> None:
    silent = [
        f"{page}: {picture.get('src')}"
        for page in pages_of(site)
        if not page.startswith(WRITTEN_BY_RUNS)
        for picture in Outline(site / page).pictures
        if len((picture.get("alt") or "").split()) < 3
    ]
    assert silent == []


@needs_chromium
def test_no_page_is_wider_than_a_phone(browser: Browser, site: Path) -> None:
    wide: dict[str, int] = {}
    with opened(browser, site / "index.html", width=PHONE_PX) as phone:
        for page in pages_of(site):
            phone.goto((site / page).as_uri(), wait_until="domcontentloaded")
            width = int(phone.evaluate("document.documentElement.scrollWidth"))
            if width > PHONE_PX:
                wide[page] = width
    assert wide == {}


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_page_keeps_the_guidelines(name: str, scheme: str, browser: Browser, site: Path) -> None:
    with opened(browser, site / f"{name}.html", scheme=scheme) as page:
        assert (
            page.locator("body").get_attribute("data-md-color-scheme") == {"light": "default", "dark": "slate"}[scheme]
        )
        results = Axe().run(page, options=GUIDELINES)
    assert results.violations_count == 0, results.generate_report()


@needs_chromium
def test_axe_finds_what_is_wrong(browser: Browser, site: Path) -> None:
    with opened(browser, site / "index.html") as page:
        page.evaluate("document.querySelector('.md-content p').style.color = '#bbb'")
        page.evaluate("document.querySelector('.md-content img').removeAttribute('alt')")
        found = {each["id"] for each in Axe().run(page, options=GUIDELINES).response["violations"]}
    assert {"color-contrast", "image-alt"} <= found


@needs_chromium
@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_page_is_light(name: str, browser: Browser, site: Path) -> None:
    fetched: set[Path] = set()

    def note(request: Request) -> None:
        path = Path(unquote(urlsplit(request.url).path))
        if path.is_relative_to(site):  # the page of missing pages asks for an icon at the root of a server, late
            fetched.add(path)

    with opened(browser, site / "404.html") as page:
        page.on("request", note)
        page.goto((site / f"{name}.html").as_uri())
    read = {path.name: path.stat().st_size for path in fetched if not re.search("search", path.name)}
    assert any(each.endswith(".css") for each in read)
    assert sum(read.values()) <= HEAVIEST_NBYTES, read
