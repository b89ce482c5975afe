"""What the script expects a remote function to return: it runs the function on fake tensors, or asks a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
)

from skipper.tensor_engine.errors import MisuseError, NotPropagatableError
from skipper.tensor_engine.script.activation import no_mesh
from skipper.tensor_engine.script.arguments import PackedArguments
from skipper.tensor_engine.script.propagation import fake_inputs, fake_mode, propagating
from skipper.tensor_engine.script.tensor import version_of
from skipper.tensor_engine.shared.metadata import TensorMetadata, metadata, metadata_of
from skipper.tensor_engine.shared.opaque_ref import OPAQUE_META, OpaqueRef
from skipper.tensor_engine.shared.remote_functions import INPUT, OBJECT, TENSOR, Kind


@dataclass(frozen=True, slots=True)
class Expected:
    """What a function returns.

    Attributes:
        spec: how the parts are assembled.
        leaves: the parts in their order; None in place of a tensor or a reference to an object.
        places: where in ``leaves`` these are.
        kinds: the kind of each.
        metas: the metadata of the new ones.
        writes: which inputs the function changes.
    """

    spec: Any
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    kinds: tuple[Kind, ...]
    metas: tuple[TensorMetadata, ...]
    writes: tuple[int, ...] = ()

    def assemble(self, found: Sequence[Any]) -> Any:
        """The result, with stand-ins for tensors and objects filled in."""
        leaves = list(self.leaves)
        for place, each in zip(self.places, found, strict=True):
            leaves[place] = each
        return pytree.tree_unflatten(leaves, self.spec)


def expect(what: str, function: Callable[..., Any], packed: PackedArguments, *, is_real: bool) -> Expected:
    """Run a function on fake tensors.

    Args:
        what: for people.
        function: gets the arguments with fake tensors in place of those of the mesh.
        packed: the arguments.
        is_real: whether the workers run this function: then results that share memory with inputs also do so there.

    Raises:
        NotPropagatableError: what it returns depends on values that only the workers have.
        LocalTensorError: it needs an object that only the workers have.
        MisuseError: it returned a tensor that is not fake.
    """
    with propagating, no_mesh(), fake_mode(), torch.no_grad():
        fakes = fake_inputs([value for value in packed.values if value.meta is not OPAQUE_META])
        supply = iter(fakes)
        inputs = [OpaqueRef() if value.meta is OPAQUE_META else next(supply) for value in packed.values]
        args, kwargs = packed.load(inputs)
        versions = [version_of(each) if isinstance(each, torch.Tensor) else 0 for each in inputs]
        try:
            result = function(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotPropagatableError(
                f"what {what} returns depends on values that only the workers have: say what it is by a propagate "
                'function, or ask the workers by propagate="inspect"'
            ) from error
        except UnsupportedFakeTensorException as error:
            raise NotPropagatableError(f"{what} cannot be run on fake tensors: {error}") from error
        leaves, spec = pytree.tree_flatten(result)
        changed = [
            index
            for index, (each, version) in enumerate(zip(inputs, versions, strict=True))
            if isinstance(each, torch.Tensor) and version_of(each) != version
        ]
        return _read(what, leaves, spec, inputs, tuple(changed), is_real=is_real)


def _read(
    what: str, leaves: list[Any], spec: Any, inputs: Sequence[Any], writes: tuple[int, ...], *, is_real: bool
) -> Expected:
    numbers = {id(each): index for index, each in reversed(list(enumerate(inputs)))}
    storages = {
        each.untyped_storage()._cdata: index
        for index, each in reversed(list(enumerate(inputs)))
        if isinstance(each, torch.Tensor)
    }
    places: list[int] = []
    kinds: list[Kind] = []
    metas: list[TensorMetadata] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, OpaqueRef):
            places.append(place)
            kinds.append((OBJECT, None))
            metas.append(OPAQUE_META)
        elif isinstance(leaf, FakeTensor):
            places.append(place)
            if is_real and id(leaf) in numbers:
                kinds.append((INPUT, numbers[id(leaf)]))
                continue
            base = storages.get(leaf.untyped_storage()._cdata) if is_real else None
            kinds.append((TENSOR, base))
            metas.append(metadata_of(leaf) if base is not None else _fresh(leaf))
        elif isinstance(leaf, torch.Tensor):
            raise MisuseError(
                f"the propagate function of {what} has returned a tensor that it did not make from its arguments or by "
                "torch's functions within it"
            )
    known = set(places)
    given = tuple(None if place in known else leaf for place, leaf in enumerate(leaves))
    return Expected(spec, given, tuple(places), tuple(kinds), tuple(metas), writes)


def _fresh(leaf: torch.Tensor) -> TensorMetadata:
    return metadata(leaf.shape, leaf.dtype, leaf.device, leaf.stride())


def as_described(told: Any) -> Expected:
    """The same from a worker's description of a result (see `user_code.describe`): no tensor in it is an input."""
    leaves, spec = pytree.tree_flatten(told)
    places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, TensorMetadata))
    metas = tuple(leaves[place] for place in places)
    kinds = tuple((OBJECT if meta is OPAQUE_META else TENSOR, None) for meta in metas)
    given = tuple(None if isinstance(leaf, TensorMetadata) else leaf for leaf in leaves)
    return Expected(spec, given, places, kinds, metas)
