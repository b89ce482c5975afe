"""What the documentation says of the peers is what was measured last."""

import re
from pathlib import Path

import pytest

from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.peers.page import renewed, summary

REPOSITORY = Path(__file__).parents[3]
DOCUMENT = REPOSITORY / "docs" / "performance.md"

PAGE = """# Side by side with the peers

## How Skipper stands

| row | Skipper |
|---|---|
| get of them in place | 3 µs |
| a call | 3 µs |
| get of them in place | 4 µs |

## Actors

| row |
|---|

![a.png](a.png)

![x_read.png](x_read.png)
"""


def test_the_documentation_has_the_summary_of_the_newest_results() -> None:
    page = max((REPOSITORY / "benchmarks" / "results").glob("*.md"))  # names begin with the date
    assert renewed(DOCUMENT, page) == DOCUMENT.read_text(encoding="utf-8")


def test_a_summary_is_the_table_and_the_pictures(tmp_path: Path) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    for folder in (results, docs):
        folder.mkdir()
    (results / "2026-02-01_x.md").write_text(PAGE, encoding="utf-8")
    assert summary(results / "2026-02-01_x.md", docs).splitlines() == [
        "The last run: [2026-02-01_x](../results/2026-02-01_x.md).",
        "",
        "| row | Skipper |",
        "|---|---|",
        '| <a id="row-get_state_dict"></a>get of them in place | 3 µs |',
        "| a call | 3 µs |",
        '| <a id="row-get_batch"></a>get of them in place | 4 µs |',
        "",
        "![a.png](../results/a.png)",
        "",
        "![One-sided reads of each library over their size, in GB/s](../results/x_read.png)",
    ]


def test_every_figure_of_the_readme_is_that_of_the_row_that_it_links_to() -> None:
    readme, document = (REPOSITORY / "README.md").read_text(encoding="utf-8"), DOCUMENT.read_text(encoding="utf-8")
    link = r"\[[^\]]+\]\(docs/performance\.md#(row-\w+)\)"
    claims = re.findall(rf"^\| {link} \| ([^|]+) \| ([^|]+) \| ([\d.]+) \|$", readme, re.MULTILINE)
    assert len(claims) == 5
    for anchor, ours, other, times in claims:
        (row,) = re.findall(
            rf'^\| <a id="{anchor}"></a>[^|]+ \| ([^|]+) \| ([^|]+) \| ([\d.]+) \(', document, re.MULTILINE
        )
        assert row == (ours, other, times)


def test_what_is_no_page_and_what_has_no_place_is_told(tmp_path: Path) -> None:
    other = tmp_path / "other.md"
    other.write_text("# Something else\n", encoding="utf-8")
    with pytest.raises(BenchmarkError, match="how Skipper stands"):
        summary(other, tmp_path)
    with pytest.raises(BenchmarkError, match="no place"):
        renewed(other, other)
