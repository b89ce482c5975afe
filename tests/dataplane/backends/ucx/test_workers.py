"""Large transfers over UCX, which several workers carry together."""

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import RDMAAction, RDMABuffer, RemoteLayout, TransferTimeoutError, process
from tests.conformance.owner import RemoteOwner
from tests.sameness import assert_same

THREADS = 3
MIB = 1 << 20


@pytest.fixture(scope="module", params=["cma", "tcp"])
def owner(request: pytest.FixtureRequest) -> Iterator[RemoteOwner]:
    settings = {"backend": "ucx", "ucx": {"TLS": "tcp,self"}} if request.param == "tcp" else {}
    started = RemoteOwner(settings, shared=False)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = dataplane.process.current().config.threads
    dataplane.configure(copy_threads=THREADS)
    yield
    dataplane.configure(copy_threads=before)


def noise(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


@pytest.mark.parametrize("nbytes", [8 * MIB - 1, 8 * MIB, 12 * MIB + 1, 33 * MIB + 13])
def test_every_byte_arrives_in_its_place_however_many_carry_it(owner: RemoteOwner, nbytes: int) -> None:
    content = noise(nbytes)
    name, raw = owner("make", content.tobytes())
    buffer = RDMABuffer.deserialize(raw)
    into = np.zeros(nbytes, np.uint8)
    for _ in range(3):
        into[:] = 0
        buffer.read_into(into, timeout=20).get()
        assert (into == content).all()
    other = noise(nbytes, seed=2)
    buffer.write_from(other, timeout=20).get()
    assert_same(owner("content", name), other.tobytes())


@pytest.mark.parametrize("owner", ["cma"], indirect=True)  # over TCP the owner's one thread is the bottleneck
def test_large_transfers_have_as_many_threads_as_copies_have(owner: RemoteOwner) -> None:
    _, raw = owner("make_filled", 32 * MIB, 3)
    RDMABuffer.deserialize(raw).read_into(np.zeros(32 * MIB, np.uint8), timeout=20).get()
    names = {thread.name for thread in threading.enumerate()}
    assert names >= {f"dataplane-ucx-client-{number}" for number in range(1, THREADS + 1)}


def test_a_batch_of_many_short_runs_is_shared_out_too(owner: RemoteOwner) -> None:
    rows, run = 12_000, 1000
    content = noise(rows * 2 * run).reshape(rows, 2 * run)
    _, raw = owner("make", content.tobytes())
    into = np.zeros((rows, run), np.uint8)
    layout = RemoteLayout(run // 2, (rows, run), (2 * run, 1), 1)
    action = RDMAAction().read_remote(into, RDMABuffer.deserialize(raw), layout=layout)
    for _ in range(2):
        into[:] = 0
        action.submit(timeout=20).get()
        assert (into == content[:, run // 2 : run // 2 + run]).all()


def test_many_large_and_short_transfers_at_once_do_not_mix(owner: RemoteOwner) -> None:
    nbytes = 16 * MIB
    content = noise(nbytes)
    _, raw = owner("make", content.tobytes())
    buffer = RDMABuffer.deserialize(raw)
    large = [np.zeros(nbytes, np.uint8) for _ in range(6)]
    short = [np.zeros(4096, np.uint8) for _ in range(60)]
    operations = [buffer.read_into(into, timeout=30) for into in large]
    operations += [buffer.at(i * 8192, 4096).read_into(into, timeout=30) for i, into in enumerate(short)]
    for operation in operations:
        operation.get()
    assert all((into == content).all() for into in large)
    assert all((into == content[i * 8192 : i * 8192 + 4096]).all() for i, into in enumerate(short))


def test_a_large_transfer_outlives_the_deadline_of_another_that_shares_its_connections() -> None:
    owner = RemoteOwner({"backend": "ucx", "ucx": {"TLS": "tcp,self"}}, shared=False)
    try:
        nbytes = 16 * MIB
        _, raw = owner("make_filled", nbytes, 7)
        buffer = RDMABuffer.deserialize(raw)
        into, kept = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        buffer.read_into(into, timeout=20).get()
        owner.freeze()
        patient = buffer.read_into(kept, timeout=60)
        with pytest.raises(TransferTimeoutError):
            buffer.read_into(into, timeout=0.3).get()
        owner.thaw()
        patient.get()
        assert (kept == 7).all()
    finally:
        owner.close()


class _Nothing:
    """What another thread has claimed already."""

    def claim(self) -> bool:
        return False


class _User:
    """A connection, as far as a worker counts them; only a collection of garbage finds that it is one."""

    def __init__(self) -> None:
        self.cycle = self


def test_a_thread_that_collects_garbage_before_it_has_begun_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is collected there counts itself out, in a worker that is just starting that thread."""
    client = process.current().ucx.engine()._new_client(99)
    set_ident = threading.Thread._set_ident  # type: ignore[attr-defined]

    def collect_first(thread: threading.Thread) -> None:
        set_ident(thread)
        if thread.name == "dataplane-ucx-client-99":
            gc.collect()

    gc.collect()
    gc.disable()
    try:
        client.join(_User())
        monkeypatch.setattr(threading.Thread, "_set_ident", collect_first)
        adopting = threading.Thread(target=client.adopt, args=(_Nothing(),), daemon=True)
        adopting.start()
        adopting.join(20)
    finally:
        gc.enable()
    assert not adopting.is_alive()
    client.close()
