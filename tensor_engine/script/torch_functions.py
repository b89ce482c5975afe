"""Functions of torch that are not dispatched: they work on generators, storages and processes and not on tensors.

They are wrapped when the first mesh is activated, each under its own name. Without an active mesh they do what torch
does.

- Seeds and states of generators are those of the workers, too: `torch.manual_seed` seeds each worker as it would seed
  a rank of an SPMD program; what keeps a state and puts it back, as `torch.utils.checkpoint` does, keeps each one's.
- An `LSTM` is taken apart into its steps: what CPUs have for a whole layer has no gradient where it runs, on a worker.
- A `DeviceMesh` is of the processes of the active mesh: see `device_meshes`.
- What reads numbers of its arguments to know the shape of its result, as `tensor_split` with a tensor of indices,
  fetches them, as `Tensor.item` does.
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
from torch import autograd, linalg
from torch._ops import HigherOrderOperator
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

from skipper.control import ProcMesh
from skipper.tensor_engine.script import activation, device_meshes, random
from skipper.tensor_engine.script.communicate import to_mesh
from skipper.tensor_engine.script.fetch import inspect
from skipper.tensor_engine.script.issue import dispatch, ship
from skipper.tensor_engine.script.place import place
from skipper.tensor_engine.script.remote import remote
from skipper.tensor_engine.script.tensor import Tensor
from skipper.tensor_engine.worker import agreement

_wrapping = threading.Lock()
_is_wrapped = False


def wrap() -> None:
    """Wrap them, unless that was done before."""
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
        for made in (_combinations, _ctc_loss):
            name = made.__name__.removeprefix("_")
            setattr(torch, name, _instead(getattr(torch, name), made))
        for made in (_tensor_split, _repeat_interleave, _index_fill):
            name = made.__name__.removeprefix("_")
            setattr(torch, name, _instead(getattr(torch, name), made))
            setattr(Tensor, name, _instead(getattr(torch.Tensor, name), made))
        Tensor.index_fill_ = _instead(torch.Tensor.index_fill_, _index_fill_)  # type: ignore[method-assign]
        torch.compile = _instead(torch.compile, _compile)
        # A backward runs where its tensors are, whichever mesh is active: torch.autograd has the function by name.
        for module in (graph, autograd):
            module._engine_run_backward = _instead(module._engine_run_backward, _backward)  # type: ignore[attr-defined]
        torch.matmul = _instead(torch.matmul, _into_out)
        torch.nanmean = _instead(torch.nanmean, _into_out)
        linalg.matrix_rank = _instead(linalg.matrix_rank, _into_out)
        for owner, name in ((data.DataLoader, "__iter__"), (data._BaseDataLoaderIter, "__next__")):
            setattr(owner, name, _loading(getattr(owner, name)))
        for name in ("__init__", "_next_index"):  # for the seed of an epoch, and a sampler's random numbers
            setattr(data._BaseDataLoaderIter, name, _drawing(getattr(data._BaseDataLoaderIter, name)))
        torch.Tensor.__deepcopy__ = _instead(torch.Tensor.__deepcopy__, _deepcopy)  # type: ignore[method-assign]
        torch._utils._rebuild_tensor = activation.in_the_script(torch._utils._rebuild_tensor)
        if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):  # torch 2.8
            higher_order: Any = HigherOrderOperator
            higher_order.dispatch = _instead(higher_order.dispatch, _dispatch_higher_order)
        device_meshes.wrap()


def _instead(of_torch: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of_torch)
    def run(*args: Any, **kwargs: Any) -> Any:
        return made(of_torch, *args, **kwargs)

    return run


def _deepcopy(of_torch: Callable[..., Any], tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Copy a tensor of the script in the script: torch copies its storage, which would be on the active mesh."""
    if type(tensor) is not torch.Tensor:
        return of_torch(tensor, memo)
    with activation.no_mesh():
        return of_torch(tensor, memo)


class _Loading(threading.local):
    """The active mesh when this thread uses a `DataLoader`, which works as if none were active."""

    def __init__(self) -> None:
        self.mesh: ProcMesh | None = None


_loading_here = _Loading()


def _loading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a `DataLoader` in the script, except for its random numbers."""

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
    """Make a part of a `DataLoader` draw from the workers' generators; it starts no processes, which would draw."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        mesh = _loading_here.mesh
        if mesh is None:
            return function(*args, **kwargs)
        with _DrawnByWorkers(mesh):
            return function(*args, **kwargs)

    return run


class _DrawnByWorkers(activation.DispatchMode):
    """Makes all workers draw instead of the script's default generator, and takes the first worker's numbers."""

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
    return of_torch() if activation.current() is None or _is_dispatch_off() else random.get_states()


def _set_rng_state(of_torch: Callable[..., Any], new_state: torch.Tensor) -> None:
    if isinstance(new_state, Tensor):
        for kept in _forks.kept[-1:]:
            if new_state.mesh not in kept:
                kept[new_state.mesh] = random.get_states(mesh=new_state.mesh)
        random.set_states(new_state)
        return
    of_torch(new_state)
    active = activation.current()
    if active is not None and not _is_dispatch_off():
        random.set_states(to_mesh(new_state, active.mesh))


def _is_dispatch_off() -> bool:
    """Whether torch's own code bypasses all modes at the moment: then it makes tensors of the script."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python))


def _lstm(of_torch: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, Tensor):
        return of_torch(input, *args, **kwargs)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return of_torch(input, *args, **kwargs)
    finally:
        torch._C._set_mkldnn_enabled(before)


def _backward(of_torch: Callable[..., Any], t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
    root = next((each for each in t_outputs if isinstance(each, Tensor)), None)
    if root is None:
        return of_torch(t_outputs, *args, **kwargs)
    with activation.on_its_own(root.remote_value, dispatch):
        return of_torch(t_outputs, *args, **kwargs)


def _compile(of_torch: Callable[..., Any], model: Any = None, **kwargs: Any) -> Any:
    """Like torch; but `flex_attention` compiles a function of its own, which is impossible with tensors of a mesh."""
    compiled = of_torch(model, **kwargs)
    if getattr(model, "__module__", None) != "torch.nn.attention.flex_attention":
        return compiled

    def run(query: Any, *args: Any) -> Any:
        if not isinstance(query, Tensor):
            return compiled(query, *args)
        with activation.on_its_own(query.remote_value, dispatch):
            return model(query, *args)

    return run


def _dispatch_higher_order(of_torch: Callable[..., Any], operator: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Pass an operation that takes functions to the engine's mode, as later versions of torch do by themselves.

    Torch 2.8 needs a rule for each pair of an operation and a mode, and each import can add operations.
    """
    if key == torch._C.DispatchKey.Python and isinstance(_get_current_dispatch_mode(), activation.DispatchMode):
        with _pop_mode_temporarily() as mode:
            return mode.__torch_dispatch__(operator, [], args, kwargs)
    return of_torch(operator, key, *args, **kwargs)


def _read(argument: Any) -> Any:
    return argument.tolist() if isinstance(argument, Tensor) else argument


def _tensor_split(of_torch: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return of_torch(input, *map(_read, args), **{name: _read(each) for name, each in kwargs.items()})


def _repeat_interleave(
    of_torch: Callable[..., Any],
    input: torch.Tensor,
    repeats: Any = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Any:
    """If the repeats are a tensor of a mesh, their sum is fetched; ranks with another sum fail."""
    if repeats is None:
        if isinstance(input, Tensor) and output_size is None:
            output_size = int(input.sum().item())
        return of_torch(input, output_size=output_size)
    if isinstance(repeats, Tensor) and output_size is None:
        size = input.numel() if dim is None else input.size(dim)
        output_size = int(repeats.sum().item()) * (size if repeats.numel() == 1 else 1)
    return of_torch(input, repeats, dim, output_size=output_size)


def _combinations(of_torch: Callable[..., Any], input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> Any:
    """Make the indices in the script: they do not depend on the values."""
    if not isinstance(input, Tensor) or input.dim() != 1 or r < 1:
        return of_torch(input, r, with_replacement)
    with activation.no_mesh():
        indices = of_torch(torch.arange(input.numel()), r, with_replacement)
    value = input.remote_value
    return input[ship(indices, instruction_stream=value.instruction_stream, mesh=value.mesh)]


def _ctc_loss(
    of_torch: Callable[..., Any],
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    """Fetch lengths that are tensors of a mesh; ranks with others fail. The mean is taken here: torch reads memory."""
    if not isinstance(log_probs, Tensor):
        return of_torch(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    read: list[list[int]] = []
    for name, given in (("input_lengths", input_lengths), ("target_lengths", target_lengths)):
        listed = given.tolist() if isinstance(given, torch.Tensor) else given
        if isinstance(given, Tensor):
            targets = _where_it_is(targets, given, listed, f"the {name} of ctc_loss")
        read.append([listed] if isinstance(listed, int) else list(listed))
    losses = of_torch(log_probs, targets, *read, blank, _NONE, zero_infinity)
    if reduction == _MEAN:
        with activation.no_mesh():
            divisors = torch.tensor(read[1]).clamp_(min=1).to(losses.dtype).reshape(losses.shape)
        value = log_probs.remote_value
        return (losses / ship(divisors, instruction_stream=value.instruction_stream, mesh=value.mesh)).mean()
    return losses if reduction == _NONE else losses.sum()


_NONE, _MEAN = 0, 1
"""Reductions, as `torch.nn.functional` passes them on."""

_where_it_is = remote(agreement.where_it_is, propagate=lambda tensor, *_: torch.empty_like(tensor))


def _index_fill(of_torch: Callable[..., Any], input: torch.Tensor, dim: int, index: Any, value: Any) -> Any:
    """Replace torch's version: its gradient for a tensor value needs to know the indices."""
    if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled() and not value.dim()):
        return of_torch(input, dim, index, value)
    shape = [1] * input.dim()
    if shape:
        shape[dim] = input.size(dim)
    filled = input.new_zeros(input.size(dim) if shape else 1, dtype=torch.bool).index_fill_(0, index, True)
    return torch.where(filled.view(shape), value.to(input.dtype), input)


def _index_fill_(of_torch: Callable[..., Any], input: torch.Tensor, dim: int, index: Any, value: Any) -> Any:
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        return input.copy_(input.index_fill(dim, index, value))
    return of_torch(input, dim, index, value)


def _into_out(of_torch: Callable[..., Any], *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """For functions of torch that leave ``out`` unchanged if their arguments are of a subclass.

    `nanmean` of torch 2.8 even uses the memory of its arguments, which tensors of a mesh do not have here.
    """
    if out is None or not any(isinstance(each, Tensor) for each in (out, *args, *kwargs.values())):
        return of_torch(*args, out=out, **kwargs)
    made = of_torch(*args, **kwargs)
    return out.resize_(made.shape).copy_(made)


class _Forks(threading.local):
    """For each `fork_rng` of this thread, the saved states of the meshes whose states were changed within it."""

    def __init__(self) -> None:
        self.kept: list[dict[ProcMesh, torch.Tensor]] = []


_forks = _Forks()


@contextlib.contextmanager
def _fork_rng(of_torch: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    with of_torch(*args, **kwargs):
        _forks.kept.append({})  # without an active mesh, as in a backward, torch keeps only the script's state
        try:
            yield
        finally:
            for state in _forks.kept.pop().values():
                random.set_states(state)
