"""How many signs of life a script hears from hosts that are elsewhere: as many as these are, not as their processes."""

from collections.abc import Iterator

import pytest

from skipper import control
from skipper.control import configure
from skipper.control.cluster.hollow import HollowHosts
from skipper.control.model.settings import adopt, settings
from skipper.control.runtime import current_runtime
from tests.control.conftest import PATIENCE_S, wait_until

from .actors import Plain

HEARTBEAT_S = 4.0
HEARD = 12
"""Signs of life of the host, which take longer than any other process may be silent that is not left to it."""


@pytest.fixture
def hollow(request: pytest.FixtureRequest) -> Iterator[HollowHosts]:
    """One host, whose job ends with the test."""
    before = settings()
    configure(heartbeat_s=HEARTBEAT_S, unresponsive_s=100 * HEARTBEAT_S)
    with HollowHosts(1, own_ips=request.param) as one:
        yield one
        control.shutdown()
    adopt(before)


@pytest.mark.parametrize(("hollow", "is_elsewhere"), [(True, True), (False, False)], indirect=["hollow"])
def test_processes_of_other_hosts_leave_signs_of_life_to_their_host(hollow: HollowHosts, is_elsewhere: bool) -> None:
    procs = hollow.attach().spawn_procs({"gpus": 8})
    actors = procs.spawn("plain", Plain)
    actors.rank.call().get(PATIENCE_S)
    transport = current_runtime.current().transport
    host = transport.find(procs.members[0].launcher.id)
    links = [transport.find(member.id) for member in procs.members]
    from_host, before = host.heard_messages, [link.heard_messages for link in links]
    wait_until(lambda: host.heard_messages >= from_host + HEARD, "the host shows signs of life")
    heard = [link.heard_messages - count for link, count in zip(links, before, strict=True)]
    if is_elsewhere:
        assert max(heard) <= 1  # the first, which each process shows to all; and none is lost
    else:
        assert min(heard) > HEARD // 2  # within a host each shows its own
    assert list(actors.rank.call().get(PATIENCE_S)) == list(range(8))
