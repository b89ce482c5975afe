"""The worker's functions for the objects and modules that it has for the script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from skipper.tensor_engine.shared.opaque_ref import OpaqueRef
from skipper.tensor_engine.worker.user_code import resolve


def construct(constructor: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpaqueRef:
    """Make the object."""
    return OpaqueRef(resolve(constructor)(*args, **kwargs))


def call_method_of(ref: OpaqueRef, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the object."""
    return getattr(ref.value, name)(*args, **kwargs)


def describe_parameters(ref: OpaqueRef) -> dict[str, Any]:
    """Shape, strides and dtype of each parameter of the module, and whether it requires a gradient."""
    return {
        name: ((tuple(each.shape), each.stride(), each.dtype), each.requires_grad)
        for name, each in ref.value.named_parameters()
    }


def parameters_of(ref: OpaqueRef) -> dict[str, torch.Tensor]:
    """The parameters of the module, which share their memory with it."""
    return {name: each.detach() for name, each in ref.value.named_parameters()}


class _Graph:
    """What a worker keeps between forward and backward: edges of the autograd graph, which keep their inputs alive."""

    def __init__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self._inputs = [torch.autograd.graph.get_gradient_edge(each) for each in inputs]
        self._outputs = [
            torch.autograd.graph.get_gradient_edge(each) if each.requires_grad else None for each in outputs
        ]

    def backward(self, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        pairs = [(edge, grad) for edge, grad in zip(self._outputs, grads, strict=True) if edge is not None]
        if not pairs:
            return [None] * len(self._inputs)
        return torch.autograd.grad(
            [edge for edge, _ in pairs], self._inputs, [grad for _, grad in pairs], allow_unused=True
        )


def forward(
    ref: OpaqueRef, wanted: Sequence[bool], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpaqueRef, Any]:
    """Run the module; keep what its backward needs."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    asked = iter(wanted)
    inputs = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[place] = leaf.detach().requires_grad_() if next(asked) else leaf
            if leaves[place].requires_grad:
                inputs.append(leaves[place])
    inputs += [each for each, is_wanted in zip(ref.value.parameters(), asked, strict=True) if is_wanted]
    again, named = pytree.tree_unflatten(leaves, spec)
    outputs = ref.value(*again, **named)
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return OpaqueRef(_Graph(inputs, tensors)), outputs


def backward(graph: OpaqueRef, grads: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the inputs of `forward` and of the parameters, for those in ``like``; zeros if there is none."""
    found = graph.value.backward(grads)
    return [torch.zeros_like(each) if grad is None else grad for grad, each in zip(found, like, strict=True)]
