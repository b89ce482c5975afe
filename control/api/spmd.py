"""`SpmdActor`: ordinary ``torch.distributed`` code, a function or a script, as an actor on each process of a mesh."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipper.control.api.actor import Actor, concurrent_endpoint, endpoint
from skipper.control.api.mesh import get_or_spawn_controller
from skipper.control.model.errors import ScriptExitError
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.context import context
from skipper.control.runtime.join_file import this_network
from skipper.control.support.gathering import Gatherings
from skipper.control.wire.addresses import device_of, host_of

MEET_TIMEOUT_S = 60.0
"""How long the ranks of a run wait for the last of them: ranks that import torch first come seconds apart."""

_RENDEZVOUS = "skipper-spmd-rendezvous"
_LOOPBACK = "127.0.0.1"
_INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""What says through which network device the libraries of ``torch.distributed`` go; ``=``: this, and no longer name."""


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank runs.

    Attributes:
        network: the same for all that share a loopback.
        host: how others reach it: an IP where the job has other hosts.
        port: one that is free there.
    """

    network: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class SpmdRank:
    """What ``torchrun`` tells a process, here for one run on the processes of a mesh.

    ``host_rank`` numbers the hosts in the order of ranks; ``master_port`` was free a moment ago; ``interface`` is the
    network device through which this rank meets the others, None where it is not known.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_rank: int
    master_addr: str
    master_port: int
    interface: str | None = None

    @staticmethod
    def of(rank: int, places: list[RankLocation]) -> SpmdRank:
        """The rank among processes at these places, in rank order."""
        hosts = [place.network for place in places]
        own = hosts[rank]
        is_alone = hosts.count(own) == len(hosts)
        return SpmdRank(
            rank=rank,
            world_size=len(places),
            local_rank=hosts[:rank].count(own),
            local_world_size=hosts.count(own),
            host_rank=list(dict.fromkeys(hosts)).index(own),
            master_addr=_LOOPBACK if is_alone else places[0].host,
            master_port=places[0].port,
            interface=_device(_LOOPBACK if is_alone else places[rank].host),
        )

    def environment(self) -> dict[str, str]:
        """The variables that ``torch.distributed`` reads, and those that scripts written for ``torchrun`` do."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.host_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            # Under torchrun it says that the launcher serves the store at MASTER_PORT. Here that is rank 0's part.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        if self.interface is not None:  # without it gloo looks for the name of the machine, which may be unknown
            variables |= {name: value.format(self.interface) for name, value in _INTERFACE_VARIABLES.items()}
        return variables


class SpmdActor(Actor):
    """Runs code that was written for ``torchrun``, unchanged, in each process of a mesh; again as often as you like.

    ``procs.spawn("trainers", SpmdActor, main, *args)`` and then ``trainers.run.call().get()``. While ``main`` runs, the
    environment of every process says RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
    MASTER_PORT, so that ``init_process_group()`` finds the others. Those of other hosts meet at the IPs that these were
    attached with, through the network devices that have them: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME say so, where
    the environment of a process does not say anything else. A default process group that ``main`` leaves behind is
    destroyed when it ends, also by an error: the other ranks do not wait for one that has failed.

    Args:
        main: a function; or a script, by a path that ends in ``.py``; or a module, by its name, as for ``python -m``.
        *args: what `run` passes on if it gets nothing itself. Scripts and modules find it in ``sys.argv``, as strings.
        **kwargs: the same, for functions only.

    Raises:
        FileNotFoundError: there is no such script; as all of these, the actor's ``__init__`` fails with it.
        TypeError: ``main`` is none of these.
    """

    def __init__(self, main: Callable[..., Any] | str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        self._main = _runner(main)
        self._args = args
        self._kwargs = kwargs
        self._runs = 0
        self._rendezvous = get_or_spawn_controller(_RENDEZVOUS, _Rendezvous).get(MEET_TIMEOUT_S)

    @endpoint
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run it once more. Every rank has to, so call it on the whole mesh.

        Args:
            *args: in place of those from the spawn, if there are any here.
            **kwargs: the same.

        Returns:
            What the function returns; None for scripts and modules.

        Raises:
            TypeError: the arguments do not fit, or a script got some with keywords.
            ValueError: it was called on a slice: spawn on a slice of the processes instead.
            AbsentError: (a `RendezvousError`) not all ranks came to run it within `MEET_TIMEOUT_S`.
            ScriptExitError: a script or module ended with another status than 0.
        """
        if not (args or kwargs):
            args, kwargs = self._args, self._kwargs
        rank = self._meet()
        variables = rank.environment()
        for name in _INTERFACE_VARIABLES.keys() & os.environ.keys():
            variables.pop(name, None)  # the user's choice stands
        with _environment(variables):
            try:
                return self._main(*args, **kwargs)
            finally:
                _leave_process_group()

    def _meet(self) -> SpmdRank:
        """Find the other ranks of this run."""
        actor = context().actor_instance
        if context().message_rank.extent.nelements != actor.rank.size:
            raise ValueError("SPMD code runs on a whole mesh: spawn the SpmdActor on a slice of the processes instead")
        self._runs += 1
        own = RankLocation(this_network(), _own_host(), _free_port())
        meeting = self._rendezvous.meet.call_one((actor.mesh_uid, self._runs), actor.rank.rank, actor.rank.size, own)
        return SpmdRank.of(actor.rank.rank, meeting.get(2 * MEET_TIMEOUT_S))


class _Rendezvous(Actor):
    """Where the ranks of a run tell each other where they are: one actor of the job, in the script's process."""

    def __init__(self) -> None:
        self._gatherings: Gatherings[RankLocation] = Gatherings()

    @concurrent_endpoint
    async def meet(self, run: tuple[int, int], rank: int, size: int, place: RankLocation) -> list[RankLocation]:
        """Wait until all are here.

        Returns:
            Their places, in rank order.

        Raises:
            AbsentError: (a `RendezvousError`) some have not come.
        """
        places = await self._gatherings.gather(run, {rank: place}, expected=range(size), timeout_s=MEET_TIMEOUT_S)
        return list(places.values())


def _runner(main: Callable[..., Any] | str | os.PathLike[str]) -> Callable[..., Any]:
    if callable(main):
        return main
    if not isinstance(main, str | os.PathLike):
        raise TypeError(f"SpmdActor runs a function, the path of a script or the name of a module, not {main!r}")
    name = os.fspath(main)
    if not name.endswith(".py"):
        return _Script(name, runpy.run_module, alter_sys=True)
    if not Path(name).is_file():
        raise FileNotFoundError(f"there is no script {name} in {os.getcwd()}")
    return _Script(name, runpy.run_path)


class _Script:
    """A script or module as a function of its command line."""

    def __init__(self, name: str, run: Callable[..., Any], **options: bool) -> None:
        self._name = name
        self._run = run
        self._options = options

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:
            raise TypeError(
                f"{self._name} is a script: it gets strings in sys.argv, and no keywords ({', '.join(kwargs)})"
            )
        argv, path = sys.argv, list(sys.path)
        sys.argv = [self._name, *map(str, args)]
        if not self._options:  # as the interpreter does for scripts
            sys.path.insert(0, str(Path(self._name).resolve().parent))
        try:
            self._run(self._name, run_name="__main__", **self._options)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ScriptExitError(self._name, end.code) from None
        finally:
            sys.argv, sys.path[:] = argv, path


def _own_host() -> str:
    """Where others reach this host: at the IP that it was attached with, or where it is the script's, listens at."""
    process = runtime.current()
    return host_of(process.me.address) or host_of(process.root.address) or socket.gethostname()


def _device(host: str) -> str | None:
    try:
        return device_of(host)
    except ValueError:  # a name
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set them for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _leave_process_group() -> None:
    """Destroy the default process group of ``torch.distributed``, where the code has imported that and left one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
