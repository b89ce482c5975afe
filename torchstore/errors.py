"""The errors of the store.

```
StoreError
├── StoreNotInitializedError        (RuntimeError)  no initialize() was done under this store name
├── StoreTimeoutError               (TimeoutError)  a wait for a version, a reader or a transfer timed out
├── KeyNotFoundError                (KeyError)      this key was never put, or it was deleted
│   ├── VersionNotFoundError                        the key is there, this version of it is not (any more)
│   └── PartiallyPublishedError                     shards are missing; the message names their boxes
├── VersionExistsError              (ValueError)    versions are immutable; this one is ready already
├── LateShareError                                  a rank's share of a step that was given up
├── OutOfStepError                                  the step of a rank is not known, or it is far ahead
├── MismatchError                   (ValueError)    what is stored does not fit what was requested
│   ├── LayoutMismatchError                         shapes, slices or placements
│   │   ├── UnsupportedPlacementError               Partial, or a placement that this store does not know
│   │   ├── BlockAlignmentError                     a shard that cuts the blocks in which it is to be quantized
│   │   ├── DestinationOverlapError                 two entries that would be read into the same memory
│   │   └── CoverageError                           a hole: some box of the destination has no source
│   ├── DTypeMismatchError          (TypeError)     dtypes: the store never converts silently
│   ├── KindMismatchError           (TypeError)     an object where a tensor was requested, or the reverse
│   ├── StateDictMismatchError                      names missing on one side
│   ├── ShareMismatchError                          shares of one step that do not fit together
│   │   ├── ShareDTypeMismatchError                 a rank has another dtype; also a DTypeMismatchError
│   │   └── ShareLayoutMismatchError                a rank has another shape; also a LayoutMismatchError
│   ├── ReplicaMismatchError                        replicas of one box with different bytes
│   ├── AdapterBaseMismatchError                    an adapter of other weights than those of the reader
│   └── LoadPlanMismatchError                       a plan that was recorded for another model or checkpoint
├── LoadPlanFormatError             (ValueError)    a file that is not a plan, or one of another release
├── RecordingError                  (RuntimeError)  a model's load_weights cannot be recorded
├── SecondSetError                  (RuntimeError)  an engine cannot have a second set of weights, or use it
├── SourceChangedError                              direct mode: the publisher withdrew it while it was read
├── PublisherLostError                              direct mode: the process that owns the bytes is gone
├── ChecksumError                                   the bytes that arrived are not those that were published
├── NotCertifiedError                               a version, or a part of it, was put without a certificate
├── ProofError                                      what a process holds is not what a certificate says
├── CertificateFormatError          (ValueError)    a file that is not a certificate, or one of another release
├── VolumeLostError                                 the process that kept the copies is gone
├── VolumeFullError                                 a version is larger than all that a volume may hold
├── JournalError                                    a change cannot be written to the journal, or not be read
├── ControllerLostError                             the controller is gone, and no other one replaces it
├── MirrorError                                     versions in a folder or an object store
│   ├── MirrorFormatError           (ValueError)    a file that is not a manifest
│   ├── MirrorSignatureError                        a file that the publisher has not signed
│   ├── MirrorRolledBackError                       it has an older version than before
│   ├── MirrorDamagedError                          a chunk is missing, or holds other bytes
│   └── MirrorUnreachableError                      the folder or object store does not answer, or refuses
├── StoreRendezvousError                 (RuntimeError)  the ranks of an SPMD job did not find each other
│   └── RankEnvironmentError        (ValueError)    the environment does not say which rank this is
├── BlockingCallError               (RuntimeError)  a function of torchstore.sync on the event loop of an async actor
└── StrategyError      (ValueError, RuntimeError)   no volume for this client, or volumes that do not fit
```

Errors cross process boundaries inside messages, so each of them pickles by its attributes.
"""

from __future__ import annotations

from typing import Any


class StoreError(Exception):
    """Root of the errors of the store."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions rebuild from `args` by default, which fails for constructors with keywords.
        return _rebuild, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        # KeyError would print the repr of its only argument.
        return str(self.args[0]) if self.args else type(self).__name__


def _rebuild(kind: type[StoreError], args: tuple[Any, ...], state: dict[str, Any]) -> StoreError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class StoreNotInitializedError(StoreError, RuntimeError):
    """No store of this name: call ``initialize(store_name=...)`` in the script first."""

    def __init__(self, store_name: str) -> None:
        super().__init__(
            f"the store {store_name!r} is not initialized: await torchstore.initialize("
            f"store_name={store_name!r}) in the script before the first put or get"
        )
        self.store_name = store_name


class BlockingCallError(StoreError, RuntimeError):
    """A function of `torchstore.sync` was called on a thread whose event loop it would block."""

    def __init__(self, function: str) -> None:
        super().__init__(
            f"torchstore.sync.{function} would block the event loop that this code runs on: "
            f"write `await torchstore.{function}(...)` here"
        )
        self.function = function


class StoreTimeoutError(StoreError, TimeoutError):
    """An operation did not end within its timeout; the message says what it was waiting for."""


class KeyNotFoundError(StoreError, KeyError):
    """Nothing is stored under this key."""

    def __init__(self, key: str, message: str | None = None) -> None:
        super().__init__(message or f"no value under the key {key!r}")
        self.key = key


class VersionNotFoundError(KeyNotFoundError):
    """The key exists, but not the requested version of it."""

    def __init__(self, key: str, version: int, available: tuple[int, ...]) -> None:
        kept = ", ".join(map(str, available)) or "none"
        super().__init__(key, f"version {version} of {key!r} is not kept; ready versions: {kept}")
        self.version = version
        self.available = available


class PartiallyPublishedError(KeyNotFoundError):
    """Some ranks have put their shards, others have not; nothing of the version is visible yet.

    Attributes:
        version: The version that is being assembled.
        missing: A line for each thing that is missing (shares of ranks, a box of a tensor).
    """

    def __init__(self, key: str, version: int, missing: tuple[str, ...], hint: str = "") -> None:
        shown = "; ".join(missing[:4]) + ("; ..." if len(missing) > 4 else "")
        advice = f" ({hint})" if hint else ""
        what = f"version {version} of {key!r} is only partially committed: not all of its ranks have put"
        super().__init__(key, f"{what}; missing: {shown}{advice}")
        self.version = version
        self.missing = missing


class VersionExistsError(StoreError, ValueError):
    """This version is complete; a complete version never changes."""

    def __init__(self, key: str, version: int, newest: int) -> None:
        super().__init__(
            f"version {version} of {key!r} cannot be put: versions are immutable and the newest one is "
            f"{newest}; give a higher number, or none"
        )
        self.key = key
        self.version = version
        self.newest = newest


class LateShareError(StoreError):
    """A rank has put its share of a step that was given up; the share was refused.

    Attributes:
        rank: The rank that has put it.
        size: Size of the rank's group.
        step: The number of this put among those of the key by this rank.
        reason: Why the step was given up.
    """

    def __init__(self, key: str, rank: int, size: int, step: int, reason: str) -> None:
        super().__init__(
            f"rank {rank} of {size} is too late with its share of step {step} of {key!r}: {reason}. Where ranks "
            "have died or were started again, make a new process group (or give the group a new name: "
            "publisher=Origin(group, rank, size)), or say which version it is: version=..."
        )
        self.key = key
        self.rank = rank
        self.size = size
        self.step = step
        self.reason = reason


class OutOfStepError(StoreError):
    """A rank is at another step than the others can be; the message names ranks and steps."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key!r}: {message}")
        self.key = key


class MismatchError(StoreError, ValueError):
    """What is stored does not fit what was requested."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key!r}: {message}" if key else message)
        self.key = key


class LayoutMismatchError(MismatchError):
    """Shapes, slices or placements do not fit together."""


class UnsupportedPlacementError(LayoutMismatchError):
    """A placement that has no bytes of the tensor (Partial), or one that is not known here."""


class BlockAlignmentError(LayoutMismatchError):
    """A publisher's shard cuts blocks that share a scale (``transfer_dtype=BlockFP8()``, `MXFP8`, `NVFP4`).

    Attributes:
        block: Rows and columns that share a scale.
        box: The shard, as (offsets, shape) in the global tensor.
    """

    def __init__(
        self, key: str, block: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...], advice: str
    ) -> None:
        super().__init__(
            key,
            f"the shard [offsets {offsets}, shape {shape}] cuts blocks of {block}, whose scale depends on all of "
            f"their elements; {advice}",
        )
        self.block = block
        self.box = (offsets, shape)


class DestinationOverlapError(LayoutMismatchError):
    """Two entries would be read into memory that they share, from different sources; nothing has been read.

    Attributes:
        names: Names of both entries.
    """

    def __init__(self, key: str, first: str, second: str) -> None:
        super().__init__(
            key,
            f"{first!r} and {second!r} would be read into the same memory, but are not stored as one tensor: "
            "the last one would overwrite the other; read one of them only, or give them memory of their own",
        )
        self.names = (first, second)


class CoverageError(LayoutMismatchError):
    """No source holds some of the bytes that the destination needs.

    Attributes:
        holes: The boxes without a source, each as (offsets, shape) in the global tensor.
    """

    def __init__(self, key: str, holes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> None:
        shown = ", ".join(f"[offsets {offsets}, shape {shape}]" for offsets, shape in holes[:3])
        more = f" and {len(holes) - 3} more" if len(holes) > 3 else ""
        super().__init__(key, f"no source holds {shown}{more}")
        self.holes = holes


class DTypeMismatchError(MismatchError, TypeError):
    """Stored and requested dtypes differ. Convert before the put or after the get."""


class KindMismatchError(MismatchError, TypeError):
    """An object is stored where a tensor was requested, or a tensor where a state dict was."""


class StateDictMismatchError(MismatchError):
    """The names of the stored state dict and of the given one differ (``strict=True``).

    Attributes:
        missing: Names that were requested and are not stored.
        unexpected: Names that are stored and were not requested.
    """

    def __init__(self, key: str, missing: tuple[str, ...], unexpected: tuple[str, ...]) -> None:
        def shorten(names: tuple[str, ...]) -> str:
            return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

        parts = [f"not stored: {shorten(missing)}"] if missing else []
        parts += [f"stored but not in the given state dict: {shorten(unexpected)}"] if unexpected else []
        super().__init__(key, "; ".join(parts) + " (strict=False reads those that are there)")
        self.missing = missing
        self.unexpected = unexpected


class ShareMismatchError(MismatchError):
    """The shares that ranks have put of one step do not fit together; the step is given up.

    Attributes:
        ranks: The ranks that describe a tensor differently; empty if something else is wrong.
        others: The ranks from which they differ.
    """

    def __init__(self, key: str, message: str, ranks: tuple[int, ...] = (), others: tuple[int, ...] = ()) -> None:
        super().__init__(key, message)
        self.ranks = ranks
        self.others = others


class ShareDTypeMismatchError(ShareMismatchError, DTypeMismatchError):
    """A rank has put a tensor in another dtype than the others of its group; the step is given up."""


class ShareLayoutMismatchError(ShareMismatchError, LayoutMismatchError):
    """A rank has put a tensor of another (global) shape than the others of its group; the step is given up."""


class ReplicaMismatchError(MismatchError):
    """Replicas of one box differ (``verify_replicas=True``); the step is given up.

    Attributes:
        key: The key of the value.
        name: The name of the tensor.
        box: (offsets, shape) in the global tensor.
        ranks: Two ranks that hold different bytes of it.
    """

    def __init__(
        self, key: str, name: str, box: tuple[tuple[int, ...], tuple[int, ...]], ranks: tuple[int, int]
    ) -> None:
        super().__init__(
            key,
            f"ranks {ranks[0]} and {ranks[1]} hold different bytes of {name or 'the tensor'}[offsets {box[0]}, shape "
            f"{box[1]}], which must be replicas",
        )
        self.name = name
        self.box = box
        self.ranks = ranks


class AdapterBaseMismatchError(MismatchError):
    """An adapter belongs to another version of the base than the one that it is read for; nothing has been read.

    Attributes:
        key: The key of the adapter.
        version: The version of the adapter.
        base: The base that it belongs to, as (key, version).
        wanted: The base that the reader has, as (key, version).
    """

    def __init__(self, key: str, version: int, base: tuple[str, int], wanted: tuple[str, int]) -> None:
        super().__init__(
            key,
            f"version {version} of the adapter belongs to version {base[1]} of {base[0]!r}, and this reader holds "
            f"version {wanted[1]} of {wanted[0]!r}: get that base, or another version of the adapter",
        )
        self.version = version
        self.base = base
        self.wanted = wanted


class LoadPlanMismatchError(MismatchError):
    """A plan does not fit the model that it should fill, or what is stored; nothing has been read.

    Attributes:
        key: The key of the value; empty if the plan does not fit the model.
        differences: A line for each parameter or checkpoint tensor that differs.
    """

    def __init__(self, key: str, differences: tuple[str, ...]) -> None:
        shown = "; ".join(differences[:4]) + (f"; and {len(differences) - 4} more" if len(differences) > 4 else "")
        other = "what is stored" if key else "this model"
        super().__init__(key, f"the plan was not recorded for {other}: {shown}; record it again")
        self.differences = differences


class LoadPlanFormatError(StoreError, ValueError):
    """A file is not a plan of `record_plan`, or has another version of the format; the message says where."""

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}; record the plan again")
        self.path = path
        self.line = line


class RecordingError(StoreError, RuntimeError):
    """A model's load_weights cannot be recorded: it failed without values, or fills parameters from elsewhere.

    Attributes:
        tensor: The last checkpoint tensor that was passed to it; empty before the first.
    """

    def __init__(self, tensor: str, reason: str) -> None:
        super().__init__(f"load_weights cannot be recorded{f' (at {tensor!r})' if tensor else ''}: {reason}")
        self.tensor = tensor


class SecondSetError(StoreError, RuntimeError):
    """An inference engine cannot have a second set of weights, or cannot compute with it; it keeps its weights."""


class SourceChangedError(StoreError):
    """Direct mode: the publisher withdrew the version while it was being read.

    The destination may hold a mixture of two versions: do not use it; get the newest version again.
    """

    def __init__(self, key: str, version: int, reason: str) -> None:
        super().__init__(f"version {version} of {key!r} changed while it was being read: {reason}")
        self.key = key
        self.version = version


class PublisherLostError(StoreError):
    """Direct mode: a process whose memory holds part of the version is gone, and the bytes with it."""

    def __init__(self, key: str, version: int, reason: str) -> None:
        super().__init__(
            f"version {version} of {key!r} was published in direct mode and lived in its publisher's memory, "
            f"which is gone ({reason}); put it again, or use mode='snapshot', whose versions outlive the publisher"
        )
        self.key = key
        self.version = version


class ChecksumError(StoreError):
    """Some bytes that arrived are not those that were published (``checksum=True``). The destination holds them.

    Attributes:
        key: The key of the value, with the name of the tensor.
        box: The first wrong cell, as (offsets, shape) in the global tensor.
        wrong: How many cells of the same block are wrong.
    """

    def __init__(
        self, key: str, version: int, offsets: tuple[int, ...], shape: tuple[int, ...], wrong: int = 1
    ) -> None:
        more = f" and {wrong - 1} more" if wrong > 1 else ""
        super().__init__(
            f"version {version} of {key!r} did not arrive as it was published: the checksum of "
            f"[offsets {offsets}, shape {shape}]{more} differs; get it again, or put it again if that fails too"
        )
        self.key = key
        self.version = version
        self.box = (offsets, shape)
        self.wrong = wrong


class NotCertifiedError(StoreError):
    """A version has no certificate: at least some ranks have put it without ``certify=True``."""

    def __init__(self, key: str, version: int, reason: str) -> None:
        super().__init__(f"version {version} of {key!r} has no certificate: {reason}")
        self.key = key
        self.version = version


class ProofError(StoreError):
    """What a process holds is not what a certificate says, or cannot be compared with it.

    Attributes:
        proof: The report: a `torchstore.Proof`.
        name: The name of the first wrong tensor in the certificate (for padding, that of the parameter); empty if none
            is wrong, but some cannot be proved.
        parameter: The parameter of the model that holds it; without a plan, the same name.
        box: The first wrong tile, as (offsets, shape) in the whole tensor; None if none is wrong.
    """

    def __init__(
        self,
        message: str,
        proof: Any,
        name: str = "",
        parameter: str = "",
        box: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(message)
        self.proof = proof
        self.name = name
        self.parameter = parameter
        self.box = box


class CertificateFormatError(StoreError, ValueError):
    """A file is not a certificate, or has another version of the format; the message says where."""

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}; save the certificate again")
        self.path = path
        self.line = line


class VolumeLostError(StoreError):
    """A storage volume died; the versions that it held are lost.

    Attributes:
        volume: Its id, as the strategy names it.
    """

    def __init__(self, volume: str, reason: str) -> None:
        super().__init__(f"storage volume {volume!r} is lost: {reason}; put again, or initialize a new store")
        self.volume = volume


class VolumeFullError(StoreError):
    """A version does not fit into a volume: not at the moment, or, if a put raises it, never.

    Attributes:
        volume: Its id, as the strategy names it.
        nbytes: Bytes that this process' part of the version needs.
        limit: Bytes that the volume may hold (``initialize(volume_nbytes=...)``).
    """

    def __init__(self, volume: str, nbytes: int, limit: int) -> None:
        super().__init__(
            f"{nbytes:,} bytes do not fit into storage volume {volume!r}, which may hold {limit:,}; raise "
            "initialize(volume_nbytes=...), use more volumes, or mode='direct'"
        )
        self.volume = volume
        self.nbytes = nbytes
        self.limit = limit


class JournalError(StoreError):
    """A change of a store could not be written to its journal, so it was not made; or the journal cannot be read."""


class ControllerLostError(StoreError):
    """The controller of a store has died too often, or its journal cannot be read: the store is lost."""


class MirrorError(StoreError):
    """A file of a mirror (a folder or an object store with versions of a state dict) cannot be used.

    Attributes:
        path: The path of the file.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class MirrorFormatError(MirrorError, ValueError):
    """A signed file of a mirror is not what this release writes."""


class MirrorSignatureError(MirrorError):
    """A file of a mirror was not signed with the publisher's key: its content was not used."""


class MirrorRolledBackError(MirrorError):
    """A mirror has an older version than before, or one version under the name of another.

    Attributes:
        version: The version that it has now.
        seen: The newest version that this reader has seen.
    """

    def __init__(self, path: str, version: int, seen: int) -> None:
        super().__init__(
            path,
            f"it says version {version}, and {seen} was there before: old files were put back; nothing was read",
        )
        self.version = version
        self.seen = seen


class MirrorDamagedError(MirrorError):
    """A chunk of a version is missing, truncated or altered: nothing of the version has been used."""


class MirrorUnreachableError(MirrorError):
    """The folder or object store of a mirror could not be read or written; its own error is the cause."""


class StoreRendezvousError(StoreError, RuntimeError):
    """The ranks of an SPMD job did not find each other, or one of them failed; the message says which."""


class RankEnvironmentError(StoreRendezvousError, ValueError):
    """Neither the environment nor the arguments say which rank this is; the message says why."""


class StrategyError(StoreError, ValueError, RuntimeError):
    """The strategy finds no volume for this client, or does not fit the existing volumes."""
