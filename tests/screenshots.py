"""Pictures of what a test sees in a terminal and in a browser, for the documentation: small PNG files."""

import io
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, Locator, Page
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")

_COLOURS = 48
_TERMINAL = """<body style="margin: 0"><pre style="display: inline-block; margin: 0; padding: 12px 16px;
font: 14px/1.35 'DejaVu Sans Mono', monospace; color: {foreground}; background: {background}">{code}</pre></body>"""


class Screenshots:
    """Writes pictures to a folder; a context manager.

    Attributes:
        made: the names of the files.
    """

    def __init__(self, folder: Path, browser: Browser) -> None:
        self.made: set[str] = set()
        self._folder = folder
        self._page = browser.new_page(viewport={"width": 1400, "height": 1000})

    def __enter__(self) -> "Screenshots":
        return self

    def __exit__(self, *error: object) -> None:
        self._page.close()

    def terminal(self, name: str, text: str, columns: int) -> None:
        """What stands in a terminal.

        Args:
            name: of the file, without its suffix.
            text: with the sequences for colours.
            columns: of the terminal.
        """
        console = Console(record=True, file=io.StringIO(), width=columns)
        console.print(Text.from_ansi(text.rstrip()))
        self._page.set_content(console.export_html(theme=MONOKAI, inline_styles=True, code_format=_TERMINAL))
        self._write(name, self._page.locator("pre").screenshot())

    def page(self, name: str, page: Page, part: Locator | None = None) -> None:
        """What is to be seen of a page, or a part of it, light and dark: two files."""
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            self._write(f"{name}-{scheme}", (part or page).screenshot(animations="disabled"))
        page.emulate_media(color_scheme="null")

    def _write(self, name: str, png: bytes) -> None:
        file = f"{name}.png"
        with Image.open(io.BytesIO(png)) as image:
            few = image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
        few.save(self._folder / file, optimize=True)
        self.made.add(file)
