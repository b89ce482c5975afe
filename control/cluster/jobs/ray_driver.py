"""The process of a script that talks to Ray: ``ray_driver.py``, which reads requests and answers as lines of JSON.

It is a separate process since `ray.init` changes its process: handlers of SIGTERM and SIGSEGV, ``sys.excepthook``,
``sys.path``, ``PYTHONBREAKPOINT``, about twenty threads; and since it cannot be interrupted while it looks for a
missing cluster. Ray ends everything of this process when it ends, and it ends with the script.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_LOOK_S = 0.2
"""How long the actors have to answer a poll."""

_ASK_S = 5.0
"""How long an actor has to answer if its answer was requested."""

_REACH_S = 5.0
"""How long the head of a cluster has to accept a connection; `ray.init` would try for minutes."""


@dataclass(slots=True)
class _RayPlace:
    """One place: its actor, and what is known about it.

    Attributes:
        actor: Ray's handle of the actor.
        asked: the requested report that has not come yet.
        since: how many bytes of its output are known already.
        output: the end of that output.
        address: where its agent listens; None before it does.
        failure: why it is lost; empty if it is not.
        has_ended: whether the agent has ended in good order.
    """

    actor: Any
    asked: Any = None
    since: int = 0
    output: bytearray = field(default_factory=bytearray)
    address: str | None = None
    failure: str = ""
    has_ended: bool = False

    @property
    def is_over(self) -> bool:
        return self.has_ended or bool(self.failure)

    def described(self) -> dict[str, str | None]:
        """The place in the form for `RayJob`."""
        state = "failed" if self.failure else "ended" if self.has_ended else "running" if self.address else "pending"
        return {"state": state, "address": self.address, "reason": self.failure}


class Driver:
    """A connection with a cluster, and one job there, from the config that `RayJob` makes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._places: list[_RayPlace] = []
        self._group: Any = None

    def submit(self, places: int) -> None:
        """Connect, and make the placement group and its actors."""
        import ray
        from ray.util.placement_group import placement_group

        address = str(self._config["address"])
        _see_whether_reachable(address)
        given = {"log_to_driver": False, "logging_level": "error", **self._config["init"]}
        ray.init(address=address, **given)
        bundles = [dict(self._config["resources"]) for _ in range(places)]
        self._group = placement_group(bundles, strategy=self._config["strategy"], name=self._config["name"])
        self._places = [_RayPlace(self._agent_of(rank)) for rank in range(places)]

    def poll(self) -> list[dict[str, str | None]]:
        """What is known about each place."""
        self._ask(self._places, _LOOK_S)
        return [place.described() for place in self._places]

    def replace(self, rank: int) -> None:
        """Start another actor in the same bundle, which Ray moves to another node if its own is gone."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._places[rank].actor)
        self._places[rank] = _RayPlace(self._agent_of(rank))

    def log(self, rank: int) -> str:
        """The kept output of an agent."""
        place = self._places[rank]
        self._ask([place], _ASK_S if place.address else _LOOK_S)
        return place.output.decode(errors="replace")

    def cancel(self) -> list[str]:
        """End everything; returns the kept output of each agent."""
        import ray
        from ray.util.placement_group import remove_placement_group

        self._ask(self._places, _LOOK_S)
        for place in self._places:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(place.actor)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()
        return [place.output.decode(errors="replace") for place in self._places]

    def _agent_of(self, rank: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from skipper.control.cluster.jobs.ray_agent_process import NodeAgentProcess

        resources = dict(self._config["resources"])
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": 0,
            "name": f"{self._config['name']}-{rank}-{os.urandom(4).hex()}",
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
        }
        files = {name: content.encode() for name, content in self._config["files"].items()}
        return (
            ray.remote(NodeAgentProcess).options(**options).remote(files, self._config["options"], self._config["env"])
        )

    def _ask(self, places: list[_RayPlace], timeout_s: float) -> None:
        """Request reports from the actors of some places, and take those that come in time."""
        import ray

        asked = [place for place in places if not place.is_over]
        for place in asked:
            if place.asked is None:
                place.asked = place.actor.report.remote(place.since)
        refs = [place.asked for place in asked]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]) if refs else set()
        for place in asked:
            if place.asked in ready:
                _take_in(place)


def _take_in(place: _RayPlace) -> None:
    import ray

    from skipper.control.cluster.jobs.ray_agent_process import MOST_LOG_NBYTES

    ref, place.asked = place.asked, None
    try:
        report = ray.get(ref)
    except ray.exceptions.ActorUnavailableError:
        return  # it may come back
    except ray.exceptions.RayError as error:
        place.failure = f"its actor is gone: {str(error).strip() or type(error).__name__}"
        return
    place.output += report["output"]
    del place.output[:-MOST_LOG_NBYTES]
    place.since = report["written"]
    place.address = report["address"]
    if report["status"] is not None:
        place.has_ended = report["status"] == 0
        place.failure = "" if place.has_ended else f"its agent ended with status {report['status']}"


def _see_whether_reachable(address: str) -> None:
    """Raise `ConnectionError` at once if no process listens at an address with a port."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        except OSError as error:
            raise ConnectionError(f"nothing answers at {address}: {error}") from None


def main() -> None:
    """Answer requests until the script closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Ray prints is not an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the script, which then closes the pipe
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    driver = Driver(json.loads(requests.get()))
    while True:
        method, *arguments = json.loads(requests.get())
        answers.write(json.dumps(_answer(getattr(driver, method), arguments)) + "\n")
        answers.flush()


def _read(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # even if the main thread waits: Ray ends everything of this process


def _answer(method: Callable[..., object], arguments: list[Any]) -> dict[str, object]:
    try:
        return {"result": method(*arguments)}
    except Exception as error:  # noqa: BLE001  # Ray's errors have no common root; the script says which it was
        return {"error": f"{type(error).__name__}: {str(error).strip()}"}


if __name__ == "__main__":
    # As in `control.runtime.procs.worker`: its folder, where `ray` is another module, gives its place to the package's.
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))
    from skipper.control.cluster.jobs import ray_driver

    ray_driver.main()
