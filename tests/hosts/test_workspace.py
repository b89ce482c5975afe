"""A folder that is brought to several machines: what crosses which cable."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

import pytest

from skipper import control
from skipper.control import Actor, attach_to_hosts, endpoint
from skipper.control.cluster.hosts import certs
from skipper.control.cluster.workspace import api, sync_workspace
from skipper.control.cluster.workspace.folder_sync import MARKER
from tests.hosts.conftest import addresses_of, start_agent, wait_for_agent
from tests.hosts.netns import Capture, Network

STEP_S = 120.0
FILES, FILE_NBYTES = 20, 10 << 20  # 200 MiB
CHANGE_NBYTES = FILES * FILE_NBYTES // 100


class Reader(Actor):
    """Looks at the folder of its machine."""

    @endpoint
    def look(self, folder: str) -> dict[str, str]:
        return contents(Path(folder))


def contents(folder: Path) -> dict[str, str]:
    return {path.name: blake2b(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.name != MARKER}


@pytest.fixture
def cleared(net: Network) -> Iterator[Network]:
    yield net
    control.shutdown()
    for machine in net.machines:
        machine.clear()


def test_a_hundredth_of_200_mib_crosses_each_cable_once_down_the_tree_with_tls(
    cleared: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_FANOUT", 2)  # from the script to two machines, and from each of these to another one
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for number in range(FILES):
        (source / f"{number}.bin").write_bytes(os.urandom(FILE_NBYTES))
    machines, authority = cleared.machines, certs.make_authority(tmp_path / "authority")
    agents = []
    for machine in machines:
        folder = certs.issue(authority, tmp_path / machine.name, [machine.address], role="host")
        agents.append(start_agent(machine, "--certs", str(folder), own_folder=target))
    for agent in agents:
        wait_for_agent(agent)
    own = certs.issue(authority, tmp_path / "script", [cleared.address], role="script")
    procs = attach_to_hosts(addresses_of(machines), certs=own).spawn_procs()  # the data plane stays closed
    first = sync_workspace(procs, source, target, timeout=STEP_S)
    assert first.moved == len(machines) * first.nbytes == len(machines) * FILES * FILE_NBYTES

    changed = bytearray((source / "7.bin").read_bytes())
    changed[3 << 20 : (3 << 20) + CHANGE_NBYTES] = os.urandom(CHANGE_NBYTES)
    (source / "7.bin").write_bytes(changed)
    with ExitStack() as stack:
        captures = [stack.enter_context(Capture(machine)) for machine in machines]
        second = sync_workspace(procs, source, target, timeout=STEP_S)
    assert second.changed == ("7.bin",)
    assert CHANGE_NBYTES <= second.moved / len(machines) <= second.nbytes / 50
    wanted = contents(source)
    assert all(found == wanted for found in procs.spawn("reader", Reader).look.call(str(target)).get(STEP_S))

    addresses = [cleared.address, *(machine.address for machine in machines)]
    for rank, (machine, capture) in enumerate(zip(machines, captures, strict=True)):
        came = {sender: capture.nbytes_between(sender, machine.address) for sender in addresses}
        giver = cleared.address if rank < 2 else machines[rank - 2].address
        assert came[giver] >= CHANGE_NBYTES
        assert sum(came.values()) <= second.nbytes / 50  # the manifest, too, and what goes around
        assert sum(came.values()) - came[giver] < CHANGE_NBYTES / 2
