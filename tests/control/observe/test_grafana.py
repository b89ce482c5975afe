"""Grafana's dashboard of a job: a real Prometheus has what each of its panels asks for."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from skipper.control import ActorError, ActorMesh
from skipper.control.observe import job_status, metrics_text, report_figures, serve_metrics
from skipper.control.observe.metrics import grafana_dashboard
from skipper.control.runtime import status_providers
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, wait_until
from tests.control.observe.conftest import Skipper

PROMETHEUS = shutil.which("prometheus")
RATE_INTERVAL = "20s"

needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus (tests/debian-packages.txt)")


def expressions() -> list[str]:
    """What the panels ask, with the variables of Grafana filled in."""
    board = json.loads(grafana_dashboard())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [expr.replace("$job", "skipper").replace("$__rate_interval", RATE_INTERVAL) for expr in asked]


@pytest.fixture
def ask(echoes: ActorMesh[Echo], tmp_path: Path) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Asks a Prometheus that looks at this job once a second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with serve_metrics(timeout=5.0) as server:
        config = tmp_path / "prometheus.yml"
        config.write_text(
            json.dumps(  # which is YAML
                {
                    "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                    "scrape_configs": [
                        {"job_name": "skipper", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}
                    ],
                }
            )
        )
        options = (
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
        )
        with (
            (tmp_path / "said").open("w") as said,
            subprocess.Popen([PROMETHEUS, *options], stdout=said, stderr=said) as process,
        ):

            def query(expression: str) -> list[dict[str, Any]]:
                with urlopen(f"http://{address}/api/v1/query?{urlencode({'query': expression})}", timeout=20) as answer:
                    found = json.load(answer)
                assert found["status"] == "success"
                return found["data"]["result"]

            def has_looked_twice() -> bool:
                try:
                    return bool(query('count_over_time(skipper_process_up{process="script"}[1m]) >= 3'))
                except URLError:
                    assert process.poll() is None, (tmp_path / "said").read_text()
                    return False

            try:
                wait_until(has_looked_twice, "Prometheus has looked at the job")
                yield query
            finally:
                process.kill()


@needs_prometheus
def test_prometheus_has_what_each_panel_asks_for(
    ask: Callable[[str], list[dict[str, Any]]], echoes: ActorMesh[Echo]
) -> None:
    echoes.pid.call().get(PATIENCE_S)
    with pytest.raises(ActorError):
        echoes.slice(gpus=0).fail.call_one(ValueError("no")).get(PATIENCE_S)
    wait_until(lambda: bool(ask('skipper_actor_call_seconds{endpoint="fail"}')), "Prometheus has seen the call")
    empty = {expr for expr in expressions() if not ask(expr)}
    # Nothing has gone through the data plane here, and only parts that report have figures.
    assert all("skipper_transfer" in expr or "skipper_figure" in expr for expr in empty), empty
    assert float(ask('sum(skipper_process_errors_total{job="skipper"})')[0]["value"][1]) >= 1


def test_panels_ask_for_figures_that_there_are(echoes: ActorMesh[Echo], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_providers._figures, "_by_part", {})
    report_figures("kitchen", lambda: {"eggs": 3})
    echoes.pid.call().get(PATIENCE_S)
    known = set(re.findall(r"^# TYPE (\w+)", metrics_text(job_status()), re.MULTILINE))
    asked = {name for expr in expressions() for name in re.findall(r"skipper_\w+", expr)}
    assert {name for name in asked - known if not name.startswith("skipper_transfer")} == set()


def test_the_command_prints_it_and_needs_no_job(skipper: Skipper) -> None:
    done = skipper("metrics", "--grafana", job="there-is-none")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["title"] == "Skipper"
