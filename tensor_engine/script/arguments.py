"""Arguments of remote functions: tensors of a mesh travel as numbers, and everything else is pickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import LocalTensorError
from skipper.tensor_engine.script import activation
from skipper.tensor_engine.script.device_meshes import taken_apart
from skipper.tensor_engine.script.instruction_stream import InstructionStream, StreamKey
from skipper.tensor_engine.script.process_groups import RemoteProcessGroup, stand_in
from skipper.tensor_engine.script.tensor import Tensor, local_of, refuse_mixture, value_of
from skipper.tensor_engine.script.value import Value
from skipper.tensor_engine.shared.distributed import put_together
from skipper.tensor_engine.shared.opaque_ref import OpaqueRef
from skipper.tensor_engine.shared.remote_functions import GROUP, VALUE, unpack


class OpaqueHandle(OpaqueRef):
    """The script's reference to objects that the workers know by a number.

    Attributes:
        remote_value: the number, and where the objects are.
    """

    __slots__ = ("remote_value",)

    def __init__(self, value: Value) -> None:
        super().__init__()
        self.remote_value = value

    def __repr__(self) -> str:
        return f"<OpaqueRef on {self.remote_value.mesh!r}>"


class PackedArguments:
    """Arguments in the form that is sent.

    Attributes:
        data: the arguments, pickled, with numbers in place of tensors and references to objects on the workers.
        values: the values of these numbers.
        tensors: the tensors, by the number of their values; None for references to objects.
        groups: the process groups among the arguments.
    """

    __slots__ = ("data", "groups", "tensors", "values")

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Pack arguments.

        Raises:
            LocalTensorError: a tensor of the script is among them.
            DroppedTensorError: a tensor has been dropped.
            BorrowedTensorError: a tensor is lent, or has been given back.
            TypeError: one of them cannot be pickled.
        """
        self.values: list[Value] = []
        self.tensors: list[Tensor | None] = []
        self.groups: list[RemoteProcessGroup] = []
        sink = io.BytesIO()
        try:
            _ArgumentPickler(sink, self).dump((tuple(args), dict(kwargs)))
        except LocalTensorError:
            raise
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(f"an argument of a remote function cannot be pickled: {error}") from error
        self.data = sink.getvalue()

    def load(self, stand_ins: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with stand-ins in place of the values, and process groups that do nothing."""
        return unpack(self.data, stand_ins, stand_in)

    def place(self, what: str) -> tuple[InstructionStream, ProcMesh]:
        """Where the function runs: where its tensors are, or on the active mesh.

        Raises:
            MeshMismatchError: they are not all on one mesh, or a process group is of another one.
            StreamMismatchError: they are not all of one stream.
            NoActiveMeshError: there are none, and no mesh is active.
        """
        instruction_stream, mesh = _place_of(self.values, what)
        for group in self.groups:
            group.check(instruction_stream, mesh)
        return instruction_stream, mesh

    def place_on_one(
        self, rank: int, instruction_stream: InstructionStream, mesh: ProcMesh
    ) -> tuple[InstructionStream, ProcMesh]:
        """The same for a function that runs on only one rank of the place.

        Raises:
            MeshMismatchError: a process group has more members.
        """
        one = mesh.slice(**mesh.extent.point(rank))
        alone = instruction_stream.session.instruction_stream(one, instruction_stream.stream)
        for group in self.groups:
            group.check(alone, one)
        return alone, one

    def pattern(self) -> tuple[object, ...]:
        """Everything on which the metadata of results can depend; hashable."""
        numbers: dict[int, int] = {}
        storages: dict[int, int] = {}
        alike = tuple(
            (value.meta, numbers.setdefault(value.ref, index), storages.setdefault(id(value.storage), index))
            for index, value in enumerate(self.values)
        )
        return (self.data, alike)


def _place_of(values: Sequence[Value], what: str) -> tuple[InstructionStream, ProcMesh]:
    """The instruction stream and the mesh that values have in common; the active ones if there are no values."""
    if not values:
        active = activation.require_active(what)
        return active.instruction_stream, active.mesh
    first = values[0]
    for other in values:
        if other.instruction_stream is not first.instruction_stream:
            refuse_mixture(f"{what}: arguments", first, other)
    return first.instruction_stream, first.mesh


class _ArgumentPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is not typed
    def __init__(self, sink: io.BytesIO, packed: PackedArguments) -> None:
        super().__init__(sink, protocol=5)
        self._packed = packed
        self._numbers: dict[int, int] = {}
        self._places: dict[tuple[ProcMesh, StreamKey], list[Tensor]] = {}

    def persistent_id(self, obj: Any) -> tuple[str, Any] | None:
        if isinstance(obj, torch.Tensor):
            if isinstance(local_of(obj), Tensor) and not isinstance(obj, Tensor):
                return None  # a DTensor, whose parts are pickled
            if not isinstance(obj, Tensor):
                raise LocalTensorError(
                    f"a tensor of the script, {list(obj.shape)} of {obj.dtype}, is among the arguments of a remote "
                    "function: make it on the mesh, by torch.tensor(data) under `with mesh.activate():`, or bring it "
                    "there, by to_mesh(tensor, mesh)"
                )
            return VALUE, self._number(obj, value_of(obj), obj)
        if isinstance(obj, OpaqueHandle):
            obj.remote_value.check()
            return VALUE, self._number(obj, obj.remote_value, None)
        if isinstance(obj, RemoteProcessGroup):
            self._packed.groups.append(obj)
            return GROUP, obj.spec
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return put_together, taken_apart(obj, self._places)
        return super().reducer_override(obj)

    def _number(self, obj: object, value: Value, tensor: Tensor | None) -> int:
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self._packed.values)
            self._packed.values.append(value)
            self._packed.tensors.append(tensor)
        return number
