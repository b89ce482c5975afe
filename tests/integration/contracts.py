"""What one of two libraries does in the cases of `docs/reference/from_monarch.md`: ``contracts.py skipper|monarch``.

Each function below looks at one contract, and returns the words of that table for what it has seen. They are printed as
JSON. The two libraries have the same names for most of what is used; `OURS` says which one runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

OURS = sys.argv[1:] == ["skipper"]
api: Any = importlib.import_module("skipper.control" if OURS else "monarch.actor")
rdma: Any = importlib.import_module("skipper.dataplane" if OURS else "monarch.rdma")
monarch: Any = None if OURS else importlib.import_module("monarch")
Actor, endpoint = api.Actor, api.endpoint
PATIENCE_S = 60.0
MARK = "CONTRACTS "
"""What the line with the result begins with; libraries print other ones."""

_rows: dict[str, Callable[[Any], str]] = {}


def row(title: str) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    """The function looks at what the table says under this title; it gets two processes."""

    def note(function: Callable[[Any], str]) -> Callable[[Any], str]:
        _rows[title] = function
        return function

    return note


def raised(call: Callable[[], Any]) -> str:
    """The type of what a call raises, as the table has it; or what it returns."""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001  (it is what is looked for)
        return f"`{type(error).__name__}`"
    return f"`{result!r}`"


class Echo(Actor):  # type: ignore[misc,valid-type]
    """Has what the rows call."""

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def rank(self) -> int:
        return int(api.current_rank().rank)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def wait(self) -> None:
        threading.Event().wait(0.3)

    @endpoint
    def level(self) -> int:
        return int(self.logger.level)

    @endpoint
    def logged(self) -> str:
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign,assignment]
        logging.getLogger().addHandler(handler)
        logging.getLogger("rows").warning("said")
        (record,) = records
        if record.getMessage() != "said":
            return "the message begins with the actor"
        return "fields `actor_name`, `actor_rank`, `actor_prefix`" if hasattr(record, "actor_name") else "nothing"

    def plain(self) -> None: ...


def echoes(procs: Any) -> Any:
    return procs.spawn("echoes", Echo)


@row("iterating a `ValueMesh` gives")
def _(procs: Any) -> str:
    first = next(iter(echoes(procs).rank.call().get(PATIENCE_S)))
    return "values" if first == 0 else "pairs of point and value"


@row("a `ValueMesh` equals a list of its values")
def _(procs: Any) -> str:
    return "yes" if echoes(procs).rank.call().get(PATIENCE_S) == [0, 1] else "no"


@row("an `Extent` equals a dict")
def _(procs: Any) -> str:
    return "yes" if api.Extent(["gpus"], [2]) == {"gpus": 2} else "no"


@row("`slice` of an axis that is not there")
def _(procs: Any) -> str:
    return raised(lambda: procs.slice(tp=0))


@row("`split` of an axis that is not there")
def _(procs: Any) -> str:
    return raised(lambda: procs.split(tp=("a", "b"), a=2))


@row("a negative index")
def _(procs: Any) -> str:
    error = raised(lambda: procs.slice(gpus=-1))
    return error if "Error" in error else "counts from the end"


@row("`flatten` of every second member")
def _(procs: Any) -> str:
    mesh = api.ValueMesh.from_list([0, 1, 2, 3], extent={"gpus": 4}) if OURS else four_values()
    error = raised(lambda: list(mesh.slice(gpus=slice(0, 4, 2)).flatten("rank").values()))
    return error if "Error" in error else "works: evenly spaced"


def four_values() -> Any:
    from monarch._src.actor.shape import NDSlice, Shape

    return api.ValueMesh(Shape(["gpus"], NDSlice.new_row_major([4])), [0, 1, 2, 3])


@row("`choose` takes")
def _(procs: Any) -> str:
    mesh = echoes(procs)
    chosen = [mesh.pid.choose().get(PATIENCE_S) for _ in range(24)]
    return "each in its turn" if chosen == chosen[:2] * 12 and chosen[0] != chosen[1] else "one at random"


@row("a time-out of `get`")
def _(procs: Any) -> str:
    return raised(lambda: echoes(procs).wait.call().get(0.01))


@row("an argument that cannot be pickled")
def _(procs: Any) -> str:
    return raised(lambda: echoes(procs).echo.call(threading.Lock()).get(PATIENCE_S))


@row("arguments of `spawn` that do not fit `__init__`")
def _(procs: Any) -> str:
    error = raised(lambda: with_own(lambda own: own.spawn("wrong", Echo, 1) and None))
    return f"{error} at once" if "Error" in error else "a failure of the mesh, later"


@row("processes where an actor has failed")
def _(procs: Any) -> str:
    def fail_and_spawn(own: Any) -> Any:
        with contextlib.suppress(api.ActorError, RuntimeError):
            own.spawn("failing", FailsToStart).rank.call().get(PATIENCE_S)
        for _ in range(1 if OURS else 100):  # Monarch looks at the state of processes now and then
            echoes(own).rank.call().get(PATIENCE_S)
            threading.Event().wait(0.05)

    return "take no more actors" if "Error" in raised(lambda: with_own(fail_and_spawn)) else "take others"


def with_own(use: Callable[[Any], Any]) -> Any:
    """Use a process that is stopped after that."""
    own = api.this_host().spawn_procs(per_host={"gpus": 1})
    try:
        return use(own)
    finally:
        own.stop().get(PATIENCE_S)


class FailsToStart(Echo):
    def __init__(self) -> None:
        raise ValueError("told to")


@row("a plain and an `async` endpoint in one class")
def _(procs: Any) -> str:
    class Mixed(Actor):  # type: ignore[misc,valid-type]
        @endpoint
        def one(self) -> int:
            return 1

        @endpoint
        async def two(self) -> int:
            return 2

    error = raised(lambda: procs.spawn("mixed", Mixed).two.call().get(PATIENCE_S) and None)
    return error if "Error" in error else "works; the plain one blocks the loop"


@row("an endpoint called `name`")
def _(procs: Any) -> str:
    class Named(Actor):  # type: ignore[misc,valid-type]
        @endpoint
        def name(self) -> int:
            return 1

    error = raised(lambda: procs.spawn("named", Named).name.call().get(PATIENCE_S) and None)
    return error if "Error" in error else "works"


@row("an endpoint called `slice`")
def _(procs: Any) -> str:
    class Sliced(Actor):  # type: ignore[misc,valid-type]
        @endpoint
        def slice(self) -> int:
            return 1

    return raised(lambda: procs.spawn("sliced", Sliced))


@row("`as_endpoint` of something else")
def _(procs: Any) -> str:
    return raised(lambda: api.as_endpoint(3))


@row("a call of a method that is not an endpoint")
def _(procs: Any) -> str:
    return raised(lambda: echoes(procs).plain())


@row("`procs.initialized` gives")
def _(procs: Any) -> str:
    found = procs.initialized.get(PATIENCE_S)
    return "`True`" if found is True else "one value of each process"


@row("`stop` takes a reason")
def _(procs: Any) -> str:
    error = raised(lambda: echoes(procs).stop("done").get(PATIENCE_S))
    return "no" if error == "`TypeError`" else "yes"


@row("level of `Actor.logger`")
def _(procs: Any) -> str:
    level = next(iter(echoes(procs).level.call().get(PATIENCE_S).values()))
    return {0: "that of its parents", 10: "`DEBUG`"}[level]


@row("a log record says which actor it is from by")
def _(procs: Any) -> str:
    return str(next(iter(echoes(procs).logged.call().get(PATIENCE_S).values())))


@row("a `Future` can be made by hand")
def _(procs: Any) -> str:
    return "no" if "Error" in raised(api.Future) else "yes"


@row("`RDMABuffer` of a 2-dimensional tensor")
def _(procs: Any) -> str:
    error = raised(lambda: buffer_of(torch.zeros(2, 2)))
    return error if "Error" in error else "works"


@row("`read_into` of a destination that is larger than the buffer")
def _(procs: Any) -> str:
    error = raised(lambda: buffer_of(torch.zeros(8)).read_into(torch.zeros(16)).get(PATIENCE_S))
    return error if "Error" in error else "works: its front is written"


@row("`write_from` of a source that is smaller than the buffer")
def _(procs: Any) -> str:
    error = raised(lambda: buffer_of(torch.zeros(8)).write_from(torch.zeros(4)).get(PATIENCE_S))
    return error if "Error" in error else "works: the front is written"


@row("a read of a dropped buffer")
def _(procs: Any) -> str:
    buffer = buffer_of(torch.zeros(8))
    buffer.drop().get(PATIENCE_S)
    return raised(lambda: buffer.read_into(torch.zeros(8)).get(PATIENCE_S))


def buffer_of(data: Any) -> Any:
    if not OURS:
        monarch.configure(rdma_allow_tcp_fallback=True)
    return rdma.RDMABuffer(data)


def main() -> None:
    warnings.simplefilter("ignore")
    api.unhandled_fault_hook = lambda failure: None
    observed: dict[str, str] = {}
    procs = api.this_host().spawn_procs(per_host={"gpus": 2})
    for title, look in _rows.items():
        try:
            observed[title] = look(procs)
        except Exception as error:  # noqa: BLE001  (the test shows it)
            observed[title] = f"the look failed: {type(error).__name__}: {error}"
    names = sorted({*api.__all__, *rdma.__all__})
    sys.stdout.write(f"{MARK}{json.dumps({'rows': observed, 'names': names})}\n")
    sys.stdout.flush()
    procs.stop().get(PATIENCE_S)


if __name__ == "__main__":
    main()
