"""The main program of a child process: ``worker.py PIPE_FD PARENT_PID NAME``.

It is also the main program of a fork server, ``worker.py fork-server SOCKET_FD PARENT_PID``, from which such processes
are forked: so `__main__` is the same in all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from skipper.control.runtime.procs.binding import CpuBinding

_leaves = False
"""Whether the main thread has ended in good order."""


def main() -> None:
    """Run as a child, which was executed, or forked from the server that this process is."""
    take_care_of_signals_and_streams()
    from skipper.control.runtime.procs.guard import die_with
    from skipper.control.runtime.procs.worker_config import FORK_SERVER

    if sys.argv[1] == FORK_SERVER:
        be_forked(int(sys.argv[2]), int(sys.argv[3]))
    else:
        die_with(int(sys.argv[2]))
    live(int(sys.argv[1]))


def be_forked(connection: int, parent_pid: int) -> None:
    """Run as a fork server until it is not needed; continue in each forked process, with the arguments of a child."""
    import socket

    from skipper.control.runtime.procs.fork_server import ForkServer, settle
    from skipper.control.runtime.procs.guard import die_with
    from skipper.control.runtime.procs.worker_config import command_of_worker

    die_with(parent_pid)
    os.set_inheritable(connection, False)
    server = ForkServer(socket.socket(fileno=connection))
    server.prepare()
    newborn = server.serve()
    settle(newborn, command_of_worker(newborn.pipe, os.getppid(), newborn.birth.name))


def take_care_of_signals_and_streams() -> None:
    """Leave Ctrl-C to the script, which then ends its children; write output in whole lines."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def live(pipe: int) -> None:
    """Read the config, join the job, and stay until the parent is gone or says so."""
    from skipper.control.runtime.procs.worker_config import read_config

    os.set_inheritable(pipe, False)
    try:
        config = read_config(pipe)
    except EOFError:
        os._exit(1)
    if config.redirection is not None:
        from skipper.control.runtime.procs import output_capture

        output_capture.redirect(config.redirection, config.me.name)
    bind(config.binding)
    sys.path[:] = config.sys_path
    sys.argv[:] = [config.me.name]

    from skipper.control.model.errors import ThreadLimitError
    from skipper.control.runtime import current_runtime
    from skipper.control.runtime.procs.ending import Leaving
    from skipper.control.runtime.procs.worker_config import EXIT_THREADS

    collect_garbage()
    if config.bootstrap:
        run_bootstrap(config.bootstrap)
    told = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        current_runtime.join_job(config, Leaving(told, config.me.name))
    except ThreadLimitError as error:
        sys.stderr.write(f"{config.me.name}: {error}\n")
        sys.stderr.flush()
        os._exit(EXIT_THREADS)
    waits = select.poll()
    waits.register(pipe, select.POLLIN)
    waits.register(told, select.POLLIN)
    while all(descriptor != told for descriptor, _ in waits.poll()):
        if not os.read(pipe, 1):
            os._exit(1)
    global _leaves
    _leaves = True
    let_nobody_wait_for_children()


def collect_garbage() -> None:
    """Start the cyclic garbage collector for new objects only: imported modules stay out of it."""
    gc.freeze()
    gc.enable()


def let_nobody_wait_for_children() -> None:
    """Make `multiprocessing`, whose `atexit` handler would wait for children, kill them: they end with this process."""
    if (util := sys.modules.get("multiprocessing.util")) is None:
        return
    import multiprocessing

    def kill() -> None:
        for child in multiprocessing.active_children():
            child.kill()

    # This is that handler's last step before it waits: pools and managers have ended in good order by then.
    util.Finalize(None, kill, exitpriority=0)


def end_behind_all_others() -> None:
    """The last `atexit` handler: flush open files, and end without finalizing every loaded library.

    To finalize an interpreter takes a tenth of a second, and C++ threads may still run in it.
    """
    import io

    if not _leaves:
        return  # it ends with an exception, which has its own exit status
    for thing in (sys.stdout, sys.stderr, *gc.get_objects()):  # frozen objects are not among them
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom) and not thing.closed:
            with contextlib.suppress(Exception):  # its device is full or gone, and nobody can be told
                thing.flush()
    os._exit(0)


def bind(binding: CpuBinding) -> None:
    """Bind this process before it starts any thread."""
    from skipper.control.runtime.procs.worker_config import EXIT_BINDING

    try:
        binding.apply()
    except OSError as error:
        sys.stderr.write(f"{sys.argv[3]}: {error}\n")
        sys.stderr.flush()
        os._exit(EXIT_BINDING)


def run_to_end(awaitable: Awaitable[object]) -> None:
    """Wait for something in an event loop of its own."""
    import asyncio

    async def wait() -> None:
        await awaitable

    asyncio.run(wait())


def run_bootstrap(packed: tuple[bytes, ...]) -> None:
    """Run the callable given to `spawn_procs`, to its end if it is ``async``."""
    import inspect
    import traceback

    from skipper.control.model import forked
    from skipper.control.runtime.procs.worker_config import EXIT_BOOTSTRAP
    from skipper.control.wire.payload import unpack

    me = os.getpid()
    try:
        result = unpack(packed)()
        if inspect.isawaitable(result):
            run_to_end(result)
        if os.getpid() != me:
            forked.leave()
    except BaseException as error:  # noqa: BLE001  (reported with its traceback, and the end of this process)
        if os.getpid() != me:
            forked.leave(error)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_BOOTSTRAP)


if __name__ == "__main__":
    # It runs as a file, so that it starts without knowing where to import from: on the path, the folder that holds the
    # package replaces the file's folder.
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))
    gc.disable()  # searching the imports for garbage would take a twentieth of the start
    # The handler that is registered first is called last.
    atexit.register(lambda: worker.end_behind_all_others())
    from skipper.control.runtime.procs import worker

    worker.main()
