"""Modules and other things of the script, with their tensors on a mesh."""

from __future__ import annotations

import copy
from typing import Any, TypeVar, cast

import torch
from torch.utils._pytree import tree_map

from skipper.control import ProcMesh
from skipper.tensor_engine.script.communicate import to_mesh

T = TypeVar("T")


def place(what: T, mesh: ProcMesh) -> T:
    """Bring the tensors of a module, a state dict or any other pytree to a mesh, where all ranks get the same.

    Args:
        what: a tensor, a module, or lists, tuples and dictionaries of such, at any depth. Everything else in it stays
            as it is. Its tensors are those of the script, or of a mesh that ``mesh`` is reached from (see `to_mesh`).
        mesh: where to.

    Returns:
        A copy, with its tensors on the mesh: parameters are parameters, with their gradients, and those that were tied
        are tied. Modules are deep copies, in which parameters and buffers are elsewhere.

    Raises:
        MeshMismatchError: (a `ValueError`) as of `to_mesh`.
        NotImplementedError: a tensor is on torch's device ``meta``, which has no values.
    """
    moved: dict[int, Any] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        known = moved.get(id(tensor))
        if known is None:
            known = to_mesh(tensor.detach(), mesh)
            if isinstance(tensor, torch.nn.Parameter):
                known = torch.nn.Parameter(known, tensor.requires_grad)
            else:
                known.requires_grad_(tensor.requires_grad)
            moved[id(tensor)] = known
            if tensor.is_leaf and tensor.grad is not None:
                known.grad = move(tensor.grad)
        return cast(torch.Tensor, known)

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.Module):
            for tensor in (*leaf.parameters(), *leaf.buffers()):
                move(tensor)
            return copy.deepcopy(leaf, moved)  # which takes what has been moved for a copy that it has made
        return move(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return cast(T, tree_map(one, what))
