"""The state dict that ``put_state_dict(None, key, direct_rdma=True)`` puts: the last one, as it is now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from skipper.torchstore.clients.requests import StateDictPut
from skipper.torchstore.clients.staging import TransferDtype
from skipper.torchstore.tensors.local_tensors import BorrowedTensor
from skipper.torchstore.tensors.state_dict import Flattened, flatten


class LastPuts:
    """The state dicts that a process has put in direct mode, by key.

    Direct mode keeps their tensors alive anyway. With ``transfer_dtype`` readers read copies, and the tensors belong
    only to their owner: then this records only where they are.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[Mapping[Any, Any] | _Borrowed, TransferDtype | None]] = {}

    def resolve(self, put: StateDictPut) -> StateDictPut:
        """The put, with the last state dict in place of None.

        Raises:
            TypeError: The state dict is neither None nor a mapping.
            ValueError: It is None, and there is nothing to put again, or one of its tensors is gone.
        """
        key, state_dict = put.key, put.state_dict
        if state_dict is not None:
            if not isinstance(state_dict, Mapping):
                raise TypeError(f"{key!r}: a state dict is a mapping, not {type(state_dict).__name__}")
            return put
        if put.mode != "direct":
            raise ValueError(f"{key!r}: a state dict is needed; None repeats the last one in direct mode only")
        last = self._last.get(key)
        if last is None:
            raise ValueError(
                f"{key!r}: None repeats the last state dict in direct mode, and this process has put none: give one "
                "first"
            )
        found = last[0].state_dict(key) if isinstance(last[0], _Borrowed) else last[0]
        dtype = last[1] if put.transfer_dtype is None else put.transfer_dtype
        return replace(put, state_dict=found, transfer_dtype=dtype)

    def keep(self, put: StateDictPut) -> None:
        """A state dict has been put; in snapshot mode it is not kept, and neither is the one before."""
        if put.mode != "direct" or put.state_dict is None:
            self._last.pop(put.key, None)
        elif put.transfer_dtype is None:
            self._last[put.key] = put.state_dict, None
        else:
            self._last[put.key] = _Borrowed(put.state_dict), put.transfer_dtype

    def forget(self, keys: Iterable[str]) -> None:
        """These keys were deleted."""
        for key in keys:
            self._last.pop(key, None)

    def forget_all(self) -> None:
        """The client ends."""
        self._last.clear()


class _Borrowed:
    """A state dict whose tensors belong to other code, which may free them."""

    def __init__(self, state_dict: Mapping[Any, Any]) -> None:
        leaves, self._paths = flatten(state_dict)
        self._tensors: dict[str, BorrowedTensor] = {}
        self._others: dict[str, Any] = {}
        self._names = tuple(leaves)
        for name, leaf in leaves.items():
            if isinstance(leaf, torch.Tensor):
                self._tensors[name] = BorrowedTensor(leaf)
            else:
                self._others[name] = leaf

    def state_dict(self, key: str) -> Flattened:
        """The state dict, over the same memory.

        Raises:
            ValueError: The memory of a tensor is gone.
        """
        leaves = {name: self._tensor(key, name) if name in self._tensors else self._others[name]
                  for name in self._names}  # fmt: skip
        return Flattened(leaves, self._paths)

    def _tensor(self, key: str, name: str) -> torch.Tensor:
        found = self._tensors[name].tensor()
        if found is None:
            raise ValueError(
                f"{key!r}: the memory of {name!r}, which was put last, has been freed, and with transfer_dtype only a "
                "converted copy of it is kept: give a state dict"
            )
        return found
