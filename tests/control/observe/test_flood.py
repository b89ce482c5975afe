"""More output than anybody can read: the script's terminal stays a terminal, and each line is accounted for."""

from skipper.control.observe.log_lines import BURST_S
from skipper.control.observe.logs import LogOptions
from tests.control.observe.flood import flood


def test_each_line_of_a_flood_is_shown_folded_or_counted() -> None:
    report = flood(actors=64, processes=4, lines=100, seconds=5.0)  # whole: python -m tests.control.observe.flood
    assert report.printed >= 64 * 100 * 4
    assert report.is_accounted_for, report
    assert report.folded > 0
    assert 0 < report.told <= report.dropped
    most = LogOptions().max_total_lines_per_s
    assert report.shown <= most * (BURST_S + report.seconds + 1)
    assert report.beats == report.beats_printed > 0
    assert report.script_mib[0] - report.script_mib[1] < 48, report
