"""A companion: a process next to the ranks of a host, for actors that must outlive any single rank.

If another launcher starts one script on each host, there is no agent that could start processes. So a rank starts a
companion, which joins the job of rank 0 through the same gate as the ranks (`cluster.hosts.job_gate`). It ends when the
rank says so, when the job of rank 0 is over, or when the last of its ranks has ended.

The main program is ``companion.py CONFIG_FD REPORT_FD``.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from skipper.control.cluster.hosts.job_gate import GateAddress

_END = b"end\n"
_STOP_S = 10.0
"""How long it may take to leave the job before it is killed."""


class Companion:
    """The companion of a rank, seen from that rank; a context manager that ends the companion.

    It is a child of this process. If this process ends without `close`, the companion continues.

    Args:
        gate: where rank 0 listens.
        run: what the ranks of this run have in common.
        name: of the process, for people.
        ranks: process ids of the ranks of this host; it ends with the last of them.
        timeout: how long it may take to join the job, in seconds.
    """

    def __init__(self, gate: GateAddress, run: str, name: str, ranks: Sequence[int], *, timeout: float) -> None:
        config = {
            "host": gate.host,
            "port": gate.port,
            "secret": gate.secret.hex(),
            "certs": gate.certs,
            "data_plane": gate.data_plane,
            "run": run,
            "name": name,
            "ranks": list(ranks),
            "timeout": timeout,
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
        }
        self._name = name
        self._deadline = time.monotonic() + timeout
        config_read, self._lifeline = os.pipe()
        self._report, report_write = os.pipe()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, __file__, str(config_read), str(report_write)],
                stdin=subprocess.DEVNULL,
                pass_fds=(config_read, report_write),
            )
            os.write(self._lifeline, json.dumps(config).encode() + b"\n")
        except BaseException:
            os.close(self._lifeline)
            os.close(self._report)
            raise
        finally:
            os.close(config_read)
            os.close(report_write)

    def process_id(self) -> str:
        """Wait until it has joined the job; returns the id of its process there.

        Raises:
            HostError: it has ended, or has not joined in time.
        """
        from skipper.control.model.errors import HostError

        with selectors.DefaultSelector() as selector:
            selector.register(self._report, selectors.EVENT_READ)
            is_there = selector.select(max(self._deadline - time.monotonic(), 0.0))
        line = os.read(self._report, 4096) if is_there else b""
        if not line:
            how = "ended" if is_there else "did not come"
            raise HostError(
                f"the process {self._name!r} {how} before it had joined the job; its standard error says why"
            )
        return line.decode().strip()

    def give_up(self) -> None:
        """Kill the companion, so that `process_id` raises at once. From any thread."""
        self._popen.kill()

    def close(self) -> None:
        """Make it leave the job and end; idempotent."""
        if self._lifeline < 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._lifeline, _END)
        os.close(self._lifeline)
        os.close(self._report)
        self._lifeline = -1
        try:
            self._popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def main() -> None:
    """Read the config, join the job, report the process id, and stay."""
    config_pipe, report = map(int, sys.argv[1:3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks, which then end this process
    os.set_inheritable(config_pipe, False)
    os.set_inheritable(report, False)
    with open(config_pipe, "rb", buffering=0, closefd=False) as pipe:  # the rest after the line is for `_stay`
        line = pipe.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the rank that started this process has ended")
    config: dict[str, Any] = json.loads(line)
    sys.path += [entry for entry in config["sys_path"] if entry not in sys.path]
    process_id = _come(config)
    os.write(report, f"{process_id}\n".encode())
    os.close(report)
    _stay(config_pipe, config["ranks"])

    from skipper.control.runtime import current_runtime

    current_runtime.shutdown()


def _come(config: dict[str, Any]) -> str:
    """Become a process of the job; returns its id there."""
    from skipper.control.cluster.hosts import job_gate

    secret = bytes.fromhex(config["secret"])
    gate = job_gate.GateAddress(config["host"], config["port"], secret, config["certs"], config["data_plane"])
    return job_gate.enter_by_gate(gate, config["run"], config["name"], timeout=config["timeout"]).me.id


def _stay(lifeline: int, ranks: Sequence[int]) -> None:
    """Return when the rank that has started this process says so, when rank 0 is gone, or when all ranks are."""
    over = os.eventfd(0, os.EFD_CLOEXEC)
    _when_root_is_gone(over)
    with selectors.DefaultSelector() as selector:
        selector.register(over, selectors.EVENT_READ)
        selector.register(lifeline, selectors.EVENT_READ)
        alive = set()
        for pid in ranks:
            # A rank that is not visible here (another pid namespace) counts as ended.
            with contextlib.suppress(OSError):
                alive.add(pidfd := os.pidfd_open(pid))
                selector.register(pidfd, selectors.EVENT_READ)
        while alive:
            for key, _ in selector.select():
                if key.fd == over or (key.fd == lifeline and os.read(lifeline, len(_END))):
                    return
                selector.unregister(key.fd)
                alive.discard(key.fd)


def _when_root_is_gone(over: int) -> None:
    from skipper.control.model.shape import Extent, Point
    from skipper.control.runtime import current_runtime
    from skipper.control.runtime.messages import ROOT_UID, ActorRef
    from skipper.control.runtime.ports import watch

    process = current_runtime.current()
    root = ActorRef(process.root, ROOT_UID, process.root.name, Point(0, Extent()))
    watch(process, root).add_done_callback(lambda _: os.eventfd_write(over, 1))


if __name__ == "__main__":
    # As in `worker`: on the path, the folder that holds the package replaces its folder.
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))
    from skipper.control.cluster.hosts import companion

    companion.main()
