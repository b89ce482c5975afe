"""Functions of torch that no dispatch sees: they work on generators, storages and processes rather than on tensors.

With the first mesh that is activated they are wrapped, each under its own name. Where none is active they do what torch
has them do.

- Seeds and states of generators are those of the workers, too: `torch.manual_seed` seeds each worker as it would seed
  a rank of an SPMD program; what keeps a state and puts it back, as `torch.utils.checkpoint` does, keeps each one's.
- An `LSTM` is taken apart into its steps: what CPUs have for a whole layer has no gradient where it runs, on a worker.
- A `DeviceMesh` is of the processes of the active mesh: see `device_meshes`.
- A `DataLoader`, and what unpickles tensors, work in the script, whose memory it is. What puts the samples in order and
  seeds the loader's processes is drawn from the workers' generators, as it would be from that of one process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.data.dataloader as data

from skipper.control import ProcMesh
from skipper.tensor_engine.script import activation, device_meshes, random
from skipper.tensor_engine.script.communicate import to_mesh
from skipper.tensor_engine.script.fetch import inspect
from skipper.tensor_engine.script.place import place
from skipper.tensor_engine.script.tensor import Tensor

_wrapping = threading.Lock()
_is_wrapped = False


def wrap() -> None:
    """Wrap them, unless that has been done."""
    global _is_wrapped
    with _wrapping:
        if _is_wrapped:
            return
        _is_wrapped = True
        for made in (_manual_seed, _seed, _get_rng_state, _set_rng_state, _fork_rng):
            name = made.__name__.removeprefix("_")
            wrapped = _instead(getattr(torch.random, name), made)
            for module in (torch, torch.random):
                if hasattr(module, name):
                    setattr(module, name, wrapped)
        torch._VF.lstm = _instead(torch._VF.lstm, _lstm)
        for owner, name in ((data.DataLoader, "__iter__"), (data._BaseDataLoaderIter, "__next__")):
            setattr(owner, name, _loading(getattr(owner, name)))
        for name in ("__init__", "_next_index"):  # the seed of an epoch, and what a sampler draws
            setattr(data._BaseDataLoaderIter, name, _drawing(getattr(data._BaseDataLoaderIter, name)))
        torch._utils._rebuild_tensor = activation.in_the_script(torch._utils._rebuild_tensor)
        device_meshes.wrap()


def _instead(of_torch: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of_torch)
    def run(*args: Any, **kwargs: Any) -> Any:
        return made(of_torch, *args, **kwargs)

    return run


class _Loading(threading.local):
    """The mesh that is active where this thread asks a `DataLoader`, which works as if none were."""

    def __init__(self) -> None:
        self.mesh: ProcMesh | None = None


_loading_here = _Loading()


def _loading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run in the script what a `DataLoader` does, except for what it draws."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        active = activation.current()
        if active is None:
            return function(*args, **kwargs)
        before, _loading_here.mesh = _loading_here.mesh, active.mesh
        try:
            with activation.no_mesh():
                return function(*args, **kwargs)
        finally:
            _loading_here.mesh = before

    return run


def _drawing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a part of a `DataLoader` draw from the workers' generators; it starts no processes, which would, too."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        mesh = _loading_here.mesh
        if mesh is None:
            return function(*args, **kwargs)
        with _DrawnByWorkers(mesh):
            return function(*args, **kwargs)

    return run


class _DrawnByWorkers(activation.DispatchMode):
    """Has all workers draw what would be drawn from the script's default generator, and takes the first one's."""

    def __init__(self, mesh: ProcMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mesh = mesh

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        with self._mesh.activate():
            drawn = inspect(func(*place(args, self._mesh), **kwargs))
        return args[0].copy_(drawn) if func._schema.is_mutable else drawn


def _manual_seed(of_torch: Callable[..., Any], seed: Any) -> Any:
    generator = of_torch(seed)
    if activation.current() is not None:
        random.manual_seed(seed, same=True)
    return generator


def _seed(of_torch: Callable[..., Any]) -> Any:
    drawn = of_torch()
    if activation.current() is not None:
        random.manual_seed(drawn)
    return drawn


def _get_rng_state(of_torch: Callable[..., Any]) -> torch.Tensor:
    return of_torch() if activation.current() is None else random.get_states()


def _set_rng_state(of_torch: Callable[..., Any], new_state: torch.Tensor) -> None:
    if isinstance(new_state, Tensor):
        for kept in _forks.kept[-1:]:
            if new_state.mesh not in kept:
                kept[new_state.mesh] = random.get_states(mesh=new_state.mesh)
        random.set_states(new_state)
        return
    of_torch(new_state)
    active = activation.current()
    if active is not None:
        random.set_states(to_mesh(new_state, active.mesh))


def _lstm(of_torch: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, Tensor):
        return of_torch(input, *args, **kwargs)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return of_torch(input, *args, **kwargs)
    finally:
        torch._C._set_mkldnn_enabled(before)


class _Forks(threading.local):
    """For each `fork_rng` that this thread is in, the states of the meshes that have got others within it."""

    def __init__(self) -> None:
        self.kept: list[dict[ProcMesh, torch.Tensor]] = []


_forks = _Forks()


@contextlib.contextmanager
def _fork_rng(of_torch: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    with of_torch(*args, **kwargs):
        _forks.kept.append({})  # where no mesh is active, as in a backward, torch's own keeps the script's state alone
        try:
            yield
        finally:
            for state in _forks.kept.pop().values():
                random.set_states(state)
