"""UCX's own benchmark, `ucx_perftest`, over memory of GPUs: what the library does without us on top."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.report import Result, Scalar
from skipper.dataplane.backends.ucx.engine import find_library

__all__ = ["measure"]

_PATIENCE_S = 40.0
_MIB = 1 << 20
WAYS = (("ucp_get", "cuda,cuda"), ("ucp_get", "host,cuda"), ("ucp_put_bw", "cuda,cuda"), ("ucp_put_bw", "host,cuda"))
"""Tests, with the memory of the side that reads or writes, and that of the owner."""


def measure(nbytes: int, iterations: int, ways: tuple[tuple[str, str], ...] = WAYS) -> Iterator[Result]:
    """A row for each way that runs here; one that does not has a row of 0 with the reason.

    Raises:
        BenchmarkError: This UCX comes without the program.
    """
    library = Path(find_library(None))
    program = library.parents[1] / "bin" / "ucx_perftest" if library.is_absolute() else Path("ucx_perftest")
    if not program.exists():
        raise BenchmarkError(f"{library} comes without ucx_perftest (the wheels libucx-cu12 and libucx-cu13 have it)")
    for test, memory in ways:
        parameters: dict[str, Scalar] = {"backend": "ucx_perftest", "test": test, "memory": memory, "nbytes": nbytes}
        try:
            rate = _run(program, library.parent, test, memory, nbytes, iterations)
        except BenchmarkError as error:
            yield Result.single("ucx_perftest", "GB/s", 0.0, parameters={**parameters, "why": str(error)})
            continue
        yield Result.single("ucx_perftest", "GB/s", rate, parameters=parameters)


def _run(program: Path, libraries: Path, test: str, memory: str, nbytes: int, iterations: int) -> float:
    """GB/s of one test between two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The libraries next to it, not those of another release that the system may have.
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "UCX_LOG_LEVEL": "error"}
    command = [str(program), "-p", str(port)]
    chosen = ["-t", test, "-m", memory, "-s", str(nbytes), "-n", str(iterations), "-w", "3", "-f"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_listener(server, port)
        client = [*command, *chosen, "127.0.0.1"]
        done = subprocess.run(client, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"it has not ended within {_PATIENCE_S:g} s") from None
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
    figures = done.stdout.split()
    if done.returncode or not figures:
        lines = (done.stderr + done.stdout).splitlines()
        said = next((line.rpartition("ERROR")[2].strip() for line in lines if "ERROR" in line), "no word")
        raise BenchmarkError(f"it ended with status {done.returncode}: {said}")
    # Iterations; p50, average and overall latency; average and overall bandwidth in MiB/s; two message rates.
    return float(figures[-3]) * _MIB / 1e9


def _wait_for_listener(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the kernel's table of sockets has the server, which would take a trial connection for its client."""
    wanted = f":{port:04X} 00000000:0000 0A"
    deadline = time.monotonic() + _PATIENCE_S
    while wanted not in Path("/proc/net/tcp").read_text():
        if server.poll() is not None:
            raise BenchmarkError(f"its server ended with status {server.returncode}")
        if time.monotonic() > deadline:
            raise BenchmarkError("its server does not listen")
        time.sleep(0.01)
