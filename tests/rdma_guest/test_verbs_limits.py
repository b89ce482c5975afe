"""Inside the guest: limits of the system and of the queues, and that nothing is left behind."""

import ctypes
import gc
import os
import re
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import RDMABuffer, RegistrationError, process
from skipper.dataplane.backends.verbs.device import Access
from skipper.dataplane.backends.verbs.memory import register_cuda
from skipper.dataplane.backends.verbs.staging import StagedTransfer
from skipper.dataplane.layout import single
from skipper.dataplane.regions import MemoryKind, Region
from tests.conformance.owner import RemoteOwner
from tests.conformance.records import Fault
from tests.rdma_guest.gates import needs_device
from tests.rdma_guest.links import received, resources, shaped
from tests.sameness import assert_same

pytestmark = [pytest.mark.verbs, needs_device("rxa", "rxb")]

MIB = 1 << 20
_PR_CAPBSET_DROP = 24
_CAP_IPC_LOCK = 14


@pytest.fixture(scope="module", autouse=True)
def _on_rxa():
    dataplane.configure(backend="verbs")
    yield
    dataplane.configure(backend="auto")


@pytest.fixture
def far():
    """An owner at the other end of the link."""
    owner = RemoteOwner({"backend": "verbs", "verbs": {"device": "rxb", "listen": "10.9.0.2:0"}}, shared=False)
    yield owner
    owner.close()


@pytest.fixture
def near():
    """An owner that shares this process' device."""
    owner = RemoteOwner({"backend": "verbs", "verbs": {"device": "rxa"}}, shared=False)
    yield owner
    owner.close()


def owner_that_may_lock(nbytes: int) -> RemoteOwner:
    """One without root's right to lock any number of bytes, started by a thread that has given it up for good."""

    def start() -> RemoteOwner:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(_PR_CAPBSET_DROP, _CAP_IPC_LOCK, 0, 0, 0) == 0
        old = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, old[1]))
        try:
            return RemoteOwner({"backend": "verbs", "verbs": {"device": "rxa"}}, shared=False, inherits=True)
        finally:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, old)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(start).result()


def test_where_no_more_memory_may_be_locked_the_error_names_the_limit_to_raise(provoke):
    owner = owner_that_may_lock(4 * MIB)
    try:
        owner("make_filled", 64, 7)
        with pytest.raises(RegistrationError) as failure, provoke(Fault.NO_LOCKED_MEMORY, "verbs"):
            owner("make_filled", 8 * MIB, 7)
        for words in ("rxa port 1 cannot register 8388608 bytes", "may lock 4096 KiB", "ulimit -l", "LimitMEMLOCK="):
            assert words in str(failure.value)
        _, handle = owner("make_filled", MIB, 7)
        into = np.zeros(MIB, np.uint8)
        RDMABuffer.deserialize(handle).read_into(into).get()
        assert (into == 7).all()
    finally:
        owner.close()


def test_thousands_of_buffers_leave_no_memory_region_behind(far):
    far("make", b"12345678")
    before = resources("mr")
    far("churn", 3000, 4096)
    assert resources("mr") == before


def test_local_memory_that_is_freed_leaves_no_memory_region_behind(far):
    _, handle = far("make_filled", 4096, 7)
    buffer = RDMABuffer.deserialize(handle)
    buffer.read_into(bytearray(4096)).get()
    gc.collect()
    before = resources("mr")
    for _ in range(1000):
        buffer.read_into(bytearray(4096)).get()
        buffer.read_into(np.empty(4096, np.uint8)).get()
    gc.collect()
    assert resources("mr") <= before


def test_handles_to_thousands_of_buffers_need_one_connection(far):
    _, first = far("make", b"12345678")
    RDMABuffer.deserialize(first).read_into(bytearray(8)).get()
    before = resources("qp")
    for value in range(300):
        _, handle = far("make_filled", 64, value % 256)
        into = bytearray(64)
        RDMABuffer.deserialize(handle).read_into(into).get()
        assert_same(into, bytes([value % 256]) * 64)
    assert resources("qp") == before


def test_hundreds_of_connections_leave_no_queue_pair_and_no_descriptor(far):
    _, handle = far("make", b"12345678")
    buffer = RDMABuffer.deserialize(handle)

    def connect_and_forget():
        dataplane.configure(backend="verbs")
        buffer.read_into(bytearray(8)).get()

    connect_and_forget()
    gc.collect()
    before = resources("qp"), len(os.listdir("/proc/self/fd")), far("footprint")[0]
    for _ in range(200):
        connect_and_forget()
    gc.collect()
    end = time.monotonic() + 10
    while resources("qp") > before[0] or far("footprint")[0] > before[2]:  # the owner closes its ends soon after
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before[1]


def test_a_connection_that_waits_for_credits_of_others_is_not_forgotten(far, near):
    arrays = [np.zeros(4096, np.uint8) for _ in range(3)]
    slow, quick = (RDMABuffer.deserialize(owner("make_filled", 4096, 7)[1]) for owner in (far, near))
    for buffer in (slow, quick):
        buffer.read_into(arrays[0]).get()
    (rail,) = process.current().verbs.engine().rails.rails
    everything, rail.room = rail.room, 4  # of two reads, each with its epoch word
    try:
        with shaped("netem delay 100ms", "eb"):
            first = [slow.read_into(array) for array in arrays[:2]]
            waiting = quick.read_into(arrays[2], timeout=20)
            assert not waiting.done()
            for operation in first:
                operation.get()
        waiting.get()
        assert rail.room == 4
    finally:
        rail.room = everything
    assert all((array == 7).all() for array in arrays)


@pytest.mark.parametrize(("mtu", "least"), [(1024, 4 * 1024), (4096, 4 * 256)])
def test_packets_are_as_large_as_the_path_mtu_that_was_chosen(mtu, least):
    settings = {"backend": "verbs", "verbs": {"device": "rxb", "listen": "10.9.0.2:0", "mtu": mtu, "gid_index": 1}}
    owner = RemoteOwner(settings, shared=False)
    try:
        _, handle = owner("make_filled", 4 * MIB, 7)
        into = np.zeros(4 * MIB, np.uint8)
        before = received("ea")[1]
        RDMABuffer.deserialize(handle).read_into(into).get()
        packets = received("ea")[1] - before
        assert least <= packets < 2 * least
        assert (into == 7).all()
    finally:
        owner.close()


def test_a_device_that_takes_no_dmabuf_says_so():
    rails = process.current().verbs.engine().rails
    fd = os.memfd_create("no-dmabuf")
    try:
        with pytest.raises(
            RegistrationError, match="rxa port 1 cannot register 4096 bytes: Failed to register a dma-buf"
        ):
            rails.devices[0].register_dmabuf(fd, 0, 4096, Access.LOCAL_WRITE)
    finally:
        os.close(fd)


def test_gpu_memory_that_cannot_be_registered_is_staged_and_said_to_be(far, caplog):
    """An address of the host stands for one of a GPU: there is no CUDA driver here that could know either."""
    rails = process.current().verbs.engine().rails
    why = r"as a dma-buf: .*CUDA driver.*; the module nvidia-peermem is not loaded"
    with pytest.raises(RegistrationError, match=why):
        register_cuda(rails.devices, 0x7F0000000000, 4096, 0, Access.LOCAL_WRITE)
    peer, remote, _ = RDMABuffer.deserialize(far("make_filled", 4096, 7)[1]).route()
    array = np.zeros(4096, np.uint8)
    address = array.__array_interface__["data"][0]
    region = Region(address, 4096, False, MemoryKind.CUDA, 0, array)
    try:
        for _ in range(2):
            transfer = peer.compile(single(address, remote.address, 4096), [remote], [region], to_remote=False)
            assert isinstance(transfer, StagedTransfer)
        assert re.search(why, dataplane.backends()[-1].reason)
        assert [re.search(why, record.getMessage()) is not None for record in caplog.records] == [True]
    finally:
        rails.staging = None
