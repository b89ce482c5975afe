"""Inside the guest, over two devices with a link between them: what the verbs backend does beyond the conformance
suite, which runs over it too.
"""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import RDMAAction, RDMABuffer, RemoteLayout, process
from skipper.dataplane.errors import ConfigurationError, OwnerDiedError, TransferError, TransferTimeoutError
from tests.conformance.loops import meanwhile, read_until_it_fails, write_until_it_fails
from tests.conformance.owner import RemoteOwner
from tests.conformance.records import Clock, Fault
from tests.rdma_guest.gates import needs_device
from tests.rdma_guest.links import cut_link, received, resources
from tests.sameness import assert_same

pytestmark = [pytest.mark.verbs, needs_device("rxa", "rxb")]

MIB = 1 << 20
LARGE = 16 * MIB
NO_ANSWER = 12


@pytest.fixture(scope="module", autouse=True)
def _on_rxa():
    """A process has one device for its whole life; without being told it takes the first one."""
    dataplane.configure(backend="verbs")
    assert dataplane.backends()[-1].reason.startswith("rxa port 1,")
    yield
    dataplane.configure(backend="auto")


@pytest.fixture(scope="module")
def far():
    """An owner at the other end of the link."""
    owner = RemoteOwner({"backend": "verbs", "verbs": {"device": "rxb", "listen": "10.9.0.2:0"}}, shared=False)
    yield owner
    owner.close()


@pytest.fixture(scope="module")
def near():
    """An owner that shares this process' device: its packets do not cross the link."""
    owner = RemoteOwner({"backend": "verbs", "verbs": {"device": "rxa"}}, shared=False)
    yield owner
    owner.close()


def buffer_of(owner, nbytes, value=7):
    name, handle = owner("make_filled", nbytes, value)
    return name, RDMABuffer.deserialize(handle)


@contextmanager
def cut_meanwhile(then=lambda: None):
    """Cut the link when something has crossed it, and do that with the link cut; it heals at the end of the block."""
    clock = Clock()

    def packets():
        return received("ea")[1] + received("eb")[1]

    def cut():
        enough, end = packets() + 1000, time.monotonic() + 20
        while packets() < enough and time.monotonic() < end:
            time.sleep(0.001)
        link.enter_context(cut_link())
        clock.start()
        then()

    with ExitStack() as link, meanwhile(cut):
        yield clock


def test_bytes_cross_the_link_both_ways(far):
    name, buffer = buffer_of(far, 3 * MIB)
    into = np.zeros(3 * MIB, np.uint8)
    before = received("ea")[0]
    buffer.read_into(into).get()
    assert (into == 7).all()
    assert received("ea")[0] - before > 3 * MIB
    into[:] = 9
    buffer.write_from(into).get()
    assert_same(far("content", name), b"\x09" * (3 * MIB))


def test_a_link_cut_during_a_transfer_is_an_error_and_other_peers_go_on(far, near, provoke):
    _, over_the_link = buffer_of(far, LARGE)
    _, beside_it = buffer_of(near, 4096)
    into, small = np.zeros(LARGE, np.uint8), np.zeros(4096, np.uint8)
    over_the_link.read_into(into).get()
    beside_it.read_into(small).get()
    with cut_meanwhile(lambda: beside_it.read_into(small).get()) as clock:
        with pytest.raises(TransferError) as failure, provoke(Fault.LINK_CUT_DURING, "verbs", clock=clock):
            read_until_it_fails(over_the_link, into, 7)
        assert time.monotonic() - clock.begin < 10
        assert failure.value.status == NO_ANSWER
        beside_it.read_into(small).get()
    into[:] = 0
    with provoke(Fault.LINK_HEALED, "verbs"):
        over_the_link.read_into(into, timeout=30).get()
    assert (into == 7).all()


def test_a_link_cut_during_a_write_is_an_error(far, provoke):
    _, buffer = buffer_of(far, LARGE)
    content = np.full(LARGE, 9, np.uint8)
    buffer.write_from(content).get()
    with (
        cut_meanwhile() as clock,
        pytest.raises(TransferError) as failure,
        provoke(Fault.LINK_CUT_DURING_WRITE, "verbs", clock=clock),
    ):
        write_until_it_fails(buffer, content)
    assert failure.value.status == NO_ANSWER


def test_a_link_cut_before_is_an_error_after_the_devices_retries(far, provoke):
    _, buffer = buffer_of(far, MIB)
    memory = np.zeros(MIB, np.uint8)
    buffer.read_into(memory).get()
    with cut_link(), pytest.raises(TransferError), provoke(Fault.LINK_CUT_BEFORE, "verbs"):
        buffer.read_into(memory, timeout=30).get()


def test_at_the_first_use_too(provoke):
    owner = RemoteOwner({"backend": "verbs", "verbs": {"device": "rxb", "listen": "10.9.0.2:0"}}, shared=False)
    try:
        _, buffer = buffer_of(owner, MIB)
        with cut_link(), pytest.raises(TransferError), provoke(Fault.LINK_CUT_AT_FIRST_USE, "verbs"):
            buffer.read_into(np.zeros(MIB, np.uint8), timeout=30).get()
    finally:
        owner.close()


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_deadline_is_kept_over_a_cut_link(far, direction, provoke):
    _, buffer = buffer_of(far, MIB)
    memory = np.full(MIB, 7, np.uint8)
    buffer.read_into(memory).get()
    with cut_link():
        begin = time.monotonic()
        with pytest.raises(TransferTimeoutError), provoke(Fault.LINK_CUT_SHORT, "verbs", deadline_s=0.1):
            (buffer.read_into if direction == "read" else buffer.write_from)(memory, timeout=0.1).get()
        assert time.monotonic() - begin < 2
    buffer.read_into(memory).get()


def test_one_transfers_deadline_does_not_fail_the_others_of_that_peer(far, provoke):
    _, buffer = buffer_of(far, 32 * MIB)
    large, small = np.zeros(32 * MIB, np.uint8), np.zeros(32 * MIB, np.uint8)
    buffer.read_into(large).get()
    others = [buffer.read_into(large, timeout=60) for _ in range(3)]
    with pytest.raises(TransferTimeoutError), provoke(Fault.DEADLINE, "verbs", deadline_s=0.001):
        buffer.read_into(small, timeout=0.001).get()
    for other in others:
        other.get()
    assert (large == 7).all()


def test_a_batch_larger_than_the_queue_is_moved_whole(far):
    count, run = 5000, 96
    name, buffer = buffer_of(far, 2 * count * run)
    grid = np.zeros((count, 2 * run), np.uint8)
    layout = RemoteLayout(0, (count, run), (2 * run, 1), 1)
    action = RDMAAction().read_remote(grid[:, run:], buffer, layout=layout)
    for _ in range(3):
        grid[:] = 0
        action.submit().get()
        assert (grid[:, run:] == 7).all()
        assert not grid[:, :run].any()
    grid[:] = 3
    RDMAAction().write_remote(buffer, grid[:, run:], layout=layout).submit().get()
    content = np.frombuffer(far("content", name), np.uint8).reshape(count, 2 * run)
    assert (content[:, :run] == 3).all()
    assert (content[:, run:] == 7).all()


def test_awaited_operations_need_no_waiting_thread(far):
    _, buffer = buffer_of(far, MIB)
    arrays = [np.zeros(MIB, np.uint8) for _ in range(8)]

    async def read_all():
        await asyncio.gather(*(wrapped(buffer.read_into(array)) for array in arrays))

    async def wrapped(operation):
        await operation

    asyncio.run(read_all())
    assert all((array == 7).all() for array in arrays)


def test_reading_from_many_threads_leaves_no_descriptor_behind(far):
    _, buffer = buffer_of(far, 256 << 10)
    buffer.read_into(np.zeros(256 << 10, np.uint8)).get()
    before = len(os.listdir("/proc/self/fd"))
    wrong = []

    def reader():
        for _ in range(20):
            into = np.zeros(256 << 10, np.uint8)
            buffer.read_into(into).get()
            if not (into == 7).all():
                wrong.append(into)

    threads = [threading.Thread(target=reader) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_owners_that_die_leave_no_queue_pair_and_no_descriptor(far):
    _, buffer = buffer_of(far, 64)
    buffer.read_into(bytearray(64)).get()
    before = resources("qp"), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        owner = RemoteOwner({"backend": "verbs", "verbs": {"device": "rxa"}}, shared=False)
        _, dying = buffer_of(owner, MIB)
        into = np.zeros(MIB, np.uint8)
        dying.read_into(into).get()
        assert resources("qp") == before[0] + 2
        owner.kill()
        begin = time.monotonic()
        with pytest.raises(OwnerDiedError):
            dying.read_into(into).get()
        assert time.monotonic() - begin < 5
        owner.close()
        del dying
    gc.collect()
    dataplane.configure(backend="verbs")  # forgets all connections
    gc.collect()
    buffer.read_into(bytearray(64)).get()
    end = time.monotonic() + 10
    while resources("qp") > before[0]:  # the owners close their ends when they see ours closed
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before[1]


def test_a_configuration_that_comes_too_late_for_the_device_changes_nothing_at_all(near):
    _, buffer = buffer_of(near, 4096)
    buffer.read_into(bytearray(4096)).get()
    here = process.current()
    before, threads = here.config, here.pool.threads
    with pytest.raises(ConfigurationError, match="before its first use"):
        dataplane.configure(backend="ucx", copy_threads=threads + 1, ucx={"TLS": "self"}, verbs={"depth": 64})
    assert here.config is before
    assert here.pool.threads == threads
    assert "not started" in {status.name: status.reason for status in dataplane.backends()}["ucx"]
    assert here.ucx.config is before
    assert buffer.backend == "verbs"
    buffer.read_into(bytearray(4096)).get()


def test_what_nobody_waits_for_ends_by_itself_also_after_much_that_was_waited_for(far):
    _, buffer = buffer_of(far, LARGE)
    into = np.zeros(LARGE, np.uint8)
    begin = time.monotonic()
    while time.monotonic() - begin < 0.5:
        buffer.read_into(into).get()
    ended = threading.Event()
    with cut_link():
        stuck = buffer.read_into(into, timeout=0.05)
        stuck.add_done_callback(lambda _: ended.set())
        assert ended.wait(5)
        with pytest.raises(TransferTimeoutError):
            stuck.get()


def test_an_unknown_device_or_option_is_refused():
    script = (
        "import numpy as np; from skipper import dataplane\n"
        "from skipper.dataplane.errors import BackendUnavailableError, ConfigurationError\n"
        "for bad in ({'retry_cnt': 7}, {'listen': '0.0.0.0:1'}, {'mtu': 9000}, {'colour': 1}, {'rdma_cm': 1}):\n"
        "    try: dataplane.configure(verbs=bad)\n"
        "    except ConfigurationError: continue\n"
        "    raise SystemExit(f'{bad} was taken')\n"
        "dataplane.configure(backend='verbs', verbs={'device': 'none0'})\n"
        "assert not dataplane.backends()[-1].usable\n"
        "try: dataplane.RDMABuffer(np.zeros(8)).serialize()\n"
        "except BackendUnavailableError as error: assert 'none0' in str(error)\n"
        "else: raise SystemExit('exported')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
