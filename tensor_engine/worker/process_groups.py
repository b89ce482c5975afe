"""Process groups that user functions get on a worker: real ones of `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as registry

from skipper.tensor_engine.errors import CommunicationError
from skipper.tensor_engine.shared.remote_functions import ProcessGroupSpec
from skipper.tensor_engine.worker.groups import Groups
from skipper.tensor_engine.worker.host_staged import HostStaged
from skipper.tensor_engine.worker.interpreter import Interpreter


class WorkerGroups:
    """The process groups that functions on a worker have used; kept by the worker's interpreter."""

    def __init__(self, worker: Interpreter) -> None:
        self._number = worker.number
        self._stream = worker.stream
        self._made: dict[int, dist.ProcessGroup | None] = {}

    @staticmethod
    def of(worker: Interpreter) -> WorkerGroups:
        """The process groups of a worker."""
        kept: WorkerGroups | None = worker.own.get("process groups")
        if kept is None:
            kept = worker.own["process groups"] = WorkerGroups(worker)
        return kept

    def get(self, spec: ProcessGroupSpec) -> dist.ProcessGroup:
        """The group of this worker; the first time, all its members make it.

        Raises:
            CommunicationError: it is broken, or members are gone.
        """
        if spec.number not in self._made:
            self._made[spec.number] = self._make(spec)
        made = self._made[spec.number]
        if made is None:
            raise CommunicationError("the process group is broken: a member has failed; make a new one")
        return made

    def abandon(self, spec: ProcessGroupSpec) -> None:
        """Break it: this worker cannot take part, and the others must not wait for it."""
        try:
            self.get(spec)  # it must meet the others before it can tell them
        except CommunicationError:
            return
        self._drop(spec.number)

    def close(self) -> None:
        """Close the connections of all of them."""
        for number in list(self._made):
            self._drop(number)

    def _make(self, spec: ProcessGroupSpec) -> dist.ProcessGroup:
        index = next(index for index, group in enumerate(spec.groups) if self._number in group)
        members, ranks = spec.groups[index], spec.ranks[index]
        devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() and dist.is_nccl_available() else [])
        rank = members.index(self._number)
        group: Any = None
        first_store: Any = None
        for device in devices:
            name = f"user/{spec.number}/{self._stream}/{device}"
            groups = Groups(self._number, stream=name, device=device)
            store, backend = groups.new_backend(members)
            if isinstance(backend, HostStaged):
                continue  # torch accepts only its own backends: operations on GPU tensors are refused by name
            if group is None:
                group, first_store = dist.ProcessGroup(store, rank, len(members)), store
            kind = dist.ProcessGroup.BackendType.GLOO if device == "cpu" else dist.ProcessGroup.BackendType.NCCL
            group._register_backend(torch.device(device), kind, backend)
            if device == "cpu":
                group._set_default_backend(kind)
        registered: Any = registry._world
        name = f"user/{spec.number}/{self._stream}/{index}"
        group._set_group_name(name)
        registered.pg_group_ranks[group] = {place: number for number, place in enumerate(ranks)}
        registered.pg_map[group] = ("gloo", first_store)
        registered.pg_names[group] = name
        made: dist.ProcessGroup = group
        return made

    def _drop(self, number: int) -> None:
        group, self._made[number] = self._made.get(number), None
        for known in (registry._world.pg_group_ranks, registry._world.pg_map, registry._world.pg_names):
            known.pop(group, None)  # type: ignore[arg-type]
        # That was the last reference: the connections are closed, so that the others fail at once. `abort` alone would
        # leave gloo's connections open.
