"""`CallSite`: an operation on arguments of one kind, in the script's cache and in its description for workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Self

from skipper.tensor_engine.shared.encoding import Form
from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.shared.program import CALL
from skipper.tensor_engine.worker.calls import FunctionCall

_numbers = itertools.count(1)

NEW, SAME, GIVEN, SEQUENCE = range(4)
"""Kinds of results: a new value ``(NEW, index)``, an input ``(SAME, index)``, anything else, and lists of results."""


class CallSite:
    """An operation on arguments of one kind: what it returns, and its description for the workers.

    Attributes:
        number: of the site.
        form: the form of its instructions.
        description: what the worker's part of it is made from.
        outputs: the metadata of each new value, and the input that it is a view of, or None.
        single: the one element of ``outputs``, if the result is only that new value; else None.
        same: the input that is the result, if there is no new value; else None.
        result: how the result is put together.
        reshaped: inputs whose shape the operation changes in place: their index, and the output with the new shape.
        is_in_use: whether it has been used since the last search for a site to evict.
    """

    __slots__ = ("description", "form", "is_in_use", "number", "outputs", "reshaped", "result", "same", "single")

    def __init__(
        self,
        form: Form,
        description: Any,
        outputs: Sequence[tuple[TensorMetadata, int | None]],
        result: tuple[int, Any],
        reshaped: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.number = next(_numbers)
        self.form = form
        self.description = description
        self.outputs = tuple(outputs)
        self.result = result
        self.reshaped = tuple(reshaped)
        self.single = self.outputs[0] if len(self.outputs) == 1 and result == (NEW, 0) and not reshaped else None
        self.is_in_use = False
        self.same = result[1] if result[0] == SAME and not self.outputs else None

    @classmethod
    def of_call(cls, call: FunctionCall) -> Self:
        """The site of a call of a function of this package."""
        form = Form(CALL, call.name, len(call.outputs), call.inputs, int(call.has_constant), call.writes)
        return cls(form, call, [(meta, None) for meta in call.outputs], (SEQUENCE, (list, ())))
