"""Reading what is served to Prometheus, as strictly as its format is."""

import re

SAMPLE = re.compile(r'(?P<name>[a-z_]+)\{(?P<labels>(?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (?P<value>[0-9.e+-]+)')
FAMILY = re.compile(r"# (?:HELP|TYPE) (?P<name>[a-z_]+) .+")


def parse(text: str) -> dict[str, dict[str, float]]:
    """Metric → labels → value; fails on what is not the text format or stands under another metric's heading."""
    samples: dict[str, dict[str, float]] = {}
    heading, seen = "", set()
    for line in text.splitlines():
        family = FAMILY.fullmatch(line)
        if family:
            if family["name"] != heading:
                assert family["name"] not in seen, "lines of one metric belong together"
                heading = family["name"]
                seen.add(heading)
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample is not None, line
        assert sample["name"].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") == heading
        values = samples.setdefault(sample["name"], {})
        assert sample["labels"] not in values
        values[sample["labels"]] = float(sample["value"])
    return samples
