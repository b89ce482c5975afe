"""`TorchrunRank`: what ``torchrun``, or whoever sets the same variables, has told this process in its environment."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from skipper.control.model.errors import TorchrunError


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """One rank of a run of ``torchrun``.

    Attributes:
        rank: among all.
        world_size: how many there are.
        local_rank: among those of its node.
        local_world_size: how many there are on its node.
        master_addr: the node of rank 0, by a name or an IP.
        master_port: where ``torch.distributed`` meets there.
        run_id: what all ranks of a run have in common.
        restart: how often the ranks of this run have been started anew.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    run_id: str = ""
    restart: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> TorchrunRank:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Raises:
            TorchrunError: one of them is missing, or is no number, or they contradict each other.
        """
        launch = cls(
            rank=_number(environment, "RANK"),
            world_size=_number(environment, "WORLD_SIZE"),
            local_rank=_number(environment, "LOCAL_RANK"),
            local_world_size=_number(environment, "LOCAL_WORLD_SIZE"),
            master_addr=_text(environment, "MASTER_ADDR"),
            master_port=_number(environment, "MASTER_PORT"),
            run_id=environment.get("TORCHELASTIC_RUN_ID", ""),
            restart=_number({"TORCHELASTIC_RESTART_COUNT": "0", **environment}, "TORCHELASTIC_RESTART_COUNT"),
        )
        fits = launch.rank < launch.world_size and launch.local_rank < launch.local_world_size <= launch.world_size
        if not fits:
            raise TorchrunError(f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE do not fit together: {launch}")
        return launch

    @property
    def has_one_node(self) -> bool:
        """Whether all ranks are on the same node."""
        return self.local_world_size == self.world_size

    @property
    def name(self) -> str:
        """A name that the ranks have in common, and no ranks before or beside them: those of a restart have another."""
        parts = (self.run_id, self.restart, self.master_addr, self.master_port, self.world_size)
        digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
        return f"torchrun-{digest[:16]}"


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name)
    if not value:
        raise TorchrunError(f"{name} is not set: start the script with torchrun, or set what torchrun sets")
    return value


def _number(environment: Mapping[str, str], name: str) -> int:
    value = _text(environment, name)
    if not value.isdecimal():
        raise TorchrunError(f"{name} is a number under torchrun, not {value!r}")
    return int(value)
