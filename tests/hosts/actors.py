"""Actors for the tests of hosts."""

import contextlib
import ctypes
import os
import signal
import time

from skipper.control import Actor, ActorMesh, Port, ProcMesh, current_rank, endpoint, this_host


class Worker(Actor):
    """A process on some host."""

    def __init__(self) -> None:
        self.children: ProcMesh | None = None

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def ask(self, others: ActorMesh) -> list[int]:
        """The pids of other workers, asked from here."""
        return list(others.pid.call().get(20))

    @endpoint
    def ask_to_echo(self, other: ActorMesh, value: object) -> object:
        """The same value, from another worker."""
        return other.echo.call_one(value).get(20)

    @endpoint
    def echo(self, value: object) -> object:
        return value

    @endpoint
    def nbytes(self, value: str) -> int:
        return len(value)

    @endpoint
    def tell(self, port: Port, value: object) -> None:
        port.send(value)

    @endpoint
    def end(self, code: int) -> None:
        os._exit(code)

    @endpoint
    def spawn_below(self) -> ActorMesh:
        """A worker in a process that this one starts on its own host."""
        self.children = this_host().spawn_procs()
        return self.children.spawn("below", Worker)

    @endpoint
    def spawn_at(self, procs: ProcMesh) -> ActorMesh:
        """A worker on the hosts of other processes, owned by this one."""
        self.children = procs.host_mesh.spawn_procs(name="elsewhere")
        return self.children.spawn("elsewhere", Worker)

    @endpoint
    def read(self, buffer: object, nbytes: int) -> bytes:
        """What is in memory of another process."""
        there = bytearray(nbytes)
        buffer.read_into(there, timeout=20).get()  # type: ignore[attr-defined]
        return bytes(there)

    @endpoint
    def way_to(self, buffer: object) -> str:
        """The backend by which memory of another process is reached from here."""
        return str(buffer.backend)  # type: ignore[attr-defined]

    @endpoint
    def lend(self, content: bytes) -> object:
        """A handle to memory with this content."""
        from skipper import dataplane

        memory = dataplane.empty_array(len(content), "u1")
        memory[:] = memoryview(content)
        self.lent = dataplane.RDMABuffer(memory)
        return self.lent

    @endpoint
    def end_lending(self) -> None:
        self.lent.drop()

    @endpoint
    def stall(self, seconds: float) -> None:
        with contextlib.suppress(InterruptedError):
            time.sleep(seconds)

    @endpoint
    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)  # the stop may take a moment: no answer before it

    @endpoint
    def hold_lock(self, seconds: float) -> int:
        """Keep the interpreter lock from all other threads, as a long call into C may."""
        ctypes.PyDLL(None).usleep(int(1e6 * seconds))
        return os.getpid()


class Recorder(Actor):
    """Keeps what it is sent, in the order in which that came."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @endpoint
    def record(self, number: int) -> None:
        self.numbers.append(number)

    @endpoint
    def recorded(self) -> list[int]:
        return self.numbers


class Storing(Actor):
    """A user of the store."""

    @endpoint
    async def initialize(self, volumes: ProcMesh) -> None:
        from skipper import torchstore

        await torchstore.initialize(strategy=torchstore.LocalRankStrategy(), mesh=volumes)

    @endpoint
    async def publish(self, mode: str, value: float, rows: int = 512) -> None:
        import torch

        from skipper import torchstore

        self.model = {"weight": torch.full((rows, 512), value)}
        await torchstore.put_state_dict(self.model, mode, mode=mode)  # type: ignore[arg-type]

    @endpoint
    async def sync(self, mode: str, rows: int = 512) -> float:
        import torch

        from skipper import torchstore

        into = {"weight": torch.zeros(rows, 512)}
        await torchstore.get_state_dict(mode, into, timeout=20)
        (value,) = into["weight"].unique().tolist()
        return float(value)

    @endpoint
    async def fence(self, mode: str, timeout: float) -> None:
        from skipper import torchstore

        await torchstore.fence(mode, timeout=timeout)

    @endpoint
    async def close(self) -> None:
        from skipper import torchstore

        await torchstore.shutdown()
