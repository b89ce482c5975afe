"""Ranks of a gloo process group with a model under FSDP2 and its optimizer, for the tests of checkpoints."""

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from skipper import torchstore as ts
from skipper.control import Actor, current_rank, endpoint
from skipper.torchstore.dcp import StoreReader, StoreWriter, load_from_directory, save_to_directory
from tests.torchstore.oracle import cuts_what_is_strided_twice

PATIENCE_S = 120


class Layers(torch.nn.Module):
    """Of uneven sizes, so that shards are uneven too, as far as DCP of this torch can save that."""

    def __init__(self) -> None:
        super().__init__()
        between = 10 if cuts_what_is_strided_twice() else 8
        self.first = torch.nn.Linear(12, between)
        self.second = torch.nn.Linear(between, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) * 1.0


class Trainer(Actor):
    """One rank."""

    @endpoint
    async def join(self, port: int, world_size: int) -> None:
        torch.set_num_threads(1)
        timeout = timedelta(seconds=PATIENCE_S)
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=current_rank().rank, world_size=world_size, timeout=timeout)

    @endpoint
    async def build(self, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
        """A model over a mesh; the same weights on every mesh. AdamW with two groups.

        Its maxima are left out where DTensor takes the maximum of two strided shards for a plain one: in PyTorch 2.8.
        """
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = Layers()
        if "tp" in names:
            parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh["dp"])
        self.model = model
        groups = [
            {"params": list(model.first.parameters()), "lr": 1e-2},
            {"params": list(model.second.parameters()), "lr": 3e-3, "weight_decay": 0.1},
        ]
        self.optimizer = torch.optim.AdamW(groups, amsgrad=cuts_what_is_strided_twice())

    @endpoint
    async def train(self, first: int, count: int) -> list[float]:
        """Steps on inputs that are the same on every rank; the losses."""
        losses: list[float] = []
        for step in range(first, first + count):
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    @endpoint
    async def whole(self) -> dict[str, Any]:
        """Model and optimizer, gathered, by flat names."""
        return gathered(self._state())

    @endpoint
    async def put(self, key: str) -> int:
        """By the store's own call."""
        return await ts.put_state_dict(self._state(), key)

    @endpoint
    async def get(self, key: str) -> None:
        """By the store's own call."""
        self._take(await ts.get_state_dict(key, self._state()))

    @endpoint
    async def save(self, key: str, planner: Any = None, **options: Any) -> Any:
        """By DCP; what its metadata says of where it lies."""
        return dcp.save(self._state(), storage_writer=StoreWriter(key, **options), planner=planner).storage_data

    @endpoint
    async def save_later(self, key: str) -> None:
        """By DCP, in a thread of its own, while the model goes on changing."""
        saving = dcp.async_save(self._state(), storage_writer=StoreWriter(key))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        saving.result(PATIENCE_S)  # type: ignore[union-attr]

    @endpoint
    async def load(self, key: str, checkpoint_id: str | None = None, **options: Any) -> None:
        """By DCP."""
        state = self._state()
        dcp.load(state, storage_reader=StoreReader(key, **options), checkpoint_id=checkpoint_id)
        self._take(state)

    @endpoint
    async def save_on_disk(self, directory: Path) -> None:
        dcp.save(self._state(), checkpoint_id=directory)

    @endpoint
    async def load_from_disk(self, directory: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=directory)
        self._take(state)

    @endpoint
    async def drain(self, key: str, directory: Path) -> int:
        return save_to_directory(key, directory)

    @endpoint
    async def fill(self, directory: Path, key: str, **options: Any) -> int:
        return load_from_directory(directory, key, **options)

    @endpoint
    async def failing_save(self, key: str) -> str:
        """Save, while the last rank has nothing to give; what comes of it."""
        state = self._state()
        if dist.get_rank() == dist.get_world_size() - 1:
            state["unpicklable"] = Unpicklable()
        else:
            state["unpicklable"] = 1
        try:
            dcp.save(state, storage_writer=StoreWriter(key), planner=EachItsOwn())
        except dcp.CheckpointException as error:
            return str(error)
        return ""

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "epoch": 3, "note": {"said": ("a", 1)}}

    def _take(self, state: dict[str, Any]) -> None:
        assert state["epoch"] == 3
        assert state["note"] == {"said": ("a", 1)}
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class Unpicklable:
    """Cannot be stored."""

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class EachItsOwn(dcp.DefaultSavePlanner):
    """Has every rank write the entries that are not tensors."""

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        _, metadata = super().create_global_plan(all_plans)
        return all_plans, metadata


def gathered(state: Any) -> dict[str, Any]:
    """A nested state dict by flat names, its tensors whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, dict):
                found |= {f"{name}.{inner}": leaf for inner, leaf in gathered(value).items()}
            else:
                found[name] = value.full_tensor() if isinstance(value, DTensor) else value
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()
        }
