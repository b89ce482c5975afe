"""Memory of this process: a plain copy, with the same checks and errors as between processes."""

import operator
from collections.abc import Sequence

from skipper.dataplane._copy import OK, guarded_atomic, guarded_copy
from skipper.dataplane.backends.base import Backend, BackendStatus, Peer, Remote, Transfer
from skipper.dataplane.copying import CopyPool, CopyTransfer, at_once, copy_by_gpu, dropped, parts_between, parts_of
from skipper.dataplane.errors import BackendUnavailableError
from skipper.dataplane.handle import Card, Handle, Sections
from skipper.dataplane.layout import Rows
from skipper.dataplane.operation import DONE, Atomic, AtomicKind, FetchOperation, Operation
from skipper.dataplane.regions import HOST, Region
from skipper.dataplane.registration import Registration, RegistrationTable

_REGION = operator.attrgetter("region")


class LocalBackend(Backend):
    """Always usable; reaches the memory in the registration table of this process."""

    name = "local"
    number = 0

    def __init__(self, registrations: RegistrationTable, pool: CopyPool) -> None:
        self._peer = LocalPeer(registrations, pool)

    def status(self) -> BackendStatus:
        """Always usable."""
        return BackendStatus(self.name, True, "memory of this process", ("host", "cuda"))

    def obstacle(self, handle: Handle) -> str | None:
        """None, since the selector asks only for handles of this process."""
        return None

    def connect(self, card: Card) -> Peer:
        """The same object every time: there is only one such owner."""
        return self._peer

    def export(self, registration: Registration) -> Sections | None:
        """None, since a handle needs no section in its own process."""
        return None


class LocalPeer(Peer):
    """This process as an owner."""

    backend = "local"

    def __init__(self, registrations: RegistrationTable, pool: CopyPool) -> None:
        self._registrations = registrations
        self._pool = pool

    def usable(self) -> bool:
        """Always."""
        return True

    def close(self) -> None:
        """Nothing to release."""

    def resolve(self, handle: Handle) -> Remote:
        """Find the registration, with which the whole handle must agree."""
        registration = self._registrations.of(handle)
        region = None if registration is None else registration.region
        if registration is None or region is None:
            raise dropped(handle)
        return Remote(handle, region.address, registration.epoch.address, registration)

    def copy(self, local: Region, remote: Remote, offset: int, *, to_remote: bool, timeout: float) -> Operation:
        """See `Peer`."""
        region = remote.key.region  # pins the memory until this returns, whatever other threads drop
        if region is None:
            return Operation.failed(dropped(remote.handle))
        address = remote.address + offset
        if address < local.address + local.nbytes and local.address < address + local.nbytes:
            raise ValueError("source and destination overlap")
        on_host = local.kind is HOST and region.kind is HOST
        if not on_host:
            operation = copy_by_gpu(local, remote, address, (region.kind, region.device), None, to_remote=to_remote)
            if operation is not None:
                return operation
        if not on_host or not at_once(local.nbytes):
            parts = parts_between(local.address, address, local.nbytes, on_host=on_host)
            return self._transfer(parts, (remote,), (local,), to_remote).submit(timeout)
        status = guarded_copy(local.address, address, local.nbytes, to_remote, remote.word, remote.handle.epoch, -1)
        return DONE if status == OK else Operation.failed(dropped(remote.handle))

    def compile(self, rows: Rows, remotes: Sequence[Remote], locals_: Sequence[Region], *, to_remote: bool) -> Transfer:
        """See `Peer`."""
        on_host = locals_[0].kind is HOST and all(remote.handle.kind is HOST for remote in remotes)
        return self._transfer(parts_of(rows, on_host=on_host), remotes, locals_, to_remote)

    def atomic(self, remote: Remote, offset: int, atomic: Atomic, *, timeout: float) -> FetchOperation:
        """See `Peer`. Also atomic with CPU operations on that word in any process that maps it."""
        region = remote.key.region  # pins the memory until this returns
        if region is None:
            return FetchOperation.failed(dropped(remote.handle))
        if region.kind is not HOST:
            return FetchOperation.failed(BackendUnavailableError("atomic operations reach host memory only"))
        swap = atomic.kind is AtomicKind.COMPARE_AND_SWAP
        status, previous = guarded_atomic(
            swap, remote.address + offset, atomic.operand, atomic.compare, remote.word, remote.handle.epoch, -1
        )
        if status == OK:
            return FetchOperation.succeeded(previous)
        return FetchOperation.failed(dropped(remote.handle))

    def _transfer(
        self, parts: list[Rows], remotes: Sequence[Remote], locals_: Sequence[Region], to_remote: bool
    ) -> CopyTransfer:
        registrations = [remote.key for remote in remotes]

        def pin() -> tuple[Region, ...]:
            regions = tuple(map(_REGION, registrations))  # no Python code for each: there may be thousands
            if not all(regions):
                raise dropped(remotes[regions.index(None)].handle)
            return regions

        return CopyTransfer(parts, remotes, locals_, to_remote=to_remote, pool=self._pool, watch=None, pin=pin)
