"""`SpmdActor`: ordinary ``torch.distributed`` code, a function or a script, as an actor on each process of a mesh."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipper.control.api import spmd_runs
from skipper.control.api.actor import Actor, endpoint
from skipper.control.api.mesh import get_or_spawn_controller
from skipper.control.api.spmd_runs import RankFailure, RankLocation, SpmdRuns
from skipper.control.model.errors import ActorError, ControlError, RankFailedError, ScriptExitError
from skipper.control.model.exception_text import MOST_MESSAGE, describe, shorten, summarize
from skipper.control.model.future import Future
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.context import BaseActorInstance, context, local_actor
from skipper.control.runtime.join_file import this_network
from skipper.control.support.held_port import HeldPort
from skipper.control.support.process_groups import (
    LOOK_S,
    RunGroups,
    StorePlace,
    collect_failed_run,
    forget_process_groups,
    is_of_broken_group,
    waits_in_torch,
)
from skipper.control.wire.addresses import device_of, host_of

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh

LEAVE_TIMEOUT_S = 20.0
"""How long code may stay at the same place in an aborted collective, before its actor is given up."""

_RUNS = "skipper-spmd-runs"
_LOOPBACK = "127.0.0.1"
_INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Variables with the network device for the libraries of ``torch.distributed``; ``=``: exactly this name."""


@dataclass(frozen=True, slots=True)
class SpmdRank:
    """What a process gets from ``torchrun``, here for one run on the processes of a mesh.

    ``host_rank`` numbers the hosts in the order of ranks; rank 0's process holds ``master_port`` while the run lasts;
    ``interface`` is the network device through which this rank reaches the others, None if it is not known.
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

    @property
    def store(self) -> StorePlace:
        """Where the ranks meet."""
        return StorePlace(self.master_addr, self.master_port, self.world_size, is_here=self.host_rank == 0)

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
            # Under torchrun, this says that the launcher serves the store at MASTER_PORT. Here, rank 0 does.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        if self.interface is not None:  # without it, gloo resolves the name of the machine, which may be unknown
            variables |= {name: value.format(self.interface) for name, value in _INTERFACE_VARIABLES.items()}
        return variables


class SpmdActor(Actor):
    """Runs code that was written for ``torchrun``, unchanged, in each process of a mesh, as often as you like.

    ``procs.spawn("trainers", SpmdActor, main, *args)`` and then ``trainers.run.call().get()``. While ``main`` runs, the
    environment of every process has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and
    MASTER_PORT, so that ``init_process_group()`` finds the others. Processes of several hosts connect to each other at
    the IPs that the hosts were attached with, through the network devices that have these IPs: GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME are set to them, unless the environment of a process sets them. A default process group that
    ``main`` has not destroyed is destroyed when ``main`` ends.

    Ranks fail together. When one raises or dies, the process groups of the others are aborted, their waits in these
    raise, and their `run` ends with `RankFailedError`, which names the first. The next run makes new groups.

    Args:
        main: a function; or a script, by a path that ends in ``.py``; or a module, by its name, as for ``python -m``.
        *args: the arguments, unless `run` gets some itself. Scripts and modules get them in ``sys.argv``, as strings.
        **kwargs: the same, for functions only.

    Raises:
        FileNotFoundError: there is no such script; raised in the actor's ``__init__``, like the next one.
        TypeError: ``main`` is none of these.

    Example:
        ```python
        from skipper.control import SpmdActor, this_host

        def train(steps: int) -> float:
            import torch
            import torch.distributed as dist

            dist.init_process_group("gloo")
            loss = torch.tensor(1.0 / (steps + dist.get_rank()))
            dist.all_reduce(loss)
            return float(loss)

        trainers = this_host().spawn_procs({"gpus": 2}).spawn("trainers", SpmdActor, train, 1)
        print(trainers.run.call().get(timeout=60))  # [1.5, 1.5]
        ```
    """

    def __init__(self, main: Callable[..., Any] | str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        self._main = _runner(main)
        self._args = args
        self._kwargs = kwargs
        self._runs = 0
        self._failed: RunGroups | None = None
        self._job = get_or_spawn_controller(_RUNS, SpmdRuns).get(spmd_runs.MEET_TIMEOUT_S)

    @endpoint
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run it once more. Every rank has to, so call it on the whole mesh.

        Args:
            *args: if there are any, they replace those from the spawn.
            **kwargs: the same.

        Returns:
            What the function returns; None for scripts and modules.

        Raises:
            TypeError: the arguments do not fit, or a script got some with keywords.
            ValueError: it was called on a slice: spawn on a slice of the processes instead.
            AbsentError: (a `RendezvousError`) not all ranks came to run it within `MEET_TIMEOUT_S`.
            RankFailedError: another rank has raised or died; what this one waited for was aborted.
            ScriptExitError: a script or module ended with another status than 0.
        """
        if not (args or kwargs):
            args, kwargs = self._args, self._kwargs
        actor = context().actor_instance
        if context().message_rank.extent.nelements != actor.rank.size:
            raise ValueError("SPMD code runs on a whole mesh: spawn the SpmdActor on a slice of the processes instead")
        if self._failed is not None:
            collect_failed_run()
            self._failed.close()
            self._failed = None
        self._runs += 1
        with ExitStack() as stack:
            port = stack.enter_context(HeldPort()).number if actor.rank.rank == 0 else 0
            membership = _Membership(self._job, actor, self._runs)
            rank = membership.meet(RankLocation(this_network(), _own_host(), port))
            variables = rank.environment()
            for name in _INTERFACE_VARIABLES.keys() & os.environ.keys():
                variables.pop(name, None)  # the user's choice takes precedence
            stack.enter_context(_environment(variables))
            self._failed = RunGroups(rank.store)  # until it is known to have succeeded
            with membership.follow(self._failed):
                result = self._main(*args, **kwargs)
            self._failed = None
            return result


class _Membership:
    """A rank's part in one run: it meets the others, and ends together with them if one fails. On the actor's thread.

    Args:
        job: the actor that knows all runs.
        actor: the actor of this rank.
        run: the number of the run.
    """

    def __init__(self, job: ActorMesh[SpmdRuns], actor: BaseActorInstance, run: int) -> None:
        self._job = job
        self._actor = actor
        self._member = local_actor(actor).ref
        self._run = run
        self._thread_id = threading.get_ident()
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._was_aborted = False

    def meet(self, place: RankLocation) -> SpmdRank:
        """Find the other ranks."""
        size = self._member.rank.size
        meeting = self._job.meet.call_one(self._member, self._run, size, place)
        try:
            return SpmdRank.of(self._member.rank.rank, meeting.get(2 * spmd_runs.MEET_TIMEOUT_S))
        except ActorError as error:
            if isinstance(error.cause, RankFailedError):
                raise error.cause from None
            raise

    @contextmanager
    def follow(self, groups: RunGroups) -> Iterator[None]:
        """While the code runs: end it if another rank has failed, and tell the others if it has failed itself.

        Raises:
            RankFailedError: another rank was the first.
        """
        failure = self._job.wait_for_failure.call_one(self._member, self._run)
        failure.add_done_callback(lambda told: self._start_abort(groups, told))
        try:
            yield
            self._leave()
            if (
                self._was_aborted
            ):  # NCCL lets code that waits for a stream continue, with undefined values in the memory
                raise _CutShortError("the code ended after its process groups had been aborted")
        except BaseException as error:
            self._leave()
            try:
                first = self._tell(groups, error)
            finally:
                forget_process_groups(has_failed=True)
            if first is None or first.rank == self._member.rank.rank:
                raise
            raise first.as_error(self._member.rank.size) from (None if isinstance(error, _CutShortError) else error)
        self._job.leave.call_one(self._member, self._run, None).get(spmd_runs.MEET_TIMEOUT_S)
        forget_process_groups(has_failed=False)

    def _tell(self, groups: RunGroups, error: BaseException) -> RankFailure | None:
        """Make the other ranks leave, and find out which failed first; None if this rank was the first."""
        is_consequence = isinstance(error, _CutShortError) or is_of_broken_group(error)
        text = shorten(describe(error), MOST_MESSAGE)
        own = RankFailure(self._member.rank.rank, summarize(error), text, is_consequence)
        first = self._job.leave.call_one(self._member, self._run, own)
        while not groups.abort():
            time.sleep(LOOK_S)
        if self._member.rank.rank == 0:
            groups.serve_store()
        # Something that is not an Exception ends this actor, as it should.
        if not isinstance(error, Exception) or not (is_consequence or self._was_aborted):
            return None
        return first.get(2 * spmd_runs.VERDICT_S)

    def _start_abort(self, groups: RunGroups, told: Future[bool]) -> None:
        if told.exception() is None and told.get() and not self._left.is_set():
            threading.Thread(target=self._abort, args=(groups,), name="skipper-spmd-abort", daemon=True).start()

    def _abort(self, groups: RunGroups) -> None:
        """Make the code's collectives raise until it has left: it may catch the error and begin others."""
        since, where = time.monotonic(), None
        while True:
            with self._lock:  # never those of a later run
                if self._left.is_set():
                    return
                self._was_aborted = True
                groups.abort()
            if self._left.wait(LOOK_S):
                return
            if (now := waits_in_torch(self._thread_id)) is None or now != where:
                since, where = time.monotonic(), now
            elif time.monotonic() > since + LEAVE_TIMEOUT_S:
                self._actor.abort(
                    f"another rank has failed, and this one has not left its collective within {LEAVE_TIMEOUT_S:g} s: "
                    f"it stands at {where}. Its thread waits until torch gives up; stop the process to end it"
                )
                return

    def _leave(self) -> None:
        with self._lock:
            self._left.set()


class _CutShortError(ControlError):
    """The code ended after its process groups had been aborted, so its result is not valid."""


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
    """The IP at which others reach this host: the one that it was attached with, or that the script listens at."""
    process = runtime.current()
    return host_of(process.me.address) or host_of(process.root.address) or socket.gethostname()


def _device(host: str) -> str | None:
    try:
        return device_of(host)
    except ValueError:  # a name
        return None


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set them until the end of the context."""
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
