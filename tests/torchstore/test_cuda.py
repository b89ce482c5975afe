"""The store with tensors on a GPU: from GPU to GPU, by way of the host, in place, and in the order of streams."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.control import this_host
from skipper.torchstore import sync
from skipper.torchstore.algebra.manifest import Mode
from tests.gpu.gates import needs_gpus, needs_nccl
from tests.gpu.kernels import occupy
from tests.torchstore.cuda_ranks import CudaRank, FsdpRank, content

pytestmark = needs_gpus()

RANKS = 2
START_S = 90.0


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    procs = this_host().spawn_procs(per_host={"gpus": 2 * RANKS + 1})
    yield procs
    procs.stop().get(timeout=20)


@pytest.fixture(scope="module")
def trainers(procs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """They cut by rows."""
    address = f"file://{Path(tmp_path_factory.mktemp('trainers')) / 'rendezvous'}"
    mesh = procs.slice(gpus=slice(0, RANKS)).spawn("trainers", CudaRank, address, RANKS, 0)
    mesh.initialized.get(timeout=START_S)
    return mesh


@pytest.fixture(scope="module")
def generators(procs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """They cut by columns: every read takes strided parts of two trainers."""
    address = f"file://{Path(tmp_path_factory.mktemp('generators')) / 'rendezvous'}"
    mesh = procs.slice(gpus=slice(RANKS, 2 * RANKS)).spawn("generators", CudaRank, address, RANKS, 1)
    mesh.initialized.get(timeout=START_S)
    return mesh


@pytest.fixture
async def store() -> AsyncIterator[None]:
    await ts.initialize()
    yield
    await ts.shutdown()


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("mode", ["direct", "snapshot"])
async def test_dtensors_are_resharded_from_gpu_to_gpu(trainers: Any, generators: Any, mode: Mode, busy: bool) -> None:
    for version in range(3):
        if version and mode == "direct":
            await trainers.fence.call("model")
        await trainers.publish.call(10 + version, "model", mode, busy)
        assert list(await generators.pull.call(10 + version, "model", busy)) == [[]] * RANKS


@pytest.mark.usefixtures("store")
async def test_checksums_are_those_of_the_bytes_on_the_gpu(trainers: Any, generators: Any) -> None:
    await trainers.publish.call(5, "summed", "snapshot", False, checksum=True)
    assert list(await generators.pull.call(5, "summed")) == [[]] * RANKS


@pytest.mark.usefixtures("store")
async def test_what_is_put_from_a_gpu_is_new_on_the_host_and_in_place_where_it_was_asked_for() -> None:
    for count in (5, 1 << 20):  # one that travels inline, one that does not
        source = torch.arange(count, device="cuda")
        await ts.put("value", source)
        got = await ts.get("value")
        assert got.device.type == "cpu"
        assert torch.equal(got, torch.arange(count))
        parameter = torch.nn.Parameter(torch.zeros(count, device="cuda"), requires_grad=False)
        await ts.put("value", source.float())
        assert await ts.get("value", parameter) is parameter
        assert torch.equal(parameter.cpu(), torch.arange(float(count)))


@pytest.mark.usefixtures("store")
async def test_a_dtype_for_the_way_is_cast_on_the_gpu_in_the_order_of_the_stream() -> None:
    source = {"w": torch.zeros(1 << 20, device="cuda")}
    into = {"w": torch.zeros(1 << 20, device="cuda", dtype=torch.bfloat16)}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        occupy()
        source["w"].fill_(3)
        await ts.put_state_dict(source, "cast", transfer_dtype=torch.bfloat16)
        await ts.get_state_dict("cast", into)
        doubled = into["w"] * 2
    torch.cuda.synchronize()
    assert (doubled == 6).all()


def test_the_store_for_threads_keeps_the_order_of_the_callers_stream() -> None:
    sync.initialize()
    try:
        source, into = (torch.zeros(1 << 20, device="cuda") for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            occupy()
            source.fill_(4)
            sync.put("late", source)
            occupy()
            old = into.clone()
            sync.get("late", into)
            new = into.clone()
        torch.cuda.synchronize()
        assert (old == 0).all()
        assert (new == 4).all()
    finally:
        sync.shutdown()


class TestFsdp2:
    """Parameters of `fully_shard`."""

    pytestmark = needs_nccl()

    @pytest.mark.usefixtures("store")
    @pytest.mark.parametrize("mode", ["direct", "snapshot"])
    async def test_parameters_are_put_after_a_step_and_got_in_place(
        self, procs: Any, tmp_path: Path, mode: Mode
    ) -> None:
        mesh = procs.slice(gpus=2 * RANKS).spawn(f"fsdp_{mode}", FsdpRank, f"file://{tmp_path / 'rendezvous'}")
        await mesh.initialized
        try:
            published = await mesh.step_and_publish.call_one("fsdp", mode)
            mine = {name: torch.zeros_like(value, device="cuda") for name, value in published.items()}
            await ts.get_state_dict("fsdp", mine)
            assert all(torch.equal(mine[name].cpu(), value) for name, value in published.items())
            await ts.put_state_dict({name: value + 1 for name, value in mine.items()}, "other")
            got = await mesh.step_and_pull.call_one("other")
            assert all(torch.equal(got[name], value + 1) for name, value in published.items())
        finally:
            await mesh.stop()


def test_the_content_of_two_versions_differs() -> None:
    assert all(not torch.equal(one, content(2)[name]) for name, one in content(1).items())
