"""The messages between clients and the controller of a store, apart from manifests and bindings.

A process that already has a manifest or a binding gets only its id. Some answers are errors that users never see: they
tell the sender of the message what to send instead.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from skipper.control import ActorMesh
from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.algebra.manifest import Binding, Digests, Manifest
from skipper.torchstore.errors import StoreError
from skipper.torchstore.peers.shm_value_board import BoardPlace
from skipper.torchstore.peers.volume import StorageVolume
from skipper.torchstore.protocol.origin import ALONE, Turn
from skipper.torchstore.protocol.strategy import TorchStoreStrategy
from skipper.torchstore.support.compact import compact
from skipper.torchstore.support.process import ProcessId
from skipper.torchstore.tensors.certifying import Certify
from skipper.torchstore.tensors.tiles import TensorsTiles


class UnknownIdError(StoreError):
    """A publication named a manifest or binding that is not remembered here: send it whole."""


class ArenaFreedError(StoreError):
    """A publication's arena was freed before it arrived, because its key was deleted: write it again elsewhere."""

    def __init__(self, arena: str) -> None:
        super().__init__(f"arena {arena} has been freed")
        self.arena = arena


class StaleClientError(StoreError):
    """The store has been initialized again since this client was made, or has taken it for dead: make a new one."""


CLIENTS_BITS = 32
"""The low bits of a client's number; the higher bits say to which of the stores of its name it belongs."""


RequestNumber = tuple[int, int]
"""The number of a request, or 0; and the number of the client's oldest request that still waits for an answer."""

UNNUMBERED: RequestNumber = (0, 0)
"""The number of a request that is sent only once."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The options with which a store was initialized.

    Attributes:
        keep_versions: The default number of ready versions that each key keeps.
        checksum: Whether puts take checksums by default.
        copies: The default number of volumes that store each part.
        certify: Whether, and in which dtypes, state dicts are certified by default.
        journal: Whether the store survives its controller.
        first_client: The number of its first client, above those of earlier stores of this name.
    """

    keep_versions: int = 1
    checksum: bool = False
    copies: int = 1
    certify: Certify = False
    journal: bool = False
    first_client: int = 1


Controller = ActorMesh[Any]
"""The controller of a store, for calls: a `torchstore.controller.actor.StoreController`."""


@dataclass(frozen=True, slots=True)
class Successor:
    """A controller of a store with a journal; ``life`` is its number, above those of earlier controllers."""

    life: int
    actor: Controller
    process: ProcessId


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """The information about a store that a client needs.

    Attributes:
        volumes: The volumes, by the names that the strategy gives them.
        processes: The process of each volume.
        copies: The default number of volumes that store each part.
        certify: Whether, and in which dtypes, state dicts are certified by default.
        client: A number for the client that asked. It is shorter than the identity of its process.
        checksum: Whether puts take checksums by default.
        controller: The process of the controller.
        successor: The active controller, if the store has a journal; None: the one that was asked.
    """

    strategy: TorchStoreStrategy
    volumes: dict[str, ActorMesh[StorageVolume]]
    processes: dict[str, ProcessId]
    client: int
    checksum: bool
    controller: ProcessId
    copies: int = 1
    certify: Certify = False
    successor: Successor | None = None


@compact
@dataclass(frozen=True, slots=True)
class Change:
    """The changes of a publication since the previous one of the same process.

    Attributes:
        base: The stamp of the previous publication.
        cells: The changed cells, encoded by `delta.pack_flags`.
    """

    base: str
    cells: bytes


@compact
@dataclass(frozen=True, slots=True)
class Publication:
    """One rank's contribution to one version of one key.

    Attributes:
        version: The number of the version; None: the next one.
        manifest: The manifest, or only its id if the controller has it already.
        binding: The same for the binding; None if there are no tensors.
        generation: Direct mode: the value of the seal while this version is published.
        objects: Pickled dict of the entries that are not tensors.
        inline: The whole value, encoded by `values.inline_tensor`, instead of all the other fields.
        keep: How many ready versions the key keeps from now on; None: as many as before.
        stamp: A unique name, if this publication may be the base of the next one's delta; otherwise "".
        change: Its changes since its base, if they are known.
        turn: The publisher, and the number of its put.
        digests: The digest of each box that the publisher has, if replicas are compared.
        copies: More bindings with the same bytes, in other volumes; or their ids.
        tiles: The tiles of its tensors, if the version is certified.
    """

    key: str
    version: int | None
    writer: ProcessId
    manifest: Manifest | str | None = None
    binding: Binding | str | None = None
    generation: int = 0
    objects: bytes = b""
    inline: bytes = b""
    keep: int | None = None
    stamp: str = ""
    change: Change | None = None
    turn: Turn = ALONE
    digests: Digests = field(default_factory=dict)
    copies: tuple[Binding | str, ...] = ()
    tiles: TensorsTiles | None = None


@compact
@dataclass(frozen=True, slots=True)
class Retired:
    """Memory that no version uses any more.

    Attributes:
        volume: The volume of an arena; "" for the writer's own memory (direct mode), which may be unregistered.
        gone: The key was deleted and its arena freed; otherwise the arena may be written again.
    """

    binding: str
    volume: str
    gone: bool = False


@compact
@dataclass(frozen=True, slots=True)
class Published:
    """The controller's answer to a publication.

    Attributes:
        version: The number of its version.
        ready: Whether this contribution completed the version.
        step: The step of the writer's group to which it belongs; 0 if the writer publishes alone.
        retired: Memory of this writer that no version uses any more.
    """

    version: int
    ready: bool
    step: int = 0
    retired: tuple[Retired, ...] = ()


@compact
@dataclass(frozen=True, slots=True)
class Share:
    """One publisher's part of a granted version; ids replace the records that the reader has already.

    Attributes:
        objects: Pickled dict of the publisher's entries that are not tensors, unless an earlier share has the same
            ones.
        stamp: The stamp of the publication.
        change: The changes of the publication.
        copies: The copies of the publication.
    """

    manifest: Manifest | str
    binding: Binding | str | None
    generation: int
    writer: ProcessId
    objects: bytes = b""
    stamp: str = ""
    change: Change | None = None
    copies: tuple[Binding | str, ...] = ()


class Shares(tuple[Share, ...]):
    """Shares that go to many readers: they are pickled once, and arrive as a plain tuple."""

    _packed: bytes = b""

    def __reduce__(self) -> tuple[Any, ...]:
        self._packed = self._packed or pickle.dumps(tuple(self), protocol=5)
        return pickle.loads, (self._packed,)


@compact
@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to read one version until `lease` is returned.

    Attributes:
        lease: The number of the lease; 0 if nothing has to be returned (inline values).
        shares: The shares of all publishers.
        item: The name inside the value to which the key refers ("" for the whole value).
        waited_s: How long the controller waited for the version.
        slowest_rank: The rank that put its part last, as a tuple of one, if there are several.
        spread_s: The time between the first rank's put and the last one's.
        peer_copy: The copy of another reader to read from, if there is one.
        place: The place where the controller posts the newest inline value of the key, if it does.
        overwritten: Names in a state dict whose newest values have their own keys; see `torchstore.controller.index`.
        singles: Grants of these values, leased at the same moment.
    """

    key: str
    version: int
    lease: int = 0
    shares: tuple[Share, ...] = ()
    inline: bytes = b""
    item: str = ""
    waited_s: float = 0.0
    slowest_rank: Ints = ()
    spread_s: float = 0.0
    peer_copy: Share | None = None
    place: BoardPlace | None = None
    overwritten: tuple[str, ...] = ()
    singles: tuple[Grant, ...] = ()


@compact
@dataclass(frozen=True, slots=True)
class Selector:
    """Which version: the newest (``exact`` and ``newer_than`` None), an exact one, or the next after one.

    Attributes:
        beside: A lease on the exact version; with it, the version is found even after newer ones have replaced it.
    """

    exact: int | None = None
    newer_than: int | None = None
    beside: int | None = None


NEWEST = Selector()


@compact
@dataclass(frozen=True, slots=True)
class Wanted:
    """A reader's request for one key.

    Attributes:
        known: The ids of manifests and bindings that need not be sent again.
        read_group: The id of the boxes that the reader requests, if it takes part in peer reads (see
        `torchstore.controller.peer_read_scheduler`); otherwise "".
        patience_s: How long it waits for another reader's copy before it reads from the publisher.
    """

    key: str
    selector: Selector = NEWEST
    known: tuple[str, ...] = ()
    read_group: str = ""
    patience_s: float = 0.0
