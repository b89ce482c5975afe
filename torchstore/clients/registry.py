"""This process' clients of the stores that it uses, one for each, made when they are first needed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from threading import Lock
from typing import Concatenate, ParamSpec, TypeVar

from skipper.control import ActorMesh, get_or_spawn_controller, this_proc
from skipper.control.runtime import current_runtime
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S, RemoteStore
from skipper.torchstore.controller.actor import StoreController
from skipper.torchstore.errors import StoreNotInitializedError
from skipper.torchstore.protocol.messages import StaleClientError
from skipper.torchstore.support.coroutines import public
from skipper.torchstore.support.deadlines import ask, check_timeout
from skipper.torchstore.support.metrics import log_of
from skipper.torchstore.support.process import this_process
from skipper.torchstore.support.records import SyncRecord

DEFAULT_STORE_NAME = "default"

P = ParamSpec("P")
T = TypeVar("T")

_clients: dict[str, LocalClient] = {}
_clients_lock = Lock()


@public
async def client(store_name: str = DEFAULT_STORE_NAME, *, timeout: float = DEFAULT_TIMEOUT_S) -> LocalClient:
    """This process' client of a store, created at the first use.

    Raises:
        StoreNotInitializedError: No store of this name has been initialized.
    """
    found = _clients.get(store_name)
    if found is None:
        if not current_runtime.is_running():
            raise StoreNotInitializedError(store_name)
        controller = await controller_of(store_name, timeout)
        info = await ask(controller.info.call_one(this_process(), this_proc()), timeout)
        with _clients_lock:  # two actors of one process may get here at the same time: they share one client
            _end_with_job()
            found = _clients.setdefault(store_name, LocalClient(RemoteStore(store_name, controller, info)))
    return found


def _end_with_job() -> None:
    """Drop all clients when this process leaves its job, so that none is left for the stores of the next one."""
    last = current_runtime.current().ending.after
    if _reset_all not in last:
        last.append(_reset_all)


def _reset_all() -> None:
    for store_name in list(_clients):
        reset_client(store_name)


def reset_client(store_name: str = DEFAULT_STORE_NAME) -> None:
    """Forget this process' client (after a store was shut down and initialized again, for instance).

    Its plans and registrations are lost; what this process published in direct mode can no longer be read.
    """
    with _clients_lock:
        found = _clients.pop(store_name, None)
    if found is not None:
        found.close()


def _forget(store_name: str, stale: LocalClient) -> None:
    """Forget a client of an earlier store, but not one that another task has made since."""
    with _clients_lock:
        if _clients.get(store_name) is stale:
            del _clients[store_name]
    stale.close()


def last_sync(store_name: str = DEFAULT_STORE_NAME) -> SyncRecord | None:
    """The record of this process' last finished put or get on a store; None before the first."""
    found = _clients.get(store_name)
    return found.last_sync if found is not None else None


def sync_history(store_name: str = DEFAULT_STORE_NAME) -> tuple[SyncRecord, ...]:
    """The records of this process' last puts and gets on a store, oldest first; 256 at most.

    Records are kept when a client is created again. Those of a mesh together show which process was the slowest:
    ``max(await mesh.last_sync.call(), key=lambda record: record.seconds)``, where ``last_sync`` is an endpoint of
    yours that returns its process' last record.
    """
    return log_of(store_name).records()


async def run(
    store_name: str,
    timeout: float,
    operation: Callable[Concatenate[LocalClient, P], Awaitable[T]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call a function with this process' client; with a new one if its store is of an earlier `initialize`.

    Raises:
        TypeError: The timeout is not a number, or the store's name not a string.
        ValueError: The timeout is not above 0.
    """
    check_timeout(timeout)
    found = _clients.get(store_name) or await client(store_name, timeout=timeout)
    try:
        return await operation(found, *args, **kwargs)
    except StaleClientError:
        _forget(store_name, found)
        return await operation(await client(store_name, timeout=timeout), *args, **kwargs)


async def controller_of(store_name: str, timeout: float) -> ActorMesh[StoreController]:
    """The controller of a store, initialized or not.

    Raises:
        TypeError: The timeout is not a number, or the store's name not a string.
        ValueError: The timeout is not above 0.
    """
    check_timeout(timeout)
    if not isinstance(store_name, str):
        raise TypeError(f"store_name is a string, not {store_name!r}")
    return await ask(get_or_spawn_controller(f"torchstore/{store_name}", StoreController, store_name), timeout)
