"""Opens the dashboard of a job as a browser does, with all that its page refers to, and prints the files' names."""

import json
import re
from urllib.parse import urljoin
from urllib.request import urlopen

from skipper.control import this_host
from skipper.control.observe import serve_dashboard

REFERENCE = re.compile(r"""(?:src=|href=|from )"(?:\./)?([\w.]+)\"""")


def opened(url: str) -> str:
    with urlopen(url, timeout=20) as answer:
        return str(answer.read(), "utf-8")


this_host().spawn_procs({"gpus": 2}, name="workers").initialized.get(timeout=60)
with serve_dashboard() as dashboard:
    seen: set[str] = set()
    waiting = [opened(dashboard.url)]
    while waiting:
        for name in set(REFERENCE.findall(waiting.pop())) - seen:
            seen.add(name)
            waiting.append(opened(urljoin(dashboard.url, name)))
    data = json.loads(opened(urljoin(dashboard.url, "data.json")))
print(*sorted(seen), "workers" in json.dumps(data))
