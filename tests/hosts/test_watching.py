"""A job on attached hosts as its status and its traces show it."""

from pathlib import Path

import pytest

from skipper.control.cluster.hosts import attach_to_hosts
from skipper.control.observe import enable_tracing, job_status
from skipper.control.runtime import tracing
from tests.control.conftest import PATIENCE_S
from tests.control.observe.spans import Link, bootstrap, provider, read
from tests.hosts.conftest import LocalAgents


def test_attached_hosts_and_their_processes_are_shown_by_the_hosts_addresses(
    local_agent: LocalAgents, secret_file: Path
) -> None:
    addresses = [local_agent("127.0.0.2"), local_agent("127.0.0.3")]
    hosts = attach_to_hosts(addresses, secret_file=secret_file)
    procs = hosts.spawn_procs({"gpus": 2}, name="ranks")
    procs.initialized.get(PATIENCE_S)
    status = job_status()
    script, *others = status.processes
    assert status.hosts[0] == script.host
    assert sorted(status.hosts[1:]) == sorted(hosts.names)  # in the order in which they came to be attached
    by_host = {name: [process.name for process in others if process.host == name] for name in hosts.names}
    for rank, name in enumerate(hosts.names):
        assert by_host[name] == [f"host {name}", *(f"ranks{{'hosts': {rank}, 'gpus': {gpu}}}" for gpu in range(2))]
    assert status.is_healthy


def test_a_trace_goes_on_on_another_host(
    local_agent: LocalAgents, secret_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "tracer", None)
    own = provider(tmp_path)
    enable_tracing(own)
    hosts = attach_to_hosts([local_agent("127.0.0.2"), local_agent("127.0.0.3")], secret_file=secret_file)
    links = hosts.spawn_procs(name="links", bootstrap=bootstrap(tmp_path))
    last = links.slice(hosts=1).spawn("last", Link)
    first = links.slice(hosts=0).spawn("first", Link, last)
    assert first.descend.call_one(1).get(PATIENCE_S) == 2
    links.stop().get(PATIENCE_S)  # they export what is left
    own.shutdown()
    spans = {f"{made.name} {made.kind}": made for made in read(tmp_path)}
    assert spans["last.descend SERVER"].trace == spans["first.descend CLIENT"].trace
    assert spans["last.descend SERVER"].parent == spans["last.descend CLIENT"].id
    assert len({made.pid for made in spans.values()}) == 3
