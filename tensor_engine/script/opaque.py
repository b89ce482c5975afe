"""Objects and modules that live on the workers only, used from the script."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.utils._pytree as pytree

from skipper.tensor_engine.script.fetch import Fetched
from skipper.tensor_engine.script.grad_function import grad_function
from skipper.tensor_engine.script.remote import Propagate, call_on_shard_and_fetch, remote
from skipper.tensor_engine.shared.opaque_ref import OpaqueRef
from skipper.tensor_engine.worker import opaque_modules

F = TypeVar("F", bound=Callable[..., Any])


def opaque_method(function: F) -> F:
    """Make a method of an `OpaqueObject` call the method of the same name on the workers.

    Args:
        function: the method in the script: its propagation, called with fake tensors.
    """

    @functools.wraps(function)
    def call(self: OpaqueObject, *args: Any, **kwargs: Any) -> Any:
        return self.call_method(function.__name__, functools.partial(function, self), *args, **kwargs)

    return cast(F, call)


class OpaqueObject:
    """An object on each worker, made there, whose methods the script calls.

    Args:
        constructor: the class or function that makes it, or the path to one; or a reference to an existing object.
        *args: arguments of the constructor; tensors of a mesh may be among them.
        **kwargs: keyword arguments of the constructor.

    Example:
        ```python
        import torch

        from skipper.control import this_host
        from skipper.tensor_engine import OpaqueObject, inspect, opaque_method

        class Counter:  # on the workers
            def __init__(self) -> None:
                self.total = torch.zeros(2)

            def add(self, x: torch.Tensor) -> torch.Tensor:
                self.total += x
                return self.total.clone()

        class RemoteCounter(OpaqueObject):  # in the script
            @opaque_method
            def add(self, x: torch.Tensor) -> torch.Tensor:
                return torch.empty_like(x)  # says the shape and dtype of the result

        with this_host().spawn_procs().activate():
            counter = RemoteCounter(Counter)
            counter.add(torch.ones(2))
            total = counter.add(torch.ones(2))
        print(inspect(total).tolist())  # [2.0, 2.0]
        ```
    """

    def __init__(
        self, constructor: Callable[..., Any] | str | OpaqueRef | OpaqueObject, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(constructor, OpaqueObject):
            constructor = constructor.ref
        self.ref: OpaqueRef = (
            constructor if isinstance(constructor, OpaqueRef) else _construct(constructor, args, kwargs)
        )

    def call_method(self, name: str, propagate: Propagate, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method on all workers.

        Args:
            name: the name of the method.
            propagate: how the script knows what it returns, as for `remote`; a function is called with the arguments.
            *args: arguments of the method.
            **kwargs: keyword arguments of the method.

        Raises:
            ValueError: ``propagate`` would run the method in the script, which does not have the object.
        """
        if propagate in ("cached", "mocked"):
            raise ValueError('the object is on the workers: give a function to propagate=, or "inspect"')
        told = (lambda ref, name, *args, **kwargs: propagate(*args, **kwargs)) if callable(propagate) else propagate
        return remote(opaque_modules.call_method_of, propagate=told)(self.ref, name, *args, **kwargs)

    def call_method_on_shard_and_fetch(
        self, name: str, /, *args: Any, shard: Mapping[str, int] | None = None, **kwargs: Any
    ) -> Fetched[Any]:
        """Call a method on one rank and fetch its result: see `call_on_shard_and_fetch`."""
        return call_on_shard_and_fetch(opaque_modules.call_method_of, self.ref, name, *args, shard=shard, **kwargs)


class OpaqueModule:
    """A `torch.nn.Module` on each worker, made and called there; the script has its parameters and gradients.

    Autograd runs on the workers within the module, and in the script around it.

    Args:
        constructor: the class or function that makes it, or the path to one.
        *args: arguments of the constructor.
        **kwargs: keyword arguments of the constructor.

    Example:
        ```python
        import torch

        from skipper.control import this_host
        from skipper.tensor_engine import OpaqueModule, inspect

        with this_host().spawn_procs().activate():
            linear = OpaqueModule("torch.nn.Linear", 3, 3)  # the module is on the workers
            y = linear(torch.ones(2, 3))
        print(tuple(inspect(y.detach()).shape))  # (2, 3)
        ```
    """

    def __init__(self, constructor: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> None:
        self.object = OpaqueObject(constructor, *args, **kwargs)
        self._parameters: dict[str, torch.Tensor] | None = None

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's own parameters, which share their memory with it: changing them changes the module.

        The first call waits until the first worker has listed them.
        """
        if self._parameters is None:
            looks = call_on_shard_and_fetch(opaque_modules.describe_parameters, self.object.ref).get()

            def like(ref: OpaqueRef) -> dict[str, torch.Tensor]:
                return {name: torch.empty_strided(*look[:2], dtype=look[2]) for name, (look, _) in looks.items()}

            found = remote(opaque_modules.parameters_of, propagate=like)(self.object.ref)
            self._parameters = {name: each.requires_grad_(looks[name][1]) for name, each in found.items()}
        yield from self._parameters.items()

    def parameters(self) -> Iterator[torch.Tensor]:
        """`named_parameters` without the names."""
        for _, parameter in self.named_parameters():
            yield parameter

    def call_method(self, name: str, propagate: Propagate, /, *args: Any, **kwargs: Any) -> Any:
        """See `OpaqueObject.call_method`."""
        return self.object.call_method(name, propagate, *args, **kwargs)

    def __call__(self, *args: Any, propagator: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """Call the module.

        Args:
            *args: for it.
            propagator: a function of the same arguments, called on fake tensors, that returns tensors like those
                that the module returns. None waits until the first worker tells.
            **kwargs: for it.
        """
        parameters = list(self.parameters())
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not torch.is_grad_enabled() or not any(each.requires_grad for each in (*tensors, *parameters)):
            return self.object.call_method("__call__", propagator or "inspect", *args, **kwargs)
        wanted = [each.requires_grad for each in (*tensors, *parameters)]

        @grad_function
        def run(args: Any, kwargs: Any, parameters: Sequence[torch.Tensor]) -> tuple[Any, Callable[..., Any]]:
            def like(ref: OpaqueRef, wanted: Any, args: Any, kwargs: Any) -> tuple[OpaqueRef, Any]:
                assert propagator is not None  # or it is not called
                return OpaqueRef(), propagator(*args, **kwargs)

            forward = remote(opaque_modules.forward, propagate="inspect" if propagator is None else like)
            graph, outputs = forward(self.object.ref, wanted, args, kwargs)

            def backward(*grads: torch.Tensor) -> list[torch.Tensor | None]:
                asked = [each for each, is_wanted in zip((*tensors, *parameters), wanted, strict=True) if is_wanted]
                made = iter(
                    remote(opaque_modules.backward, propagate=_like_last)(
                        graph, grads, [each.detach() for each in asked]
                    )
                )
                return [next(made) if is_wanted else None for is_wanted in wanted]

            return outputs, backward

        return run(args, kwargs, parameters)


def _like_last(*args: Any) -> list[torch.Tensor]:
    return [torch.empty_like(each) for each in args[-1]]


def _construct(constructor: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpaqueRef:
    made: OpaqueRef = remote(opaque_modules.construct, propagate=lambda *args: OpaqueRef())(
        constructor, tuple(args), dict(kwargs)
    )
    return made
