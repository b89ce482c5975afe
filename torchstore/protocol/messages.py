"""The messages between clients and the controller of a store, apart from manifests and bindings.

A process that already has a manifest or a binding gets only its id. Some answers are errors that only the other side
of the same message sees: they say what to send instead.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skipper.control import ActorMesh
from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.algebra.manifest import Binding, Digests, Manifest
from skipper.torchstore.errors import StoreError
from skipper.torchstore.peers.shm_value_board import BoardPlace
from skipper.torchstore.protocol.origin import ALONE, Turn
from skipper.torchstore.protocol.strategy import TorchStoreStrategy
from skipper.torchstore.support.compact import compact
from skipper.torchstore.support.process import ProcessId
from skipper.torchstore.tensors.certifying import Certify
from skipper.torchstore.tensors.tiles import TensorsTiles

if TYPE_CHECKING:
    from skipper.torchstore.peers.volume import StorageVolume


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
"""Of a client's number; those above them say which of the stores of its name it belongs to."""


RequestNumber = tuple[int, int]
"""The number of a request, or 0; and of the oldest one of the client for which it still waits."""

UNNUMBERED: RequestNumber = (0, 0)
"""It is sent once."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a store was initialized.

    Attributes:
        keep_versions: How many ready versions each key keeps, where no put of it says so.
        checksum: Whether puts take checksums where they do not say.
        copies: How many volumes hold each part of what is put, where a put does not say.
        certify: Whether, and in which dtypes, state dicts are certified where their put does not say.
        journal: Whether the store survives its controller.
        first_client: The number of its first client, above those of the stores of this name before it.
    """

    keep_versions: int = 1
    checksum: bool = False
    copies: int = 1
    certify: Certify = False
    journal: bool = False
    first_client: int = 1


Controller = ActorMesh[Any]
"""The controller of a store, as others call it: a `torchstore.controller.actor.StoreController`."""


@dataclass(frozen=True, slots=True)
class Successor:
    """A controller of a store with a journal; ``life`` is its number, above those of earlier controllers."""

    life: int
    actor: Controller
    process: ProcessId


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What a client needs to know about a store.

    Attributes:
        volumes: By the names that the strategy gives them.
        processes: In which each volume lives.
        copies: How many volumes hold each part of what is put, where a put does not say.
        certify: Whether, and in which dtypes, state dicts are certified where their put does not say.
        client: A number for the client that asked. It is shorter than the identity of its process.
        checksum: Whether puts take checksums where they do not say.
        controller: In which process the controller lives.
        successor: The controller itself, where the store has a journal; None: it is the one that was asked.
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
    """The changes of a publication from the previous one of the same process.

    Attributes:
        base: The stamp of that one.
        cells: Which cells, as `delta.pack_flags` makes it.
    """

    base: str
    cells: bytes


@compact
@dataclass(frozen=True, slots=True)
class Publication:
    """One rank's contribution to one version of one key.

    Attributes:
        version: None: the next one.
        manifest: The manifest, or only its id where the controller is known to have it.
        binding: The same for the binding; None when there are no tensors.
        generation: Direct mode: what the seal says while this version is the published one.
        objects: Pickled dict of the entries that are not tensors.
        inline: The whole value as `values.inline_tensor` makes it, instead of all the other fields.
        keep: How many ready versions the key keeps from now on; None: as many as before.
        stamp: Unique, if this publication may be the base of the next one's delta; else "".
        change: What it changes of its base, if that is known.
        turn: Whose put it is, and which of them.
        digests: Of each box that the publisher has, where replicas are to be compared.
        copies: More bindings that hold the same bytes, in other volumes; or their ids.
        tiles: Of its tensors, where the version is to be certified.
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
        volume: Of an arena; "" for the writer's own memory (direct mode), which it need not keep registered.
        gone: The key was deleted, and an arena of it has been freed; otherwise it may be written again.
    """

    binding: str
    volume: str
    gone: bool = False


@compact
@dataclass(frozen=True, slots=True)
class Published:
    """The controller's answer to a publication.

    Attributes:
        version: The number that it got.
        ready: Whether this contribution completed the version.
        step: The step of the writer's group that it belongs to; 0 where the writer publishes alone.
        retired: Memory of this writer that no version uses any more.
    """

    version: int
    ready: bool
    step: int = 0
    retired: tuple[Retired, ...] = ()


@compact
@dataclass(frozen=True, slots=True)
class Share:
    """One publisher's part of a granted version; ids stand for what the reader has said that it knows.

    Attributes:
        objects: Pickled dict of the publisher's entries that are not tensors, unless an earlier share has
            the same ones.
        stamp: As that of the publication.
        change: As that of the publication.
        copies: As those of the publication.
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
        lease: 0 if nothing has to be returned (inline values).
        shares: Of every publisher.
        item: The name inside the value that the key led to ("" for the whole).
        waited_s: How long the controller had to wait for the version.
        slowest_rank: The rank that put its part last, as a tuple of one, where there are several.
        spread_s: How long after the first one it did.
        peer_copy: The copy of another reader to read from, if there is one.
        place: Where the controller posts the newest inline value of the key, if it does.
        overwritten: Names in a state dict whose newest values are under keys of their own; see
            `torchstore.controller.index`.
        singles: Grants of these, leased in the same moment.
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
    """Which version: the newest (``exact`` and ``newer_than`` None), that one, or the next after one.

    Attributes:
        beside: A lease on the exact version, which is found by it also when newer ones have taken its place.
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
        known: Ids of manifests and bindings that need not be sent again.
        read_group: Names what the reader wants, if it takes part in feeding others (see
            `torchstore.controller.peer_read_scheduler`); "" if it does not.
        patience_s: How long it waits for another one's copy before it goes to the publisher.
    """

    key: str
    selector: Selector = NEWEST
    known: tuple[str, ...] = ()
    read_group: str = ""
    patience_s: float = 0.0
