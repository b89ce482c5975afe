"""The messages of a trainer to vLLM's workers, through vLLM's own client: all of them fit into JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo


@dataclass
class TorchStoreInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there to be typed
    """The message by which the trainer initializes a worker.

    Attributes:
        address: The trainer's job, for `control.join`: a path, or ``tcp://HOST:PORT``; never a secret.
        store_name: The name of the store.
        timeout: Timeout of each step, in seconds.
        staging_nbytes: See `TorchStoreTrainerInitInfo`.
        background: See `TorchStoreTrainerInitInfo`.
        second_set_nbytes: See `TorchStoreTrainerInitInfo`.
    """

    address: str
    store_name: str
    timeout: float = 600.0
    staging_nbytes: int | None = None
    background: bool = False
    second_set_nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.staging_nbytes is not None and self.staging_nbytes < 1:
            raise ValueError(f"staging_nbytes is at least one byte, or None for all; not {self.staging_nbytes}")
        if self.second_set_nbytes is not None and not self.background:
            raise ValueError("second_set_nbytes limits the second set of weights: it needs background=True")


@dataclass
class TorchStoreUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The message about one piece of an update, from the trainer to a worker.

    Attributes:
        key: The key under which it was put.
        version: The version of that key.
        names: The names of the weights.
        dtype_names: Their dtypes, such as ``"bfloat16"``.
        shapes: The shapes of the whole weights.
        is_last: Whether this is the last piece of the update.
        is_aborted: There is no piece: the update in progress changes nothing.
        update: The name of an update in the background, under which workers report their progress on the board.
        question: There is no piece: the worker confirms on the board, with this number (above 0), that it is alive.
    """

    key: str
    version: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    is_last: bool = True
    is_aborted: bool = False
    update: str = ""
    question: int = 0

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"{len(self.names)} names, {len(self.dtype_names)} dtypes and {len(self.shapes)} shapes of weights"
            )


ABORT = asdict(TorchStoreUpdateInfo("", 0, [], [], [], is_aborted=True))
"""The message to the workers if an update cannot be completed."""


def describe(key: str, version: int, weights: Mapping[str, Any], *, is_last: bool) -> dict[str, Any]:
    """The message to the workers about a piece."""
    dtypes = [str(weight.dtype).removeprefix("torch.") for weight in weights.values()]
    shapes = [list(weight.shape) for weight in weights.values()]
    return asdict(TorchStoreUpdateInfo(key, version, list(weights), dtypes, shapes, is_last))


def question(update: str, number: int) -> dict[str, Any]:
    """The question to the workers while they read in the background."""
    return asdict(TorchStoreUpdateInfo("", 0, [], [], [], update=update, question=number))
