"""torch's `fully_shard` in a script, against the same model in one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from skipper.control import ProcMesh
from skipper.tensor_engine import MisuseError, compile, inspect
from tests.tensor_engine.conftest import bytes_on

WIDTH = 8
WORDS = 12
EACH = 3
LOSS = {"rtol": 1e-4, "atol": 1e-5}
WEIGHTS = {"rtol": 1e-3, "atol": 1e-4}


class Block(torch.nn.Module):
    """A layer of a transformer without its attention."""

    def __init__(self, computes_again: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.computes_again = computes_again

    def body(self, x: torch.Tensor) -> torch.Tensor:
        """All of it."""
        added: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` is of shape (batch, length, WIDTH), and so is the result."""
        found: torch.Tensor = checkpoint(self.body, x, use_reentrant=False) if self.computes_again else self.body(x)
        return found


class Model(torch.nn.Module):
    """Tied weights, and a parameter that cannot be cut up evenly."""

    def __init__(self, *, computes_again: str = "") -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(computes_again == "within") for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.scales = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.ones(WIDTH))
        self.computes_again = computes_again

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, length, WORDS)."""
        x = self.words(tokens) + self.offset
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.computes_again == "around" else block(x)
        found: torch.Tensor = self.head(x) * self.scales.sum()
        return found


@pytest.fixture(scope="module")
def mesh(four: ProcMesh) -> DeviceMesh:
    """Of all four."""
    with four.activate():
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def shard(model: Model, **options: Any) -> Model:
    """As torch's tutorial has it: each block, and what is left."""
    for block in model.blocks:
        fully_shard(block, **options)
    sharded: Model = fully_shard(model, **options)  # type: ignore[assignment]
    return sharded


def optimizer_of(model: torch.nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    # What is rounding stays small.
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-2, fused=fused, foreach=None if fused else False)


def step(model: Model, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, *, clips: bool = True) -> torch.Tensor:
    """Train once; the loss."""
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    if clips and torch.__version__ >= "2.10":  # before, DTensor's norm of gradients that are partial is another one
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def tokens_of(seed: int, ranks: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (ranks * EACH, 6), generator=torch.Generator().manual_seed(seed))


def own_rows(four: ProcMesh, rows: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Each rank's of a batch."""
    placed = four.place(rows)
    return placed.reshape(-1, EACH, *rows.shape[1:]).index_select(0, rank.reshape(1)).squeeze(0)


def assert_trains_as_in_one_process(
    four: ProcMesh, local: Model, model: Model, *, is_over_all: bool = False, clips: bool = True, fused: bool = True
) -> None:
    assert isinstance(model, FSDPModule)
    optimizers = optimizer_of(local, fused=fused), optimizer_of(model, fused=fused)
    for seed in range(4):
        tokens = tokens_of(seed, 4 if is_over_all else 2)
        expected = step(local, optimizers[0], tokens, clips=clips)
        with four.activate():
            rank = four.rank_tensor("dp") * 2 + four.rank_tensor("tp") if is_over_all else four.rank_tensor("dp")
            mine = own_rows(four, tokens, rank)
        loss = step(model, optimizers[1], mine, clips=clips)  # where no mesh is active
        torch.testing.assert_close(inspect(loss.reduce(("dp", "tp"), "avg")), expected, **LOSS)
    whole = {name: each.full_tensor() for name, each in model.named_parameters()}  # type: ignore[operator]
    expected_weights = {name: each.detach() for name, each in local.named_parameters()}
    for point in ({}, {"dp": 1, "tp": 1}):
        torch.testing.assert_close(inspect(whole, **point), expected_weights, **WEIGHTS)


@pytest.mark.parametrize("computes_again", ["", "within", "around"])
@pytest.mark.parametrize("reshards", [None, True, False])
def test_a_sharded_model_trains_as_in_one_process(
    four: ProcMesh, mesh: DeviceMesh, computes_again: str, reshards: bool | None
) -> None:
    torch.manual_seed(0)
    local = Model(computes_again=computes_again)
    model = shard(four.place(copy.deepcopy(local)), mesh=mesh["dp"], reshard_after_forward=reshards)
    assert_trains_as_in_one_process(four, local, model)


def test_shards_with_copies(four: ProcMesh, mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    local = Model()
    model = shard(four.place(copy.deepcopy(local)), mesh=mesh)
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor)
    assert (str(weight.placements), weight.to_local().shape) == ("(Replicate(), Shard(dim=0))", (2 * WIDTH, WIDTH))
    assert_trains_as_in_one_process(four, local, model, is_over_all=True)


def test_without_a_device_mesh_all_processes_of_the_active_mesh_have_shards(four: ProcMesh) -> None:
    torch.manual_seed(2)
    local = Model()
    with four.activate():
        model = shard(copy.deepcopy(local))  # of the script: it goes there
    assert model.blocks[0].up.weight.to_local().shape == (WIDTH, WIDTH)  # type: ignore[operator]
    assert_trains_as_in_one_process(four, local, model, is_over_all=True)


def test_layers_that_are_tensor_parallel_too(four: ProcMesh, mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    local = Model()
    there = four.place(copy.deepcopy(local))
    with four.activate():
        for block in there.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model = shard(there, mesh=mesh["dp"])
    placements = {name: str(each.placements) for name, each in model.blocks[0].named_parameters()}  # type: ignore[attr-defined]
    assert placements["up.weight"].endswith("Shard(dim=0))")
    assert placements["down.weight"] == "(Shard(dim=0), Shard(dim=1))"
    fused = torch.__version__ >= "2.10"  # before, DTensor's fused steps take parameters of one mesh alone
    assert_trains_as_in_one_process(four, local, model, clips=False, fused=fused)


def test_a_compiled_step(four: ProcMesh, mesh: DeviceMesh) -> None:
    torch.manual_seed(4)
    local = Model()
    model = shard(four.place(copy.deepcopy(local)), mesh=mesh["dp"])
    optimizers = optimizer_of(local), optimizer_of(model)

    @compile
    def replayed(tokens: torch.Tensor) -> torch.Tensor:
        return step(model, optimizers[1], tokens, clips=False)

    for seed in range(4):
        expected = step(local, optimizers[0], tokens_of(seed, 1), clips=False)
        with four.activate():
            loss = replayed(four.place(tokens_of(seed, 1)))
        torch.testing.assert_close(inspect(loss, dp=1), expected, **LOSS)


def test_whole_tensors_are_not_kept_between_forward_and_backward(four: ProcMesh, mesh: DeviceMesh) -> None:
    kept = {}
    tokens = four.place(tokens_of(0, 1))
    for reshards in (True, False):
        model = shard(four.place(Model()), mesh=mesh["dp"], reshard_after_forward=reshards)
        before = bytes_on(four)
        logits = model(tokens)
        kept[reshards] = bytes_on(four) - before
        logits.sum().backward()
        del logits
        model.zero_grad()
        assert bytes_on(four) == before
    whole = {each.untyped_storage().data_ptr(): each.nbytes for each in Model().blocks.parameters()}
    assert kept[False] - kept[True] >= sum(whole.values())


def test_mixed_precision(four: ProcMesh, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64)
    seen = []

    class Seeing(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, self.weight.dtype))
            return super().forward(x)

    torch.manual_seed(5)
    local = Seeing(WIDTH, 4)
    model = fully_shard(four.place(copy.deepcopy(local)), mesh=mesh["dp"], mp_policy=policy)
    x = torch.randn(5, WIDTH)
    output = model(four.place(x))  # type: ignore[operator]
    output.sum().backward()
    assert (seen, output.dtype) == ([(torch.bfloat16, torch.bfloat16)], torch.float64)
    gradient = model.weight.grad  # type: ignore[attr-defined]
    assert gradient.dtype == torch.float32
    expected = x.bfloat16().float().sum(0).expand(4, WIDTH)
    torch.testing.assert_close(inspect(gradient.full_tensor(), dp=1), expected, rtol=1e-2, atol=1e-2)


def test_frozen_and_ignored_and_otherwise_placed_parameters(four: ProcMesh, mesh: DeviceMesh) -> None:
    torch.manual_seed(6)
    local = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    local[1].requires_grad_(False)
    there = four.place(copy.deepcopy(local))
    ignored = there[2].bias
    model: Any = fully_shard(
        there,
        mesh=mesh["dp"],
        ignored_params={ignored},
        shard_placement_fn=lambda parameter: Shard(1) if parameter.dim() == 2 else None,
        reshard_after_forward=True,
    )
    assert model[2].bias is ignored
    assert model[0].weight.placements == (Shard(1),)
    assert type(model[:2]) is torch.nn.Sequential
    x = torch.randn(3, 4)
    local(x).square().sum().backward()
    model(four.place(x)).square().sum().backward()
    assert model[1].weight.grad is None
    for at, name in ((0, "weight"), (0, "bias"), (2, "weight")):
        gradient = getattr(model[at], name).grad.full_tensor()
        torch.testing.assert_close(inspect(gradient, dp=1), getattr(local[at], name).grad)
    torch.testing.assert_close(inspect(ignored.grad, dp=1), local[2].bias.grad)


def test_gradients_are_accumulated_and_divided_as_asked(four: ProcMesh, mesh: DeviceMesh) -> None:
    model: Any = fully_shard(four.place(torch.nn.Linear(2, 2, bias=False)), mesh=mesh["dp"])
    model.set_gradient_divide_factor(1.0)
    ones = four.place(torch.ones(1, 2))
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model(ones).sum().backward()
    torch.testing.assert_close(inspect(model.weight.grad.full_tensor()), torch.full((2, 2), 4.0))


def test_parameters_are_whole_while_they_are_asked_to_be(four: ProcMesh, mesh: DeviceMesh) -> None:
    local = torch.nn.Linear(2, 2)
    model: Any = fully_shard(four.place(copy.deepcopy(local)), mesh=mesh["dp"])
    model.unshard()
    torch.testing.assert_close(inspect(model.weight, dp=1), local.weight.detach())
    model.reshard()
    assert model.weight.to_local().shape == (1, 2)


def test_without_processes_it_is_that_of_torch(mesh: DeviceMesh) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: Any = fully_shard(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.device_mesh.get_group(0).size() == 1
    finally:
        dist.destroy_process_group()


class Fails(torch.nn.Linear):
    """Until it is told not to."""

    fails = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See above."""
        if self.fails:
            raise ArithmeticError("not yet")
        return super().forward(x)


def test_a_module_that_fails_is_left_sharded(four: ProcMesh, mesh: DeviceMesh) -> None:
    model: Any = fully_shard(four.place(Fails(2, 2)), mesh=mesh["dp"])
    x = four.place(torch.ones(1, 2))
    with pytest.raises(ArithmeticError):
        model(x)
    assert isinstance(model.weight, DTensor)
    model.fails = False
    model(x).sum().backward()
    assert isinstance(model.weight.grad, DTensor)


def test_what_is_changed_between_forward_and_backward_is_noticed(four: ProcMesh, mesh: DeviceMesh) -> None:
    model: Any = fully_shard(four.place(torch.nn.Linear(2, 2)), mesh=mesh["dp"], reshard_after_forward=True)
    x = four.place(torch.ones(1, 2))
    output = model(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("attempt", "error", "words"),
    [
        (lambda model, mesh: fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy()), MisuseError, "offload"),
        (lambda model, mesh: fully_shard(fully_shard(model, mesh=mesh), mesh=mesh), AssertionError, "already"),
        (lambda model, mesh: copy.deepcopy(fully_shard(model, mesh=mesh)), MisuseError, "cannot be copied"),
        (lambda model, mesh: fully_shard(model, mesh=mesh).set_all_reduce_hook(print), MisuseError, "on a mesh"),
        (lambda model, mesh: fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: 1), MisuseError, "a Shard or"),
    ],
    ids=range(5),
)
def test_what_is_refused(
    four: ProcMesh,
    mesh: DeviceMesh,
    attempt: Callable[[torch.nn.Module, DeviceMesh], Any],
    error: type[Exception],
    words: str,
) -> None:
    model = four.place(torch.nn.Linear(2, 2))
    with pytest.raises(error, match=words):
        attempt(model, mesh["dp"])
