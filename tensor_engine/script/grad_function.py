"""`grad_function`: a function of the script that brings its own backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

Backward = Callable[..., Any]


def grad_function(function: Callable[..., tuple[Any, Backward]]) -> Callable[..., Any]:
    """Give a function its own backward, which can use remote functions, several meshes and streams.

    Args:
        function: returns its outputs, and a function for the backward pass. That one gets the gradients of the outputs:
            one argument for each tensor in the outputs, zeros where there is no gradient. It returns the gradients of
            the tensors among the arguments, in their order, or the gradient if there is only one tensor; None for those
            that get none. Tensors may be anywhere in lists, tuples and dictionaries. Both run without autograd.

    Returns:
        A function of the same arguments that returns the outputs.

    Raises (from backward):
        ValueError: there are not as many gradients as there are tensors among the arguments.

    Example:
        ```python
        import torch

        from skipper.control import this_host
        from skipper.tensor_engine import grad_function, inspect

        @grad_function
        def scaled(x, factor):
            def backward(grad):
                return grad * factor

            return x * factor, backward

        with this_host().spawn_procs().activate():
            x = torch.ones(2, requires_grad=True)
            scaled(x, 3.0).sum().backward()
        print(inspect(x.grad).tolist())  # [3.0, 3.0]
        ```
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[place] for place in places]

        def run(given: Sequence[torch.Tensor]) -> tuple[list[Any], Any, Backward]:
            for place, tensor in zip(places, given, strict=True):
                leaves[place] = tensor
            again, named = pytree.tree_unflatten(leaves, spec)
            outputs, backward = function(*again, **named)
            parts, shape = pytree.tree_flatten(outputs)
            return parts, shape, backward

        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            parts, shape, _ = run(tensors)
            return pytree.tree_unflatten(parts, shape)
        result = _Result()
        made = _Function.apply(run, result, *tensors)  # type: ignore[no-untyped-call]
        fresh = iter(made)
        parts = [next(fresh) if isinstance(part, torch.Tensor) else part for part in result.parts]
        return pytree.tree_unflatten(parts, result.shape)

    return call


class _Result:
    """The whole output, tensors and other things, and its structure."""

    parts: list[Any]
    shape: Any


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], result: _Result, *tensors: torch.Tensor) -> tuple[Any, ...]:
        parts, result.shape, ctx.backward = run([tensor.detach() for tensor in tensors])
        result.parts = parts
        ctx.count = len(tensors)
        return tuple(part for part in parts if isinstance(part, torch.Tensor))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            found = ctx.backward(*grads)
        listed = list(found) if isinstance(found, list | tuple) else [found]
        if len(listed) != ctx.count:
            raise ValueError(
                f"backward has returned {len(listed)} gradients for {ctx.count} tensors among the arguments; None "
                "stands for one that gets none"
            )
        return (None, None, *listed)
