"""One side of a weight sync as a process of its own, a trainer or an engine, driven by lines of JSON.

``["method", {options}]`` comes in on standard input, ``{"result": ...}`` or ``{"error": ...}`` goes out on standard
output. Nothing here is started by control: an engine joins the job of its trainer, and outlives it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import torch

from skipper import control
from skipper.torchstore import LoadPlan, last_sync, record_plan, share_memory_
from skipper.torchstore import sync as ts
from skipper.torchstore.clients.registry import client
from skipper.torchstore.protocol.messages import Selector
from skipper.torchstore.support.blocking import run
from tests.control.actors import Echo

ROWS = 256
WAIT_S = 30.0


class Model(torch.nn.Module):
    """Two parameters, and what an engine's model does with a checkpoint of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(ROWS, 64), requires_grad=False)
        self.second = torch.nn.Parameter(torch.zeros(64, ROWS), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        """Copy each; the second one is transposed."""
        mine = dict(self.named_parameters())
        for name, weight in weights:
            mine[name].copy_(weight.t() if name == "second" else weight)


class Side:
    """What a process is told to do."""

    def __init__(self) -> None:
        self.model = Model()
        self.weights = torch.nn.ParameterDict()
        self.read = {name: torch.zeros(ROWS, 64) for name in ("first", "second")}
        self.plan: LoadPlan | None = None

    # A trainer

    def configure(self, **bounds: Any) -> None:
        """Set bounds, before there is a job."""
        control.configure(**bounds)

    def serve(self, **options: Any) -> str:
        """Open the job of this process, and start a store in it; where it is joined."""
        served = control.serve_job(**options)
        ts.initialize()
        for name in ("first", "second"):
            self.weights[name] = torch.nn.Parameter(torch.zeros(ROWS, 64), requires_grad=False)
        share_memory_(self.weights)
        control.get_or_spawn_controller("echo", Echo).get(WAIT_S)
        return served.address or str(served.path)

    def put(self, value: float, mode: str = "snapshot") -> int:
        """Publish a version whose elements all have this value."""
        if mode == "direct":
            ts.fence("policy", timeout=WAIT_S)
        for weight in self.weights.parameters():
            weight.fill_(value)
        weights = dict(self.weights.named_parameters())
        return cast(int, ts.put_state_dict(weights, "policy", mode=mode, timeout=WAIT_S))  # type: ignore[arg-type]

    def fence(self, timeout: float) -> None:
        """Take the version back, and wait for its readers."""
        ts.fence("policy", timeout=timeout)

    def leases(self) -> int:
        """How many reads are under way, as the controller has it."""
        found = run(client)
        return int(found.remote.entrance.count_leases.call_one().get(WAIT_S))

    def members(self) -> int:
        """How many processes have joined."""
        return len(control.api.join.joined(control.runtime.current_runtime.current()))

    # An engine

    def join(self, address: str, **options: Any) -> bool:
        """Become part of a trainer's job."""
        return control.join(address, timeout=WAIT_S, **options)

    def leave(self) -> bool:
        """Leave it."""
        return control.leave()

    def sync(self, after: int = 0, *, serve: bool = False) -> list[float]:
        """Read the first version after this one; its number, the value of its elements, and what peers have lent."""
        weights = self.read
        ts.get_state_dict("policy", weights, version=("newer_than", after), serve=serve, timeout=WAIT_S)
        record = last_sync()
        assert record is not None
        values = torch.cat(list(weights.values())).unique().tolist()
        return [record.version or 0, *values, record.lent_nbytes]

    def load(self, after: int = 0) -> list[float]:
        """The same for both parameters, by what the model's `load_weights` does."""
        if self.plan is None:
            shapes = {"first": torch.empty(ROWS, 64, device="meta"), "second": torch.empty(ROWS, 64, device="meta")}
            self.plan = record_plan(self.model, shapes)
        version = ts.load_by_plan("policy", self.plan, self.model, version=("newer_than", after), timeout=WAIT_S)
        return [version, *self.model.first.unique().tolist(), *self.model.second.unique().tolist()]

    def hold(self) -> int:
        """Begin to read the latest version, and come to no end."""

        async def acquire() -> int:
            return (await (await client()).remote.acquire("policy", Selector(), (), WAIT_S)).version

        return run(acquire)

    def call(self, nbytes: int) -> list[int]:
        """Call an actor of the trainer's process: its process id, and how much of a large argument comes back."""
        echo = control.get_or_spawn_controller("echo", Echo).get(WAIT_S)
        return [echo.pid.call_one().get(WAIT_S), len(echo.echo.call_one(bytes(nbytes)).get(WAIT_S))]

    # Either

    def put_value(self, key: str, value: Any) -> None:
        """Store something under a key."""
        ts.put(key, value, timeout=WAIT_S)

    def value(self, key: str) -> Any:
        """What is stored under a key."""
        return ts.get(key, timeout=WAIT_S)

    def resources(self) -> dict[str, int]:
        """What the process holds."""
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "python threads": threading.active_count(),
            "memfd": sum("memfd:" in line for line in maps),
        }


def main() -> None:
    """Do what the lines say."""
    torch.set_num_threads(1)
    side = Side()
    for line in sys.stdin:
        method, options = json.loads(line)
        try:
            answer = {"result": getattr(side, method)(**options)}
        except Exception as error:  # noqa: BLE001  (goes to whoever asked)
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


class SyncProcess:
    """Such a process, seen from a test; a context manager that ends it."""

    COMMAND = (sys.executable, "-m", "tests.torchstore.sync_process")

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._in, self._out = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

    def begin(self, method: str, **options: Any) -> None:
        """Have it do something; `end` waits for that."""
        self._in.write(json.dumps([method, options]) + "\n")
        self._in.flush()

    def end(self) -> Any:
        """The result of what was begun.

        Raises:
            RuntimeError: its error, or the process has ended.
        """
        line = self._out.readline()
        answer = json.loads(line) if line else {"error": "the process has ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def do(self, method: str, **options: Any) -> Any:
        """Have it do something, and wait for that."""
        self.begin(method, **options)
        return self.end()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.process:  # closes its pipes
            self.process.kill()


if __name__ == "__main__":
    main()
