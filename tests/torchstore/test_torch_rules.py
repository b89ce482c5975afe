"""The table "Kinds of tensors" of docs/reference/store_tensors.md, row by row."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from skipper import torchstore as ts

Make = Callable[[int], torch.Tensor]

SMALL, LARGE = 2, 200  # rows and columns: of a value that travels in a message, of one that goes through a volume

DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("bits8", "bits16", "uint1", "uint4", "int4", "int7"),
    )
    if hasattr(torch, name)  # not all of them are in every release
]


SAME_SIZE = {1: torch.uint8, 2: torch.int16}  # for dtypes of which torch itself can do little


class Named(torch.Tensor):
    """A subclass that adds behaviour, not memory."""


pytestmark = pytest.mark.usefixtures("store")


class Pair(NamedTuple):
    left: object
    right: object


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[DeviceMesh]:
    """A mesh of processes of which only this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def numbered(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A square of which all elements differ, as far as the dtype allows; contiguous."""
    nbytes = size * size * dtype.itemsize
    patterns = torch.arange(nbytes, dtype=torch.int64).remainder(2 if dtype is torch.bool else 101).to(torch.uint8)
    return patterns.view(dtype).reshape(size, size)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements in row-major order."""
    tensor = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    if tensor.element_size() == 1:  # torch has no copy for narrow integers
        return tensor.view(torch.uint8).reshape(-1)
    return tensor.reshape(-1).view(torch.uint8)


def shared(tensor: torch.Tensor) -> torch.Tensor:
    return ts.share_memory_(torch.nn.ParameterList([torch.nn.Parameter(tensor, requires_grad=False)]))[0].data


async def check_round_trip(value: torch.Tensor, into: torch.Tensor, *, direct: bool = True) -> None:
    """Through every way of putting and getting; ``into`` is filled in place each time."""
    wanted = bits(value)

    def check(got: torch.Tensor) -> None:
        assert type(got) is torch.Tensor
        assert got.dtype == value.dtype
        assert got.shape == value.shape
        assert not got.requires_grad
        assert torch.equal(bits(got), wanted)

    async def check_into(read: Any) -> None:
        with torch.no_grad():
            into.detach().view(SAME_SIZE.get(into.element_size(), into.dtype)).zero_()
        await read
        assert torch.equal(bits(into), wanted)

    await ts.put("w", value)
    check(await ts.get("w"))
    await check_into(ts.get("w", into))
    await ts.put_batch({"w": value, "v": value})
    check((await ts.get_batch(["w", "v"]))["v"])
    await check_into(ts.get_batch({"w": into, "v": None}))
    for mode in ("snapshot", "direct") if direct else ("snapshot",):
        for _ in range(2):  # the second time by the plan of the first
            await ts.put_state_dict({"layer": {"w": value}}, mode, mode=mode)  # type: ignore[arg-type]
            check((await ts.get_state_dict(mode))["layer"]["w"])
            await check_into(ts.get_state_dict(mode, {"layer": {"w": into}}))
            await check_into(ts.get(f"{mode}/layer.w", into))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
async def test_every_dtype_goes_through_bit_for_bit(dtype: torch.dtype, size: int) -> None:
    value = numbered(size, dtype)
    await check_round_trip(value, torch.empty(size, size, dtype=dtype))
    await check_round_trip(value.t(), torch.empty(size, 2 * size, dtype=dtype)[:, ::2].t())


STORABLE: dict[str, Make] = {
    "a parameter": lambda size: torch.nn.Parameter(numbered(size)),
    "a frozen parameter": lambda size: torch.nn.Parameter(numbered(size), requires_grad=False),
    "a buffer": lambda size: torch.nn.Buffer(numbered(size)),
    "a result of autograd": lambda size: torch.nn.Parameter(numbered(size)) * 2,
    "columns of another": lambda size: numbered(2 * size)[:, :size],
    "every other element": lambda size: numbered(2 * size)[::2, 1::2],
    "transposed": lambda size: numbered(size).t(),
    "channels last": lambda size: numbered(size).reshape(1, 1, size, size).to(memory_format=torch.channels_last),
    "of four dims": lambda size: numbered(size).reshape(1, size, 1, size),
    "a scalar": lambda size: torch.tensor(3.0),
    "one element": lambda size: torch.tensor([[3.0]]),
    "empty": lambda size: torch.empty(0, size),
    "empty in the middle": lambda size: torch.empty(size, 0, 3, dtype=torch.int16),
    "a subclass with its own memory": lambda size: numbered(size).as_subclass(Named),
    "shared with a numpy array": lambda size: torch.from_numpy(numbered(size).numpy()),
    "in shared memory": lambda size: shared(numbered(size)),
}


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("kind", STORABLE)
async def test_tensors_that_can_be_stored_and_filled(kind: str, size: int) -> None:
    value, into = STORABLE[kind](size), STORABLE[kind](size)
    gradient = into.requires_grad
    await check_round_trip(value, into)
    assert into.requires_grad == gradient
    assert type(into) is type(STORABLE[kind](size))


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_inference_tensors_can_be_stored_and_filled(size: int) -> None:
    with torch.inference_mode():
        value, into = numbered(size), torch.empty(size, size)
    await ts.put("w", value)
    await ts.get("w", into)
    assert torch.equal(into, value)
    assert not (await ts.get("w")).is_inference()
    with torch.inference_mode():
        await ts.get("w", into.zero_())
        assert torch.equal(into, value)
        into.zero_()
    ones = {"w": torch.ones(size, size)}
    await ts.put_state_dict(ones, "m", transfer_dtype=ts.BlockFP8())  # whose readers write values, not bytes
    await ts.get_state_dict("m", {"w": into})
    assert torch.equal(into, ones["w"])


def lazies(size: int, dtype: torch.dtype = torch.complex64) -> dict[str, torch.Tensor]:
    return {"conjugate": numbered(size, dtype).conj(), "negative": numbered(size, dtype).conj().imag}


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("kind", lazies(1))
async def test_conjugate_and_negative_views_are_stored_as_what_they_stand_for(kind: str, size: int) -> None:
    value = lazies(size)[kind]
    await check_round_trip(value, torch.empty(size, size, dtype=value.dtype), direct=False)
    with pytest.raises(ts.KindMismatchError, match=r"'m/layer\.w'.*resolve_conj"):
        await ts.put_state_dict({"layer": {"w": value}}, "m", mode="direct")


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("kind", lazies(1))
async def test_a_conjugate_or_negative_view_is_no_destination(kind: str, size: int) -> None:
    into = lazies(size)[kind]
    before = bits(into).clone()
    value = torch.ones(size, size, dtype=into.dtype)
    await ts.put("w", value)
    await ts.put_state_dict({"layer": {"w": value}}, "m")
    with pytest.raises(ts.KindMismatchError, match=r"'w'.*resolve_conj"):
        await ts.get("w", into)
    with pytest.raises(ts.KindMismatchError, match=r"'m/layer\.w'.*resolve_conj"):
        await ts.get_state_dict("m", {"layer": {"w": into}})
    assert torch.equal(bits(into), before)


async def test_a_view_that_resembles_its_base_is_not_taken_for_it() -> None:
    base = numbered(LARGE, torch.complex64)
    for value in (base, base.conj(), base, base.conj()):  # one address, one shape, one dtype
        for _ in range(2):
            await ts.put_state_dict({"w": value}, "m")
            assert torch.equal((await ts.get_state_dict("m"))["w"], value)
    for _ in range(2):
        await ts.get_state_dict("m", {"w": base})
    with pytest.raises(ts.KindMismatchError):
        await ts.get_state_dict("m", {"w": base.conj()})
    for number, mode in enumerate(("snapshot", "direct")):
        await ts.put_state_dict({"w": base}, mode, mode=mode, version=number + 1)  # type: ignore[arg-type]
    with pytest.raises(ts.KindMismatchError):
        await ts.put_state_dict({"w": base.conj()}, "direct", mode="direct")


def freed(size: int) -> torch.Tensor:
    tensor = numbered(size).clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(size: int) -> torch.Tensor:
    tensor = numbered(size).clone()
    tensor.untyped_storage().resize_(4)
    return tensor


def fake(size: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(size, size)


def uninitialized(size: int) -> torch.Tensor:
    return torch.nn.LazyLinear(size).weight


REFUSED: dict[str, tuple[Make, str]] = {
    "sparse coo": (lambda size: numbered(size).to_sparse(), "to_dense"),
    "sparse csr": (lambda size: numbered(size).to_sparse_csr(), "to_dense"),
    "nested": (lambda size: torch.nested.nested_tensor([torch.zeros(size), torch.zeros(1)]), "unbind"),
    "jagged": (
        lambda size: torch.nested.nested_tensor([torch.zeros(size), torch.zeros(1)], layout=torch.jagged),
        "unbind",
    ),
    "quantized": (lambda size: torch.quantize_per_tensor(torch.zeros(size, size), 0.1, 0, torch.quint8), "int_repr"),
    "meta": (lambda size: torch.zeros(size, size, device="meta"), "meta device"),
    "fake": (fake, "wraps other tensors, or is traced"),
    "a wrapper of others": (lambda size: TwoTensor(numbered(size), numbered(size)), "wraps other tensors"),
    "masked": (
        lambda size: torch.masked.masked_tensor(numbered(size), torch.ones(size, size, dtype=torch.bool)),
        "wraps other tensors",
    ),
    "uninitialized": (uninitialized, "lazy"),
    "freed": (freed, "freed"),
    "shrunk": (shrunk, "shrunk"),
    "zeros without memory": (lambda size: torch._efficientzerotensor((size, size)), "no memory of its own"),
}


@pytest.mark.filterwarnings("ignore")  # torch calls some of these kinds prototypes or deprecated
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("kind", REFUSED)
async def test_tensors_without_dense_memory_of_their_own_are_refused_by_name(kind: str, size: int) -> None:
    make, reason = REFUSED[kind]
    tensor = make(size)
    nested = {"model": {"norm": torch.ones(3), "w": tensor}}
    await ts.put("k", torch.ones(size, size))
    await ts.put_state_dict({"model": {"norm": torch.ones(3), "w": torch.ones(size, size)}}, "m")
    entry, value = rf"'m/model\.w'.*{reason}", rf"'k'.*{reason}"
    with pytest.raises(ts.KindMismatchError, match=value):
        await ts.put("k", tensor)
    with pytest.raises(ts.KindMismatchError, match=value):
        await ts.put_batch({"j": torch.ones(3), "k": tensor})
    assert not await ts.exists("j")
    for options in ({}, {"mode": "direct"}, {"transfer_dtype": torch.bfloat16}, {"transfer_dtype": ts.BlockFP8()}):
        with pytest.raises(ts.KindMismatchError, match=entry):
            await ts.put_state_dict(nested, "m", **options)  # type: ignore[arg-type]
    with pytest.raises(ts.KindMismatchError, match=value):
        await ts.get("k", tensor)
    with pytest.raises(ts.KindMismatchError, match=value):
        await ts.get_batch({"k": tensor})
    with pytest.raises(ts.KindMismatchError, match=entry):
        await ts.get_state_dict("m", nested)
    await ts.get_state_dict(
        "m", {"model": {"norm": torch.zeros(3), "w": torch.zeros(size, size)}, "own": tensor}, strict=False
    )


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
async def test_tensors_within_a_transform_of_torch_func_are_refused(transform: Any) -> None:
    inside: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        inside.append(tensor)
        return tensor.sum()

    transform(keep)(torch.ones(3, 3))
    for work in (ts.put("k", inside[0]), ts.put_state_dict({"k": inside[0]}, "m"), ts.get("k", inside[0])):
        with pytest.raises(ts.KindMismatchError, match=r"k'.*no memory of its own"):
            await work


async def test_what_holds_a_dtensor_is_no_object() -> None:
    with rank_of(0, 2) as mesh:
        local = torch.zeros(4, 4)
        shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        pair = Pair(shard, 3)
        with pytest.raises(ts.KindMismatchError, match=r"'k'.*put_state_dict"):
            await ts.put("k", {"w": shard})
        with pytest.raises(ts.KindMismatchError, match=r"'m/opt\.pair'.*DTensor"):
            await ts.put_state_dict({"w": local, "opt": {"pair": pair, "step": 3}}, "m")


@pytest.mark.parametrize("options", [{}, {"mode": "direct"}, {"transfer_dtype": torch.bfloat16}])
async def test_refused_dtensors_are_named(options: dict[str, Any]) -> None:
    with rank_of(0, 2) as mesh:
        partial = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
        uneven = DTensor.from_local(
            torch.zeros(5, 3), mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 3)), stride=(3, 1)
        )
        without = DTensor.from_local(torch.zeros(4), mesh, [Replicate()], run_check=False)
        without.to_local().untyped_storage().resize_(0)
        for key, value, kind, reason in (
            ("k", partial, ts.UnsupportedPlacementError, "redistribute"),
            ("l", uneven, ts.LayoutMismatchError, "shape= and stride="),
            ("m", without, ts.KindMismatchError, "freed"),
        ):
            with pytest.raises(kind, match=rf"'{key}/layer\.w'.*{reason}"):
                await ts.put_state_dict({"layer": {"w": value}}, key, **options)


async def test_conjugate_dtensors_are_stored_as_what_they_stand_for() -> None:
    with rank_of(0, 1) as mesh:
        value = DTensor.from_local(numbered(LARGE, torch.complex64), mesh, [Replicate()], run_check=False)
        for stored in (value, value.conj(), value):
            await ts.put_state_dict({"w": stored}, "m")
            assert torch.equal((await ts.get_state_dict("m"))["w"], stored.to_local())
            await ts.put("w", stored)
            assert torch.equal(await ts.get("w"), stored.to_local())
        with pytest.raises(ts.KindMismatchError, match="resolve_conj"):
            await ts.get("w", value.conj())


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_new_tensors_lie_in_host_memory_whatever_the_default_device(size: int) -> None:
    value, into = numbered(size), torch.empty(size, size)
    with torch.device("meta"):
        await ts.put("w", value, checksum=True)
        await ts.put("text", "x" * 100 * size)
        await ts.put_state_dict({"w": value, "empty": value[:0]}, "m", mode="direct", checksum=True)
        for _ in range(2):
            await ts.put_state_dict({"w": value}, "d", delta=True)
            await ts.get_state_dict("d", {"w": into}, delta=True)
        await ts.explain("m", {"w": into, "empty": value[:0]})
        assert torch.equal(await ts.get("w"), value)
        assert torch.equal((await ts.get_state_dict("m"))["w"], value)
        assert await ts.get("text") == "x" * 100 * size
    assert torch.equal(into, value)
