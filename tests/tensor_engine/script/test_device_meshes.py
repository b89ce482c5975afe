"""torch's `DeviceMesh` and `DTensor` in a script, against the same in one process."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from skipper.control import Actor, ProcMesh, endpoint, this_host
from skipper.tensor_engine import (
    MeshMismatchError,
    MisuseError,
    NotPropagatableError,
    Stream,
    UnevenShardError,
    inspect,
    remote,
)
from tests.tensor_engine.conftest import PATIENCE_S, values_on

PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1)]
PAIRS = [list(pair) for pair in itertools.product(PLACEMENTS, repeat=2)]


@pytest.fixture(scope="module")
def mesh(four: ProcMesh) -> DeviceMesh:
    """Of all four."""
    with four.activate():
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def shard_of(whole: torch.Tensor, placements: list[Placement], coordinates: tuple[int, ...]) -> torch.Tensor:
    """What a rank has of a tensor that is cut along the dims of the mesh in their order."""
    for placement, coordinate in zip(placements, coordinates, strict=True):
        if isinstance(placement, Shard):
            whole = whole.chunk(2, placement.dim)[coordinate]
    return whole


def assert_placed(tensor: DTensor, whole: torch.Tensor, placements: list[Placement]) -> None:
    assert tuple(tensor.placements) == tuple(placements)
    assert tensor.shape == whole.shape
    for dp, tp in itertools.product(range(2), repeat=2):
        torch.testing.assert_close(inspect(tensor, dp=dp, tp=tp), shard_of(whole, placements, (dp, tp)))


@pytest.mark.parametrize("before", PAIRS, ids=str)
def test_a_tensor_is_distributed_and_redistributed_in_all_ways(
    four: ProcMesh, mesh: DeviceMesh, before: list[Placement]
) -> None:
    whole = torch.arange(48.0).reshape(4, 12)
    with four.activate():
        there = torch.arange(48.0).reshape(4, 12) + 100 * four.rank_tensor("dp") + 1000 * four.rank_tensor("tp")
        distributed = distribute_tensor(there, mesh, before)
        assert isinstance(distributed, DTensor)
        assert_placed(distributed, whole, before)  # of what the first rank has
        for after in PAIRS:
            assert_placed(distributed.redistribute(placements=after), whole, after)
    torch.testing.assert_close(inspect(distributed.full_tensor(), dp=1, tp=1), whole)


@pytest.mark.parametrize("placements", PAIRS, ids=str)
def test_another_rank_may_be_the_one_that_has_the_data_or_each_its_own(
    four: ProcMesh, mesh: DeviceMesh, placements: list[Placement]
) -> None:
    whole = torch.arange(48.0).reshape(4, 12)
    with four.activate():
        there = torch.arange(48.0).reshape(4, 12) + 100 * four.rank_tensor("dp") + 1000 * four.rank_tensor("tp")
        assert_placed(distribute_tensor(there, mesh, placements, src_data_rank=1), whole + 1100, placements)
        own = distribute_tensor(there, mesh, placements, src_data_rank=None)
    for dp, tp in itertools.product(range(2), repeat=2):
        mine = shard_of(whole + 100 * dp + 1000 * tp, placements, (dp, tp))
        torch.testing.assert_close(inspect(own, dp=dp, tp=tp), mine)


def test_what_is_partial_is_reduced_to_all_and_to_parts(four: ProcMesh, mesh: DeviceMesh) -> None:
    with four.activate():
        mine = torch.arange(16.0).reshape(4, 4) + 10 * four.rank_tensor("tp") + four.rank_tensor("dp")
        partial = DTensor.from_local(mine, mesh, [Partial("avg"), Partial("sum")])
    whole = 2 * torch.arange(16.0).reshape(4, 4) + 10 + 2 * 0.5
    for after in PAIRS:
        assert_placed(partial.redistribute(placements=after), whole, after)


class Block(torch.nn.Module):
    """A layer with everything that tensor parallel code treats in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(12, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)
        self.head = torch.nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, length, 12)."""
        x = self.words(tokens)
        found: torch.Tensor = self.head(x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return found


def parallel(block: Block, mesh: DeviceMesh) -> torch.nn.Module:
    """As torch's own tutorial has it, with the sequence cut up between the layers."""
    return parallelize_module(
        block,
        mesh["tp"],
        {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )


def train(block: torch.nn.Module, steps: int = 4) -> list[torch.Tensor]:
    """The losses, with tokens that a seed gives."""
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.05, eps=1e-2, fused=True)  # what is rounding stays small
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        tokens = torch.randint(0, 12, (3, 6))
        optimizer.zero_grad()
        logits = block(tokens[:, :4])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        if torch.__version__ >= "2.10":  # before, DTensor's norm of gradients that are partial is another one
            torch.nn.utils.clip_grad_norm_(block.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_a_tensor_parallel_model_trains_as_in_one_process(four: ProcMesh, mesh: DeviceMesh) -> None:
    torch.manual_seed(7)
    local = Block()
    there = four.place(copy.deepcopy(local))
    losses = train(local)
    with four.activate():
        model = parallel(there, mesh)
        found = train(model)
    torch.testing.assert_close([inspect(loss, dp=1, tp=1) for loss in found], losses, rtol=1e-4, atol=1e-5)
    weight = dict(model.named_parameters())["up.weight"]
    assert isinstance(weight, DTensor)
    torch.testing.assert_close(inspect(weight.full_tensor(), tp=1), local.up.weight.detach(), rtol=1e-3, atol=1e-4)


def test_parameters_that_are_cut_up_train_on_a_batch_that_is_cut_up(four: ProcMesh, mesh: DeviceMesh) -> None:
    """By placements alone."""

    def cut(name: str, module: torch.nn.Module, device_mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(
                key, torch.nn.Parameter(distribute_tensor(parameter, device_mesh, [Shard(0), Replicate()]))
            )

    torch.manual_seed(3)
    local = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    there = four.place(copy.deepcopy(local))
    batch, wanted = torch.randn(4, 8), torch.randn(4, 2)
    with four.activate():
        model = distribute_module(there, mesh, cut)
        inputs, targets = (
            distribute_tensor(each, mesh, [Shard(0), Replicate()]) for each in four.place((batch, wanted))
        )
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for each, on, x, y in ((local, optimizer, batch, wanted), (model, theirs, inputs, targets)):
            on.zero_grad()
            loss = (each(x) - y).square().mean()
            loss.backward()  # where no mesh is active, too
            on.step()
    found = inspect({name: each.full_tensor() for name, each in model.state_dict().items()}, dp=1)
    torch.testing.assert_close(found, dict(local.state_dict()))


def test_dims_of_a_mesh_are_taken_together(four: ProcMesh, mesh: DeviceMesh) -> None:
    whole = torch.arange(24.0).reshape(8, 3)
    with four.activate():
        everyone = mesh["dp", "tp"]._flatten("all")
        assert everyone.shape == (4,)
        distributed = distribute_tensor(torch.arange(24.0).reshape(8, 3), everyone, [Shard(0)])
    for rank, point in enumerate(four.extent.points()):
        torch.testing.assert_close(inspect(distributed, **point), whole.chunk(4)[rank])
    torch.testing.assert_close(inspect(distributed.full_tensor()), whole)


def test_meshes_without_names_and_of_one_rank(procs: ProcMesh) -> None:
    with procs.activate():
        mesh = DeviceMesh("cpu", torch.arange(2).reshape(1, 2))
        distributed = distribute_tensor(torch.arange(6.0), mesh, [Shard(0), Shard(0)])
    torch.testing.assert_close(inspect(distributed, dim_1=1), torch.arange(3.0, 6))
    assert mesh.get_coordinate() is not None


class Witness(Actor):
    """Says what it was given."""

    @endpoint
    def look(self, given: dict[str, DTensor]) -> tuple[list[float], tuple[Placement, ...], list[int], tuple[int, ...]]:
        tensor = given["here"]
        assert tensor.shape == (8,)
        assert tensor.requires_grad
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        return tensor.to_local().tolist(), tensor.placements, tensor.device_mesh.mesh.tolist(), tuple(coordinate)


@remote(propagate="cached")
def doubled(given: DTensor) -> torch.Tensor:
    """What works out its shape on tensors without values."""
    return given.to_local() * 2


@remote(propagate="inspect")
def shifted(given: DTensor) -> torch.Tensor:
    """What a worker runs first."""
    assert isinstance(given, DTensor)
    return given.to_local() + 1


def test_actors_and_functions_get_them_as_such(four: ProcMesh, mesh: DeviceMesh) -> None:
    with four.activate():
        whole = distribute_tensor(torch.arange(8.0, requires_grad=True), mesh["dp"], [Shard(0)])
        wider = distribute_tensor(torch.arange(8.0).requires_grad_(), mesh, [Shard(0), Shard(0)])
        other = distribute_tensor(torch.arange(8.0), mesh["tp"], [Shard(0)])
    witnesses = four.spawn("witnesses", Witness)
    halves = [torch.arange(8.0).chunk(2)[part].tolist() for part in range(2)]
    assert list(witnesses.look.call({"here": whole}).get(PATIENCE_S)) == [
        (halves[dp], (Shard(0),), [tp, 2 + tp], (dp,)) for dp in range(2) for tp in range(2)
    ]
    assert list(witnesses.look.call({"here": wider}).get(PATIENCE_S)) == [
        (quarter.tolist(), (Shard(0), Shard(0)), [[0, 1], [2, 3]], (rank // 2, rank % 2))
        for rank, quarter in enumerate(torch.arange(8.0).chunk(4))
    ]
    torch.testing.assert_close(inspect(shifted(other), tp=1), torch.arange(5.0, 9))
    with pytest.raises(NotPropagatableError, match="tensors without values"):
        doubled(other)
    witnesses.stop().get(PATIENCE_S)


def test_those_of_a_stream_are_used_and_sent_where_it_is_not_active(four: ProcMesh, mesh: DeviceMesh) -> None:
    with four.activate(), Stream("beside the main one").activate():
        there = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])
    torch.testing.assert_close(inspect(shifted(there), tp=1), torch.arange(5.0, 9))
    with four.activate():
        again = there.redistribute(mesh, [Shard(0), Replicate()])
    torch.testing.assert_close(inspect(again, dp=1, tp=0), torch.arange(4.0, 8))


def misfits() -> list[tuple[Callable[[ProcMesh, DeviceMesh], Any], type[Exception], str]]:
    """What cannot be done, and the error for it."""
    return [
        (
            lambda four, mesh: distribute_tensor(torch.ones(5), mesh, [Shard(0), Replicate()]),
            UnevenShardError,
            "size 5",
        ),
        (
            lambda four, mesh: distribute_tensor(torch.ones(6), mesh, [Shard(0), Shard(0)]),
            UnevenShardError,
            "size 3 cannot be cut into 2",
        ),
        (lambda four, mesh: init_device_mesh("cpu", (2,)), MeshMismatchError, "all its 4 processes"),
        (lambda four, mesh: DeviceMesh("cpu", [3, 2, 1, 0]), MeshMismatchError, r"in their order.*\[3, 2, 1, 0\]"),
        (lambda four, mesh: mesh.get_group("dp"), MisuseError, "has no process groups in the script"),
        (lambda four, mesh: distribute_tensor(torch.ones(4), mesh) + torch.ones(4), RuntimeError, "mixed torch.Tensor"),
    ]


@pytest.mark.parametrize(("attempt", "error", "words"), misfits(), ids=range(len(misfits())))
def test_what_does_not_fit_is_refused(
    four: ProcMesh,
    mesh: DeviceMesh,
    attempt: Callable[[ProcMesh, DeviceMesh], Any],
    error: type[Exception],
    words: str,
) -> None:
    with four.activate(), pytest.raises(error, match=words):
        attempt(four, mesh)


def test_a_tensor_of_other_processes_is_refused(four: ProcMesh, procs: ProcMesh, mesh: DeviceMesh) -> None:
    with procs.activate():
        other = torch.ones(4)
    with pytest.raises(MeshMismatchError, match="not of the processes of"):
        distribute_tensor(other, mesh, [Shard(0), Replicate()])


def test_meshes_of_other_processes_with_the_same_ranks_are_kept_apart(procs: ProcMesh) -> None:
    others = this_host().spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
    made = []
    for each in (procs, others, procs):
        with each.activate():
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            rows, columns = (distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(dim)]) for dim in (1, 0))
            product = (rows @ columns).redistribute(placements=[Replicate()])
        torch.testing.assert_close(
            inspect(product, dp=1), torch.arange(16.0).reshape(4, 4) @ torch.arange(16.0).reshape(4, 4)
        )
        made.append(mesh)
    assert made[0] == made[2]
    assert made[0] != made[1]
    others.stop().get(PATIENCE_S)


def test_a_script_that_is_a_rank_itself_is_told(four: ProcMesh) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        outside = init_device_mesh("cpu", (1,))
        assert outside.get_group(0).size() == 1
        with four.activate(), pytest.raises(MisuseError, match="a rank of torch"):
            init_device_mesh("cpu", (2, 2))
    finally:
        dist.destroy_process_group()


def test_workers_are_not_asked_for_what_is_only_worked_out(four: ProcMesh, mesh: DeviceMesh) -> None:
    before = values_on(four)
    with four.activate():
        words = distribute_tensor(torch.ones(12, 2), mesh, [Replicate(), Shard(0)])
        found = torch.nn.functional.embedding(distribute_tensor(torch.full((3,), 11), mesh), words)
        assert inspect(found.full_tensor(), tp=1).tolist() == [[1.0, 1.0]] * 3
    del words, found
    assert values_on(four) == before
