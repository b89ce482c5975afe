"""The requests of callers, checked, and how a single stored value becomes the requested one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch

from skipper.control.model.bounds import check_flag
from skipper.torchstore.algebra.key_names import check_key
from skipper.torchstore.algebra.manifest import Mode, TensorItem
from skipper.torchstore.algebra.slices import TensorSlice
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S
from skipper.torchstore.clients.staging import TransferDtype, check_transfer_dtype
from skipper.torchstore.errors import DTypeMismatchError, KindMismatchError, LayoutMismatchError
from skipper.torchstore.protocol.messages import NEWEST, Selector
from skipper.torchstore.protocol.origin import Origin, read_publisher
from skipper.torchstore.tensors.cells import region
from skipper.torchstore.tensors.certifying import Certify, check_certify
from skipper.torchstore.tensors.local_tensors import LocalTensor, check_destination, describe, describe_slice
from skipper.torchstore.tensors.naming import NameMap
from skipper.torchstore.tensors.values import as_bytes, load, new_tensor, open_inline, part_of
from skipper.torchstore.tensors.written import writing_mode, written


@dataclass(frozen=True, slots=True)
class ValueRequest:
    """The request for one key: all of it or a part, and the tensor to read it into."""

    into: torch.Tensor | None = None
    part: TensorSlice | None = None


VersionSelector = int | Literal["latest"] | tuple[Literal["newer_than"], int]


@dataclass(frozen=True, slots=True)
class StateDictPut:
    """A put of a state dict, with the caller's arguments; see `torchstore.put_state_dict`.

    Attributes:
        state_dict: The state dict; None: the last one again.
        checksum: None: as the store was initialized; so are ``copies`` and ``certify``.
        timeout: In seconds.
    """

    state_dict: Mapping[Any, Any] | None
    key: str
    mode: Mode = "snapshot"
    version: int | None = None
    keep: int | None = None
    transfer_dtype: TransferDtype | None = None
    checksum: bool | None = None
    delta: bool = False
    publisher: Origin | tuple[int, int] | None = None
    verify_replicas: bool = False
    copies: int | None = None
    certify: Certify | None = None
    timeout: float = DEFAULT_TIMEOUT_S

    def check(self) -> None:
        """Check the arguments, before anything is done.

        Raises:
            TypeError: One of them is of another type.
            ValueError: They do not go together.
        """
        check_key(self.key)
        if self.mode not in ("snapshot", "direct"):
            raise ValueError(f"mode is 'snapshot' or 'direct', not {self.mode!r}")
        if self.version is not None:
            check_version(self.version)
        if self.keep is not None:
            check_keep(self.keep)
        if self.transfer_dtype is not None:
            check_transfer_dtype(self.transfer_dtype)
        check_flag("verify_replicas", self.verify_replicas)
        if check_flag("delta", self.delta) and self.mode != "snapshot":
            raise ValueError("delta=True compares with the copy in the volume: it needs mode='snapshot'")
        if self.certify is not None:
            check_certify(self.certify)
        read_publisher(self.publisher)


class PutOptions(TypedDict, total=False):
    """The fields of `StateDictPut` that can be left out."""

    mode: Mode
    version: int | None
    keep: int | None
    transfer_dtype: TransferDtype | None
    checksum: bool | None
    delta: bool
    publisher: Origin | tuple[int, int] | None
    verify_replicas: bool
    copies: int | None
    certify: Certify | None
    timeout: float


@dataclass(frozen=True, slots=True)
class StateDictGet:
    """A read of a state dict, with the caller's arguments; see `torchstore.get_state_dict`.

    Attributes:
        into: The state dict whose tensors are filled; None: all tensors are new.
        version: The version to read.
        strict: Whether names must be the same on both sides.
        names: A function that gives the stored names; None: the names are the same.
        delta: Whether the tensors still hold what the last such read has written.
        serve: Whether they are offered to other readers afterwards.
        timeout: In seconds.
    """

    key: str
    into: Mapping[Any, Any] | None = None
    version: VersionSelector = "latest"
    strict: bool = True
    names: NameMap | None = None
    delta: bool = False
    serve: bool = False
    timeout: float = DEFAULT_TIMEOUT_S

    def check(self) -> None:
        """Check the arguments, before anything is sent.

        Raises:
            TypeError: One of them is of another type.
            ValueError: They do not go together.
        """
        check_key(self.key)
        _check_names(self.names, self.into)
        check_flag("strict", self.strict)
        for name, wanted in (("delta", self.delta), ("serve", self.serve)):
            if check_flag(name, wanted) and self.into is None:
                raise ValueError(f"{name}=True needs tensors of your own: pass a user_state_dict that holds them")
        selector_of(self.version)


class GetOptions(TypedDict, total=False):
    """The fields of `StateDictGet` that can be left out, but the state dict."""

    version: VersionSelector
    strict: bool
    names: NameMap | None
    delta: bool
    serve: bool
    timeout: float


def check_version(version: object) -> None:
    """Raise TypeError or ValueError for a value that is not a version number."""
    if not isinstance(version, int) or isinstance(version, bool):
        raise TypeError(f"a version is a number, not {version!r}")
    if version < 0:
        raise ValueError(f"versions begin with 1, and {version} is lower; the newest one is 'latest'")


def check_keep(keep: object) -> None:
    """Raise TypeError or ValueError for a value that is not a number of versions to keep."""
    if not isinstance(keep, int) or isinstance(keep, bool):
        raise TypeError(f"keep must be a number of versions, not {keep!r}")
    if keep < 1:
        raise ValueError(f"keep must be at least 1 version, not {keep}")


def selector_of(version: object) -> Selector:
    """Which version a reader means.

    Raises:
        TypeError: It is a number of another type.
        ValueError: It is not a valid selector.
    """
    match version:
        case "latest":
            return NEWEST
        case bool():
            pass
        case int():
            check_version(version)
            return Selector(exact=version)
        case ("newer_than", int(number)):
            return Selector(newer_than=number)
    raise ValueError(f"version is a number, 'latest' or ('newer_than', number), not {version!r}")


def _check_names(names: object, user_state_dict: object) -> None:
    if names is None:
        return
    if not callable(names) or not isinstance(names, Hashable):  # plans are found by it
        raise TypeError(f"names is a (hashable) function of a name, not {names!r}")
    if user_state_dict is None:
        raise ValueError("names maps the names of a given state dict: give user_state_dict")


def as_object(key: str, request: ValueRequest, value: Any) -> Any:
    """A stored object, which can only be requested as a whole.

    Raises:
        KindMismatchError: A tensor or a part was requested.
    """
    if request.into is not None or request.part is not None:
        raise KindMismatchError(key, "an object is stored there, not a tensor: get it without tensor and slice")
    return value


def target_of(key: str, request: ValueRequest, item: TensorItem) -> tuple[LocalTensor, torch.Tensor]:
    """The destination of a stored tensor, and the caller's result."""
    if request.part is not None:
        into = request.into
        if into is None:
            into = new_tensor(request.part.local_shape, item.dtype)
        return describe_slice(into, request.part, key=key), into
    if request.into is not None:
        return describe(request.into, key=key), request.into
    created = new_tensor(item.global_shape, item.dtype)
    return describe(created, key=key), created


def inline_value(key: str, request: ValueRequest, packed: bytes) -> Any:
    """The requested part of a value that came in a message.

    Raises:
        MismatchError: It is something else.
    """
    inline = open_inline(packed)
    if not inline.dtype:
        return as_object(key, request, load(inline.data))
    into = request.into
    if into is not None and request.part is None and inline.fill(into):
        return into
    return _cut(key, request, inline.tensor())


def _cut(key: str, request: ValueRequest, tensor: torch.Tensor) -> torch.Tensor:
    """The requested part of a small tensor, copied to its destination."""
    if request.into is None:
        return tensor if request.part is None else part_of(tensor, request.part, key=key).clone()
    if request.part is not None:
        target = describe_slice(request.into, request.part, key=key)
    else:
        target = describe(request.into, key=key)
    check_destination(target.tensor, key)
    if target.tensor.dtype != tensor.dtype:
        raise DTypeMismatchError(key, f"stored as {tensor.dtype}, requested as {target.tensor.dtype}")
    if target.global_shape != tuple(tensor.shape):
        raise LayoutMismatchError(key, f"stored with shape {tuple(tensor.shape)}, requested with {target.global_shape}")
    with written([request.into]), writing_mode(target.tensor):
        for piece in target.pieces:
            here = region(as_bytes(target.tensor), piece.local, piece.box.shape)
            here.copy_(region(as_bytes(tensor), piece.box.offsets, piece.box.shape))
    return request.into
