"""What ``put_state_dict(None, key, direct_rdma=True)`` means: the state dict that was put last, as it is now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchstore.manifest import Mode
from torchstore.staging import TransferDtype

Put = tuple[Mapping[Any, Any], TransferDtype | None]


class Again:
    """The state dicts that a process has put in direct mode, by key. Their tensors are kept alive by that anyway."""

    def __init__(self) -> None:
        self._last: dict[str, Put] = {}

    def take(
        self, key: str, mode: Mode, state_dict: Mapping[Any, Any] | None, transfer_dtype: TransferDtype | None
    ) -> Put:
        """What is to be put.

        Raises:
            TypeError: The state dict is neither None nor a mapping.
            ValueError: It is None, and there is nothing to be put again.
        """
        if state_dict is not None:
            if not isinstance(state_dict, Mapping):
                raise TypeError(f"{key!r}: a state dict is a mapping, not {type(state_dict).__name__}")
            return state_dict, transfer_dtype
        if mode != "direct":
            raise ValueError(f"{key!r}: a state dict is needed; None puts one again in direct mode alone")
        last = self._last.get(key)
        if last is None:
            raise ValueError(
                f"{key!r}: this process has put no state dict in direct mode that None could stand for: give one first"
            )
        return last[0], last[1] if transfer_dtype is None else transfer_dtype

    def keep(self, key: str, mode: Mode, state_dict: Mapping[Any, Any], transfer_dtype: TransferDtype | None) -> None:
        """A state dict has been put; in snapshot mode it is not kept, and neither is the one before."""
        if mode == "direct":
            self._last[key] = (state_dict, transfer_dtype)
        else:
            self._last.pop(key, None)

    def forget(self, keys: Iterable[str]) -> None:
        """These keys were deleted."""
        for key in keys:
            self._last.pop(key, None)

    def forget_all(self) -> None:
        """The client ends."""
        self._last.clear()
