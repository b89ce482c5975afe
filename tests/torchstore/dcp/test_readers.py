"""`StoreReader` by itself: which version ranks read, and who lets go of it."""

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan

from skipper import control
from skipper import torchstore as ts
from skipper.control import Actor, endpoint, this_host
from skipper.torchstore import sync
from skipper.torchstore.dcp import StoreReader, StoreWriter

NUMEL = 1 << 20
CONTROL = Path(control.__file__).parent
LIMIT_S = 60.0
PATIENCE_S = 20.0

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def save(value: float, key: str = "run") -> None:
    dcp.save({"w": torch.full((NUMEL,), float(value))}, storage_writer=StoreWriter(key, timeout=PATIENCE_S))


class Rank:
    """What `torch.distributed.checkpoint.load` does on one rank, a step at a time."""

    def __init__(self, *, is_coordinator: bool) -> None:
        self.state = {"w": torch.zeros(NUMEL)}
        self.reader = StoreReader("run")
        self.planner = dcp.DefaultLoadPlanner()
        self.is_coordinator = is_coordinator

    def plan(self) -> LoadPlan:
        self.reader.reset()
        metadata = self.reader.read_metadata()
        self.planner.set_up_planner(self.state, metadata, self.is_coordinator)
        self.reader.set_up_storage_reader(metadata, self.is_coordinator)
        return self.reader.prepare_local_plan(self.planner.create_local_plan())

    def share(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return self.reader.prepare_global_plan(self.planner.create_global_plan(plans))

    def read(self, plan: LoadPlan) -> float:
        self.reader.read_data(self.planner.finish_plan(plan), self.planner).wait()
        (value,) = self.state["w"].unique().tolist()
        return float(value)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("coordinator", [0, 1])
async def test_ranks_that_found_different_versions_read_the_newest_though_others_have_read_and_saved_since(
    coordinator: int,
) -> None:
    ranks = [Rank(is_coordinator=rank == coordinator) for rank in range(2)]
    save(1)
    first = ranks[0].plan()
    save(2)
    plans = ranks[coordinator].share([first, ranks[1].plan()])
    assert ranks[1].read(plans[1]) == 2
    save(3)  # the version that both agreed on is kept by nobody but them
    assert await ts.versions("run") == (3,)
    assert ranks[0].read(plans[0]) == 2


@pytest.fixture
async def bounded() -> Any:
    """A store with room for two versions, the newest one and the next; not for one more that somebody holds."""
    await ts.initialize(volume_nbytes=NUMEL * 4 * 5 // 2)
    yield
    await ts.shutdown()


@pytest.mark.usefixtures("bounded")
async def test_no_version_is_held_when_a_load_has_ended_well_or_not() -> None:
    save(1)
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        dcp.load({"w": torch.zeros(3)}, storage_reader=StoreReader("run"))
    gc.collect()
    save(2)
    save(3)  # waits until nobody reads the first
    state = {"w": torch.zeros(NUMEL)}
    dcp.load(state, storage_reader=StoreReader("run"))
    assert state["w"][0] == 3
    save(4)
    save(5)
    with StoreReader("run") as reader:
        reader.read_metadata()
        save(6)
        with pytest.raises(dcp.CheckpointException, match="full"):
            dcp.save({"w": torch.zeros(NUMEL)}, storage_writer=StoreWriter("run", timeout=0.5))
    save(7)


class Loader(Actor):
    """Has a load that fails, and lets go of its reader in a thread that is no actor's."""

    @endpoint
    async def drop_a_reader_elsewhere(self, key: str) -> set[str]:
        """The files of control whose code the finaliser has run."""
        held, files = [StoreReader(key)], set[str]()
        held[0].read_metadata()

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                files.add(frame.f_code.co_filename)

        def drop() -> None:
            sys.setprofile(note)
            held.clear()
            sys.setprofile(None)

        elsewhere = threading.Thread(target=drop)
        elsewhere.start()
        elsewhere.join()
        return {str(Path(file).relative_to(CONTROL)) for file in files if Path(file).is_relative_to(CONTROL)}


@pytest.fixture
def loader() -> Iterator[Any]:
    procs = this_host().spawn_procs()
    yield procs.spawn("loader", Loader)
    procs.stop().get(timeout=LIMIT_S)


@pytest.mark.usefixtures("bounded")
async def test_a_reader_that_goes_in_any_thread_lets_go_of_its_version_and_sends_nothing_there(loader: Any) -> None:
    save(1)
    assert await loader.drop_a_reader_elsewhere.call_one("run") == {"api/coroutine_thread.py"}
    save(2)
    save(3)  # waits until nobody reads the first
    assert (await ts.get_state_dict("run"))["w"][0] == 3


@pytest.mark.usefixtures("store")
async def test_in_the_thread_that_runs_coroutines_a_load_would_wait_for_itself() -> None:
    save(1)
    said: list[str] = []

    def names(name: str) -> str:
        with contextlib.suppress(ts.BlockingCallError):
            StoreReader("run").read_metadata()
            said.append("it waited")
        return name

    mine = {"w": torch.zeros(NUMEL)}
    await asyncio.to_thread(sync.get_state_dict, "run", mine, names=names)
    assert mine["w"][0] == 1
    assert said == []
