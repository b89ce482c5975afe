"""`Value`: the script's representation of a tensor on the workers."""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import DroppedTensorError, PickleError
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.shared.stacks import line_of_script


class TensorStorage:
    """State that a tensor and its views share: whether they are lent.

    Attributes:
        barred: why none of them may be used at the moment, or None.
        frozen: why none of them may be changed at the moment, or None.
        keeps_frozen: whether it stays frozen after it is given back.
        lent: the number of borrowers.
        recipe: for a tensor that torch has created for a derivative, and that has not been changed: its metadata, and
            the operation with its arguments.
    """

    __slots__ = ("barred", "frozen", "keeps_frozen", "lent", "recipe")

    def __init__(self) -> None:
        self.barred: Exception | None = None
        self.frozen: Exception | None = None
        self.keeps_frozen = False
        self.lent = 0
        self.recipe: tuple[TensorMetadata, tuple[Any, Any, Any]] | None = None

    def refuse_change(self) -> None:
        """Check that it may be changed.

        Raises:
            BorrowedTensorError: it is lent, or was borrowed, only for reading.
        """
        if self.frozen is not None:
            raise self.frozen.with_traceback(None)


class Value:
    """A tensor on the workers of an instruction stream, with a number; its memory there is freed with this object.

    Attributes:
        ref: its number, unique in the script.
        meta: its metadata.
        instruction_stream: the workers that have it, and the stream to which it belongs.
        mesh: those workers in the user's layout.
        storage: its state, shared with its views.
        barred: why it may not be used any more, or None.
        freed: the queue for its number when this object ends, so that the workers free it.
    """

    __slots__ = ("__weakref__", "barred", "freed", "instruction_stream", "mesh", "meta", "ref", "storage")

    def __init__(
        self,
        ref: int,
        meta: TensorMetadata,
        instruction_stream: InstructionStream,
        mesh: ProcMesh,
        storage: TensorStorage | None = None,
    ) -> None:
        self.ref = ref
        self.meta = meta
        self.instruction_stream = instruction_stream
        self.mesh = mesh
        self.storage = storage or TensorStorage()
        self.barred: Exception | None = None
        self.freed: deque[int] = instruction_stream.freed

    def check(self) -> None:
        """Check that it may be used.

        Raises:
            DroppedTensorError: it has been dropped.
            BorrowedTensorError: it is lent, or was borrowed and given back.
        """
        barred = self.barred or self.storage.barred
        if barred is not None:
            raise barred.with_traceback(None)

    def drop(self) -> None:
        """Free it on the workers now. It may be called again."""
        if self.barred is None:
            self.barred = DroppedTensorError(
                f"this tensor has been dropped: its memory on the workers is gone since drop() at {line_of_script()}"
            )
            self.freed.append(self.ref)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PickleError(
            "a tensor of a mesh cannot be copied into memory of the script, as torch.distributed.checkpoint.async_save "
            "does: fetch a shard by inspect(tensor), and save that"
        )

    def __del__(self) -> None:
        # Only a note: a finalizer can run in any thread, even during an operation.
        try:  # noqa: SIM105  (a context manager would cost each tensor more than this)
            self.freed.append(self.ref)
        except AttributeError:
            pass  # torch's compiler makes some without `__init__`, while it follows the Python of an operation
