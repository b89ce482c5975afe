"""Which rank a process is: from what launchers set, from torch, and from arguments."""

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from skipper import torchstore as ts
from skipper.torchstore.spmd.ranks import Launch, RankPlace, note_place, place_of

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "4711@1",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
}
PREFIXES = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "MPI_", "SLURM_")


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher."""
    for name in os.environ:
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return under(monkeypatch, TORCHRUN)


def under(monkeypatch: pytest.MonkeyPatch, *variables: dict[str, str]) -> pytest.MonkeyPatch:
    for each in variables:
        for name, value in each.items():
            monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.usefixtures("under_torchrun")
def test_the_environment_says_which_rank_this_is() -> None:
    env = ts.SPMDEnv.from_env()
    assert env == ts.SPMDEnv(3, 1, 4, 2, "127.0.0.1", 29500)
    assert (env.num_hosts, env.group_rank) == (2, 1)
    assert Launch.find() == Launch(3, 4, 2, "127.0.0.1", 29500)


@pytest.mark.parametrize("name", TORCHRUN)
def test_a_missing_variable_is_named(under_torchrun: pytest.MonkeyPatch, name: str) -> None:
    under_torchrun.delenv(name)
    with pytest.raises(ts.StoreRendezvousError, match=f"with {name} set") as raised:
        ts.SPMDEnv.from_env()
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "two"), ("RANK", "4"), ("LOCAL_WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "0")]
)
def test_variables_that_make_no_sense_are_refused(under_torchrun: pytest.MonkeyPatch, name: str, value: str) -> None:
    under_torchrun.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}|do not fit together"):
        ts.SPMDEnv.from_env()


def test_rank_is_looked_at_before_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="with RANK set"):
        Launch.find()
    monkeypatch.setenv("LOCAL_RANK", "none")
    with pytest.raises(ValueError, match="with RANK set"):
        Launch.find()
    under(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1"})
    with pytest.raises(ValueError, match="LOCAL_RANK is 'none' and should be a number"):
        Launch.find()


def test_where_the_ranks_meet_may_be_said_by_the_caller(under_torchrun: pytest.MonkeyPatch) -> None:
    under_torchrun.delenv("MASTER_ADDR")
    under_torchrun.delenv("MASTER_PORT")
    env = ts.SPMDEnv.from_env(master_addr="localhost", master_port=1)
    assert (env.master_addr, env.master_port) == ("localhost", 1)


def test_open_mpi_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch, OPEN_MPI, SLURM | {"SLURM_PROCID": "0"})  # mpirun in an allocation of Slurm
    launch = Launch.find()
    assert (launch.rank, launch.world_size, launch.is_one_host, launch.job) == (2, 3, True, "4711@1")


def test_slurm_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch, SLURM)
    assert Launch.find() == Launch(5, 6, 3, "gpu007", None, "12:0")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "login,gpu3")
    assert Launch.find().master_addr == "login"
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")  # the script of sbatch is no rank
    with pytest.raises(ValueError, match="with RANK set"):
        Launch.find()


def test_what_plain_processes_set_comes_before_what_is_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch, SLURM, {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")})
    launch = Launch.find()
    assert (launch.rank, launch.world_size, launch.is_one_host) == (3, 4, None)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group", "under_torchrun")
def test_an_initialized_group_comes_before_the_environment_and_arguments_before_both() -> None:
    launch = Launch.find()
    assert (launch.rank, launch.world_size, launch.local_world_size, launch.has_group) == (0, 1, None, True)
    launch = Launch.find(rank=1, world_size=2)
    assert (launch.rank, launch.world_size, launch.has_group) == (1, 2, False)
    launch = Launch.find(ts.SPMDEnv(5, 1, 6, 3, "host", 7))
    assert launch == Launch(5, 6, 3, "host", 7)
    with pytest.raises(ValueError, match="rank= and world_size= together"):
        Launch.find(rank=1)
    with pytest.raises(ValueError, match="do not fit together"):
        Launch.find(rank=2, world_size=2)


def test_ranks_have_a_name_in_common_that_others_do_not_have(under_torchrun: pytest.MonkeyPatch) -> None:
    name = Launch.find().token("default")
    under_torchrun.setenv("RANK", "0")
    assert Launch.find().token("default") == name
    others = {Launch.find().token("other")}
    for variable, value in {"MASTER_PORT": "1", "PMIX_NAMESPACE": "1@1", "SLURM_JOB_ID": "1"}.items():
        with pytest.MonkeyPatch.context() as patch:
            under(patch, {variable: value, "SLURM_STEP_ID": "0"})
            others.add(Launch.find().token("default"))
    assert len(others | {name}) == 5


def test_ranks_that_have_nothing_in_common_are_told_what_to_set(under_torchrun: pytest.MonkeyPatch) -> None:
    under_torchrun.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="with MASTER_PORT set"):
        Launch.find().token("default")


def test_the_place_of_a_rank_is_known_by_the_name_of_the_store() -> None:
    place = RankPlace(1, 2, 0, 1, 1, 2)
    note_place("some", place)
    assert (place_of("some"), place_of("other")) == (place, None)
    note_place("some", None)
    assert place_of("some") is None
