"""What a trainer tells vLLM's workers, through vLLM's own client: everything fits into JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo


@dataclass
class TorchStoreInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there to be typed
    """The message with which the trainer initializes a worker.

    Attributes:
        address: The trainer's job, as `control.join` takes it: a path, or ``tcp://HOST:PORT``; never a secret.
        store_name: Which store.
        timeout: Bound on each step, in seconds.
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
            raise ValueError("second_set_nbytes limits the second set of weights, which there is with background=True")


@dataclass
class TorchStoreUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The message about one piece of an update, from the trainer to a worker.

    Attributes:
        key: Where it was put.
        version: Which version of that.
        names: Of the weights.
        dtype_names: Theirs, as in ``"bfloat16"``.
        shapes: Of the whole weights.
        is_last: Whether this piece is the update's last one.
        is_aborted: There is no piece: the update that has begun changes nothing.
        update: Of an update in the background its name, under which workers say on the board how far they are.
        question: There is no piece: the worker says on the board that it lives, by this number, above 0.
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
"""What the workers are told where an update cannot be completed."""


def describe(key: str, version: int, weights: Mapping[str, Any], *, is_last: bool) -> dict[str, Any]:
    """What the workers are told of a piece."""
    dtypes = [str(weight.dtype).removeprefix("torch.") for weight in weights.values()]
    shapes = [list(weight.shape) for weight in weights.values()]
    return asdict(TorchStoreUpdateInfo(key, version, list(weights), dtypes, shapes, is_last))


def question(update: str, number: int) -> dict[str, Any]:
    """What the workers are asked while they read in the background."""
    return asdict(TorchStoreUpdateInfo("", 0, [], [], [], update=update, question=number))
