"""Inside the guest: the device is there, moves bytes between processes, and says so when the link is cut."""

import subprocess
import time

import pytest

from tests.rdma_guest.gates import needs_device
from tests.sameness import assert_same

pytestmark = [pytest.mark.verbs, needs_device()]

SUCCESS, ACCESS_ERROR, RETRIES_EXCEEDED = 0, 10, 12


@needs_device("rxe0")
def test_the_device_has_an_ipv4_gid_and_the_largest_path_mtu():
    import pyverbs.enums as e
    from pyverbs.device import Context

    with Context(name="rxe0") as context:
        port = context.query_port(1)
        assert port.state == e.IBV_PORT_ACTIVE
        assert port.active_mtu == e.IBV_MTU_4096
        assert str(context.query_gid(1, 1)) == "0000:0000:0000:0000:0000:ffff:0a4d:0001"  # 10.77.0.1


@needs_device("rxe0")
@pytest.mark.parametrize("nbytes", [1, 4096, 20 << 20])
def test_what_is_written_into_another_process_can_be_read_back(nbytes):
    from tests.rdma_guest import bare_verbs as bare

    with bare.connected("rxe0", "rxe0", nbytes + 4) as (end, _):
        assert end.transfer(bare.READ, 4) == SUCCESS
        assert end.memory.read(4, 0) == b"peer"
        pattern = bytes(range(251)) * (nbytes // 251 + 1)
        end.memory.write(pattern, nbytes)
        assert end.transfer(bare.WRITE, nbytes) == SUCCESS
        end.memory.write(bytes(nbytes), nbytes)
        assert end.transfer(bare.READ, nbytes) == SUCCESS
        assert_same(end.memory.read(nbytes, 0), pattern[:nbytes])


@needs_device("rxe0")
def test_a_wrong_key_is_refused():
    from tests.rdma_guest import bare_verbs as bare

    with bare.connected("rxe0", "rxe0", 4096) as (end, _):
        end.peer_key ^= 0x55
        assert end.transfer(bare.WRITE, 4096) == ACCESS_ERROR


@needs_device("rxa", "rxb")
def test_a_cut_link_ends_a_transfer_within_its_retries():
    from tests.rdma_guest import bare_verbs as bare

    with bare.connected("rxa", "rxb", 1 << 20) as (end, _):
        assert end.transfer(bare.WRITE, 1 << 20) == SUCCESS
        subprocess.run(["tc", "qdisc", "add", "dev", "ea", "root", "netem", "loss", "100%"], check=True)
        try:
            begin = time.monotonic()
            assert end.transfer(bare.WRITE, 1 << 20) == RETRIES_EXCEEDED
            assert time.monotonic() - begin < 5.0
        finally:
            subprocess.run(["tc", "qdisc", "del", "dev", "ea", "root"], check=True)

    with bare.connected("rxa", "rxb", 1 << 20) as (end, _):
        assert end.transfer(bare.READ, 1 << 20) == SUCCESS


@needs_device("rxa", "rxb")
def test_a_killed_peer_ends_a_transfer_within_its_retries():
    from tests.rdma_guest import bare_verbs as bare

    with bare.connected("rxa", "rxb", 1 << 20) as (end, peer):
        peer.kill()
        peer.wait(10)
        assert end.transfer(bare.READ, 1 << 20) == RETRIES_EXCEEDED
