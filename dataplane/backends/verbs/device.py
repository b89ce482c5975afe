"""An RDMA device, opened: its port, memory regions and queue pairs.

Only the files of this folder know pyverbs, all of them through `pyverbs()` below.
"""

import enum
import errno
import functools
import importlib
import importlib.util
import os
import resource
import secrets
import struct
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from skipper.dataplane.backends.verbs.port import VerbsPort
from skipper.dataplane.errors import BackendUnavailableError, RegistrationError, TransferError

_MTUS = (256, 512, 1024, 2048, 4096)  # enum ibv_mtu counts them from 1
_READS = 16  # reads in flight per queue pair, if both devices allow that many
# The data of a READ are sent in one go. Larger pieces gain nothing, and overrun a receiver without flow control: 8 MiB
# at a time were seven times slower between two Soft-RoCE devices.
_MESSAGE_BYTES = 1 << 20
_GATHER = 16  # pieces of local memory per work request, if the device allows that many
# 0.64 ms, code 12 of IBTA's table; it is never used, since nothing here waits for a receive request.
_RNR_TIMER = 12

ENDPOINT = struct.Struct("<II16sHBBH")
"""One end, in the form for the other end: queue pair number, first packet number, GID, LID, path MTU code, reads, and
the port of the connection manager that should connect it (0: none)."""

_CHANNEL = "anon_inode:[infinibandevent]"


def require_pyverbs() -> None:
    """Check that pyverbs can be found, without importing it.

    Raises:
        BackendUnavailableError: It cannot be found.
    """
    if importlib.util.find_spec("pyverbs") is None:
        raise BackendUnavailableError(
            "pyverbs cannot be imported: install Debian's python3-pyverbs (or rdma-core's) where this Python finds it"
        )


@functools.cache
def pyverbs(module: str) -> ModuleType:
    """A module of pyverbs, by its name within the package.

    Raises:
        BackendUnavailableError: It cannot be imported.
    """
    try:
        return importlib.import_module(f"pyverbs.{module}")
    except ImportError as error:
        raise BackendUnavailableError(f"pyverbs cannot be imported: {error}") from error


class Access(enum.IntFlag):
    """What a memory region may be used for."""

    LOCAL_WRITE = 1
    REMOTE_READ = 2
    REMOTE_WRITE = 4
    REMOTE_ATOMIC = 8


class Atomics(enum.IntEnum):
    """What 8-byte atomic operations of a device are atomic with. The numbers are part of the handle format."""

    NONE = 0
    DEVICE = 1
    MACHINE = 2


class Device:
    """An opened port.

    Attributes:
        port: The port.
        enums: pyverbs' constants.
        depth: Work requests that one queue pair holds.
        gather: How many pieces of local memory one work request may have.
        message_bytes: The most bytes that one work request may move.
        atomics: What its atomic operations are atomic with.
        gid: Its address.
        reads: The most reads in flight on one queue pair.
        retries: How often a request without an answer is sent again.
        manager_port: The port of its connection manager; 0 while there is none.
        context: pyverbs' own object for the device.
    """

    def __init__(self, port: VerbsPort, options: Mapping[str, Any]) -> None:
        """Open it.

        Raises:
            BackendUnavailableError: pyverbs or the device refuses.
        """
        self.port = port
        self.enums = e = pyverbs("enums")
        self.error: type[Exception] = pyverbs("pyverbs_error").PyverbsError
        try:
            self.context = pyverbs("device").Context(name=port.device)
            self._domain = pyverbs("pd").PD(self.context)
            limits = self.context.query_device()
            state = self.context.query_port(port.number)
            self.gid = _gid_bytes(self.context.query_gid(port.number, port.gid_index))
        except self.error as error:
            raise BackendUnavailableError(f"RDMA device {port} cannot be opened: {error}") from error
        self.depth = min(options.get("depth", 512), limits.max_qp_wr)
        self.gather = min(_GATHER, limits.max_sge)
        self.completions = min(16384, limits.max_cqe)
        self.message_bytes = min(state.max_msg_sz, _MESSAGE_BYTES)
        self.atomics = {e.IBV_ATOMIC_HCA: Atomics.DEVICE, e.IBV_ATOMIC_GLOB: Atomics.MACHINE}.get(
            limits.atomic_caps, Atomics.NONE
        )
        self.manager_port = 0
        self._lid = state.lid
        self._mtu = _MTUS.index(options["mtu"]) + 1 if "mtu" in options else state.active_mtu
        self.reads = max(1, min(_READS, limits.max_qp_rd_atom, limits.max_qp_init_rd_atom))
        self._ack_timeout = options.get("timeout", 14)
        self.retries = options.get("retry_cnt", 6)
        self._flags = {
            Access.LOCAL_WRITE: int(e.IBV_ACCESS_LOCAL_WRITE),
            Access.REMOTE_READ: int(e.IBV_ACCESS_REMOTE_READ),
            Access.REMOTE_WRITE: int(e.IBV_ACCESS_REMOTE_WRITE),
            Access.REMOTE_ATOMIC: int(e.IBV_ACCESS_REMOTE_ATOMIC) if self.atomics else 0,
        }

    def register(self, address: int, nbytes: int, access: Access) -> Any:
        """A memory region (`.lkey`, `.rkey`, `.close()`); closed with its last reference.

        Raises:
            RegistrationError: The device or the kernel refuses.
        """
        try:
            return pyverbs("mr").MR(self._domain, nbytes, self._access(access), address=address)
        except self.error as error:
            raise self._refused(nbytes, error) from error

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, access: Access) -> Any:
        """A memory region of a part of a dma-buf. Requests address its bytes from `offset`, not by virtual address.

        Raises:
            RegistrationError: The device or the kernel refuses.
        """
        try:
            return pyverbs("mr").DmaBufMR(self._domain, nbytes, self._access(access), dmabuf=fd, offset=offset)
        except self.error as error:
            raise self._refused(nbytes, error) from error

    def _access(self, access: Access) -> int:
        return sum(flag for right, flag in self._flags.items() if right in access)

    def _refused(self, nbytes: int, error: Exception) -> RegistrationError:
        text = f"{self.port} cannot register {nbytes} bytes: {error}"
        # The kernel counts registered memory against this limit, and returns ENOMEM when it is reached.
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if getattr(error, "error_code", None) == errno.ENOMEM and limit != resource.RLIM_INFINITY:
            text += (
                f". This process may lock {limit >> 10} KiB of memory: raise the limit (ulimit -l, memlock in "
                "/etc/security/limits.conf, LimitMEMLOCK= of a systemd unit, --ulimit memlock=-1 of a container)"
            )
        return RegistrationError(text)

    def endpoint(self, number: int, first_packet: int) -> bytes:
        """This end of a queue pair, for the other end."""
        return ENDPOINT.pack(number, first_packet, self.gid, self._lid, self._mtu, self.reads, self.manager_port)

    def attributes(self, mine: int, theirs: bytes) -> Any:
        """The attributes that take a queue pair from reset to ready to send.

        Args:
            mine: Number of the first packet that this end sends.
            theirs: `endpoint` of the other end.
        """
        number, first_packet, gid, lid, mtu, reads, _ = ENDPOINT.unpack(theirs)
        address = pyverbs("addr")
        port = self.port.number
        values = pyverbs("qp").QPAttr(port_num=port)
        values.qp_access_flags = self._access(Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
        values.path_mtu = min(self._mtu, mtu)
        values.dest_qp_num = number
        values.rq_psn, values.sq_psn = first_packet, mine
        values.max_rd_atomic = values.max_dest_rd_atomic = max(1, min(self.reads, reads))
        values.min_rnr_timer = _RNR_TIMER
        values.timeout, values.retry_cnt, values.rnr_retry = self._ack_timeout, self.retries, self.retries
        if self.port.routed:
            route = address.GlobalRoute(dgid=address.GID(_gid_text(gid)), sgid_index=self.port.gid_index, hop_limit=64)
            values.ah_attr = address.AHAttr(gr=route, is_global=1, port_num=port)
        else:
            values.ah_attr = address.AHAttr(dlid=lid, port_num=port)
        return values

    def adjust(self, wanted: Any, state: Any) -> None:
        """Put the device's own settings into the connection manager's attributes for a state of a queue pair."""
        if state == self.enums.IBV_QPS_INIT:
            wanted.qp_access_flags = self._access(Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
        elif state == self.enums.IBV_QPS_RTR:
            wanted.path_mtu = min(self._mtu, wanted.path_mtu)
            wanted.min_rnr_timer = _RNR_TIMER
        else:
            wanted.timeout, wanted.retry_cnt, wanted.rnr_retry = self._ack_timeout, self.retries, self.retries

    def close(self) -> None:
        """Close it and everything made from it. Idempotent."""
        self.context.close()


class QueuePair:
    """A reliable connection of a device; `connect` takes it from reset to ready to send."""

    def __init__(self, device: Device, completions: Any, *, depth: int) -> None:
        """Make it, unconnected.

        Raises:
            TransferError: The device has none left.
        """
        self._device = device
        self._first_packet = secrets.randbits(24)
        qp = pyverbs("qp")
        room = qp.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=device.gather, max_recv_sge=1)
        wanted = qp.QPInitAttr(
            qp_type=device.enums.IBV_QPT_RC, scq=completions, rcq=completions, cap=room, sq_sig_all=0
        )
        try:
            self._pair = qp.QP(device._domain, wanted)
        except device.error as error:
            raise TransferError(f"{device.port} has no free queue pair: {error}") from error
        self.number: int = self._pair.qp_num
        self._held: list[Any] = []
        self._closed = False

    @property
    def endpoint(self) -> bytes:
        """The data that the other end needs to connect."""
        return self._device.endpoint(self.number, self._first_packet)

    def connect(self, theirs: bytes) -> None:
        """Become ready to send to the other end, and to receive from it.

        Raises:
            TransferError: The device refuses the other end's data.
        """
        try:
            self._pair.to_rts(self._device.attributes(self._first_packet, theirs))
        except (self._device.error, ValueError) as error:
            raise TransferError(f"the queue pair cannot be connected: {error}") from error

    def hold(self, *managed: Any) -> bool:
        """Keep the objects of a connection manager's connection until this is closed; False if it is closed already."""
        if self._closed:
            return False
        self._held += [one for one in managed if one is not None]
        return True

    def follow(self, identity: Any, state: Any) -> None:
        """Change state as the connection manager requires for its connection `identity`.

        Raises:
            PyverbsError: The change fails.
        """
        wanted, mask = identity.init_qp_attr(state)
        self._device.adjust(wanted, state)
        self._pair.modify(wanted, mask)

    def post(self, first: Any) -> None:
        """Post a chain of work requests to the device.

        Raises:
            TransferError: The device refuses.
        """
        try:
            self._pair.post_send(first)
        except self._device.error as error:
            raise TransferError(f"{self._device.port} refuses work requests: {error}") from error

    def close(self) -> None:
        """Destroy it: after that no data move, and nothing completes. Idempotent."""
        self._closed = True
        self._pair.close()
        while self._held:
            self._held.pop(0).close()


def _gid_bytes(gid: Any) -> bytes:
    return bytes.fromhex(str(gid).replace(":", ""))


def _gid_text(gid: bytes) -> str:
    return ":".join(gid[at : at + 2].hex() for at in range(0, 16, 2))


class Completions:
    """A completion queue with its channel. For one thread at a time.

    Attributes:
        queue: pyverbs' own object, for queue pairs to complete on.
        events: Readable while there is an event for `acknowledge` to take.
    """

    def __init__(self, device: Device) -> None:
        cq = pyverbs("cq")
        known = descriptors_of(_CHANNEL)
        self._channel = cq.CompChannel(device.context)
        (self.events,) = descriptors_of(_CHANNEL) - known
        # A thread must not block if another one has taken the event.
        os.set_blocking(self.events, False)
        self.queue = cq.CQ(device.context, device.completions, None, self._channel)

    def poll(self, most: int) -> list[Any]:
        """At most `most` completions; never waits."""
        found: list[Any] = self.queue.poll(most)[1]
        return found

    def arm(self) -> None:
        """Make the next completion an event. Earlier completions are none: `poll` once more before sleeping."""
        self.queue.req_notify()

    def acknowledge(self) -> None:
        """Take the event."""
        self._channel.get_cq_event(self.queue)
        self.queue.ack_events(1)


def descriptors_of(file: str) -> set[int]:
    """Descriptors of this process that are open on such a file: pyverbs does not expose those of its objects."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == file:
                found.add(int(name))
        except FileNotFoundError:
            continue  # closed by now, like the descriptor of the listing itself
    return found
