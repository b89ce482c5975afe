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
    """Bring the tensors of a module, a state dict or any other pytree to a mesh, where all ranks get the same values.

    Args:
        what: a tensor, a module, or lists, tuples and dictionaries of them, at any depth. Everything else in it stays
            as it is. Its tensors are tensors of the script, or of a mesh from which `to_mesh` can bring them.
        mesh: the mesh to bring them to.

    Returns:
        A copy, with its tensors on the mesh: parameters stay parameters, with their gradients, and tied ones stay tied.
        Modules are deep copies, whose parameters and buffers are on the mesh.

    Raises:
        MeshMismatchError: (a `ValueError`) as for `to_mesh`.
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
            return copy.deepcopy(leaf, moved)  # it takes moved tensors for its own copies
        return move(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return cast(T, tree_map(one, what))
