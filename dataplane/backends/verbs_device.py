"""An RDMA device, found in /sys and opened: its port, its address, memory regions and queue pairs.

Only the files `verbs_*` know pyverbs, all of them through `pyverbs()` below. Finding a device opens nothing and needs
no pyverbs, so that asking for a backend's status costs nothing.
"""

import functools
import importlib
import importlib.util
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dataplane.errors import BackendUnavailableError, RegistrationError, TransferError

_SYSFS = Path("/sys/class/infiniband")
_MAPPED = bytes(10) + b"\xff\xff"  # how a GID holds an IPv4 address: RFC 4291, 2.5.5.2
_LINK_LOCAL = b"\xfe\x80"
_MTUS = (256, 512, 1024, 2048, 4096)  # enum ibv_mtu counts them from 1
_READS = 16  # reads in flight per queue pair, where both devices allow that many
# What a READ asks for is sent in one go. Larger pieces gain nothing, and overrun a receiver without flow control: 8 MiB
# at a time were seven times slower between two Soft-RoCE devices.
_MESSAGE_BYTES = 1 << 20
_GATHER = 16  # pieces of local memory per work request, where the device allows that many
# 0.64 ms, code 12 of IBTA's table; nothing here ever waits for a receive request, so it is never used.
_RNR_TIMER = 12

ENDPOINT = struct.Struct("<II16sHBB")
"""What one end must know of the other: queue pair number, first packet number, GID, LID, path MTU code, reads."""


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device as /sys shows it.

    Attributes:
        device: Name, as `ibv_devices` prints it.
        number: Counted from 1.
        gid_index: The entry of its table of addresses to use.
        routed: Whether packets need that address (always on Ethernet).
    """

    device: str
    number: int
    gid_index: int
    routed: bool


def find_port(options: Mapping[str, Any]) -> Port:
    """The port to use: as configured, else the first active one.

    Raises:
        BackendUnavailableError: There is none, in words that say what to do.
    """
    wanted, wanted_number = options.get("device"), options.get("port")
    seen = []
    for device in sorted(_SYSFS.iterdir()) if _SYSFS.is_dir() else []:
        for port in sorted((device / "ports").iterdir()):
            if wanted in (None, device.name) and wanted_number in (None, int(port.name)):
                state = (port / "state").read_text().split()[-1]
                seen.append(f"{device.name} port {port.name} is {state}")
                if state == "ACTIVE":
                    return _port(device.name, port, options.get("gid_index"))
    if seen:
        raise BackendUnavailableError(f"no RDMA port is active: {', '.join(seen)}")
    if wanted is not None:
        raise BackendUnavailableError(f"there is no RDMA device {wanted} with port {wanted_number or 1}")
    raise BackendUnavailableError("this kernel has no RDMA device (/sys/class/infiniband)")


def _port(device: str, path: Path, gid_index: int | None) -> Port:
    routed = (path / "link_layer").read_text().strip() == "Ethernet"
    return Port(device, int(path.name), _best_gid(path, routed) if gid_index is None else gid_index, routed)


def _best_gid(path: Path, routed: bool) -> int:
    """RoCE v2 with an IPv4 address before one with IPv6, that before link-local ones; entry 0 on InfiniBand."""
    best, best_rank = 0, 0
    for index in sorted(int(entry.name) for entry in (path / "gids").iterdir()) if routed else ():
        try:
            kind = (path / "gid_attrs" / "types" / str(index)).read_text().strip()
            gid = bytes.fromhex((path / "gids" / str(index)).read_text().strip().replace(":", ""))
        except OSError:
            continue  # an unused entry has no type
        if gid.startswith(_MAPPED) and kind == "RoCE v2":
            return index
        rank = 0 if kind != "RoCE v2" or not any(gid) else 1 if gid.startswith(_LINK_LOCAL) else 2
        if rank > best_rank:
            best, best_rank = index, rank
    return best


def require_pyverbs() -> None:
    """Check that pyverbs can be found, without importing it.

    Raises:
        BackendUnavailableError: It cannot.
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


class Device:
    """An opened port.

    Attributes:
        port: Which.
        enums: pyverbs' constants.
        depth: Work requests that one queue pair holds.
        gather: Pieces of local memory that one work request may name.
        message_bytes: The most that one work request may move.
        context: pyverbs' own object for the device.
    """

    def __init__(self, port: Port, options: Mapping[str, Any]) -> None:
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
            self._gid = _gid_bytes(self.context.query_gid(port.number, port.gid_index))
        except self.error as error:
            raise BackendUnavailableError(f"RDMA device {port.device} cannot be opened: {error}") from error
        self.depth = min(options.get("depth", 512), limits.max_qp_wr)
        self.gather = min(_GATHER, limits.max_sge)
        self.completions = min(16384, limits.max_cqe)
        self.message_bytes = min(state.max_msg_sz, _MESSAGE_BYTES)
        self._lid = state.lid
        self._mtu = _MTUS.index(options["mtu"]) + 1 if "mtu" in options else state.active_mtu
        self._reads = max(1, min(_READS, limits.max_qp_rd_atom, limits.max_qp_init_rd_atom))
        self._ack_timeout = options.get("timeout", 14)
        self._retries = options.get("retry_cnt", 6)
        self._remote = e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE

    def access(self, *, local_write: bool, remote_read: bool = False, remote_write: bool = False) -> int:
        """Access flags for `register`."""
        e = self.enums
        chosen = e.IBV_ACCESS_LOCAL_WRITE if local_write else 0
        chosen |= e.IBV_ACCESS_REMOTE_READ if remote_read else 0
        return int(chosen | (e.IBV_ACCESS_REMOTE_WRITE if remote_write else 0))

    def register(self, address: int, nbytes: int, access: int) -> Any:
        """A memory region (`.lkey`, `.rkey`, `.close()`); closed with its last reference.

        Raises:
            RegistrationError: The device or the kernel refuses.
        """
        try:
            return pyverbs("mr").MR(self._domain, nbytes, access, address=address)
        except self.error as error:
            raise RegistrationError(
                f"{self.port.device} cannot register {nbytes} bytes: {error}. Where memory may not be locked, raise "
                "the limit (ulimit -l; memlock in /etc/security/limits.conf)"
            ) from error

    def queue_pair(self, completions: Any, *, depth: int) -> "QueuePair":
        """A new, unconnected queue pair.

        Raises:
            TransferError: The device has none left.
        """
        return QueuePair(self, completions, depth)

    def endpoint(self, number: int, first_packet: int) -> bytes:
        """This end of a queue pair, for the other end."""
        return ENDPOINT.pack(number, first_packet, self._gid, self._lid, self._mtu, self._reads)

    def attributes(self, mine: int, theirs: bytes) -> Any:
        """What takes a queue pair from reset to ready to send.

        Args:
            mine: Number of the first packet that this end sends.
            theirs: `endpoint` of the other end.
        """
        number, first_packet, gid, lid, mtu, reads = ENDPOINT.unpack(theirs)
        address = pyverbs("addr")
        port = self.port.number
        values = pyverbs("qp").QPAttr(port_num=port)
        values.qp_access_flags = self._remote
        values.path_mtu = min(self._mtu, mtu)
        values.dest_qp_num = number
        values.rq_psn, values.sq_psn = first_packet, mine
        values.max_rd_atomic = values.max_dest_rd_atomic = max(1, min(self._reads, reads))
        values.min_rnr_timer = _RNR_TIMER
        values.timeout, values.retry_cnt, values.rnr_retry = self._ack_timeout, self._retries, self._retries
        if self.port.routed:
            route = address.GlobalRoute(dgid=address.GID(_gid_text(gid)), sgid_index=self.port.gid_index, hop_limit=64)
            values.ah_attr = address.AHAttr(gr=route, is_global=1, port_num=port)
        else:
            values.ah_attr = address.AHAttr(dlid=lid, port_num=port)
        return values

    def close(self) -> None:
        """Close it with everything that was made from it. Idempotent."""
        self.context.close()


class QueuePair:
    """A reliable connection of a device; `connect` takes it from reset to ready to send."""

    def __init__(self, device: Device, completions: Any, depth: int) -> None:
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
            raise TransferError(f"{device.port.device} has no queue pair left: {error}") from error
        self.number: int = self._pair.qp_num

    @property
    def endpoint(self) -> bytes:
        """What the other end needs to connect."""
        return self._device.endpoint(self.number, self._first_packet)

    def connect(self, theirs: bytes) -> None:
        """Become ready to send to, and to be reached by, the other end.

        Raises:
            TransferError: The device refuses what the other end said of itself.
        """
        try:
            self._pair.to_rts(self._device.attributes(self._first_packet, theirs))
        except (self._device.error, ValueError) as error:
            raise TransferError(f"the queue pair cannot be connected: {error}") from error

    def post(self, first: Any) -> None:
        """Hand a chain of work requests to the device.

        Raises:
            TransferError: It refuses.
        """
        try:
            self._pair.post_send(first)
        except self._device.error as error:
            raise TransferError(f"{self._device.port.device} refuses work requests: {error}") from error

    def close(self) -> None:
        """Destroy it: nothing moves any more, and nothing completes. Idempotent."""
        self._pair.close()


def _gid_bytes(gid: Any) -> bytes:
    return bytes.fromhex(str(gid).replace(":", ""))


def _gid_text(gid: bytes) -> str:
    return ":".join(gid[at : at + 2].hex() for at in range(0, 16, 2))
