"""Sites of torch's own operations: each has a function of a few lines, generated and compiled once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from skipper.tensor_engine.shared.custom_operations import DefinedBy, define
from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.worker.device import local
from skipper.tensor_engine.worker.heap import Heap
from skipper.tensor_engine.worker.interpreter import Interpreter, Run, Site

INPUT, CONSTANT, FIXED, LIST, TUPLE = range(5)
"""Kinds of nodes of a template: ``(INPUT, index)``, ``(CONSTANT, index)``, ``(FIXED, value)``, ``(LIST, nodes)``."""

Node = tuple[int, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """An operation, described for the worker; picklable.

    Attributes:
        operation: ``namespace::name`` and the name of the overload.
        defined_by: what defines it on a worker that does not know it.
        args: a template for each positional argument.
        kwargs: a template for each keyword argument.
        outputs: for each new value, its position in the result, and its expected metadata.
        views: which of these are views.
        reshapes: which inputs get another shape in place; the worker changes a fresh alias instead.
    """

    operation: tuple[str, str]
    defined_by: DefinedBy
    args: Sequence[Node]
    kwargs: dict[str, Node]
    outputs: Sequence[tuple[tuple[int, ...], TensorMetadata]]
    views: frozenset[int]
    reshapes: frozenset[int]

    def written(
        self,
        operation: str,
        input_at: Callable[[int], str],
        constant_at: Callable[[int], str],
        fixed: Callable[[Any], str],
    ) -> str:
        """The call of the operation as Python source, given a way to write its name and the leaves of arguments."""

        def text(node: Node) -> str:
            kind, value = node
            if kind == INPUT:
                return f"alias({input_at(value)})" if value in self.reshapes else input_at(value)
            if kind == CONSTANT:
                return constant_at(value)
            if kind == FIXED:
                return fixed(local(value) if isinstance(value, torch.device) else value)
            inner = ", ".join(map(text, value))
            return f"[{inner}]" if kind == LIST else f"({inner},)" if value else "()"

        arguments = [text(node) for node in self.args]
        if self.kwargs:
            # In a dictionary: the name of an argument may be a Python keyword, such as "from".
            named = ", ".join(f"{name!r}: {text(node)}" for name, node in self.kwargs.items())
            arguments.append(f"**{{{named}}}")
        return f"{operation}({', '.join(arguments)})"

    def packed(self) -> bytes:
        """The description as bytes, made once for all workers."""
        return pickle.dumps([getattr(self, name) for name in self.__slots__], protocol=5)

    @classmethod
    def unpacked(cls, packed: bytes) -> Description:
        """The inverse of `packed`."""
        return cls(*pickle.loads(packed))


def operation_site(worker: Interpreter, site: Site, packed: bytes) -> Run:
    """Makes the worker's part of torch's operations."""
    description = Description.unpacked(packed)
    run = _compile(description, checked=False)
    return _checking(site, description, run) if description.outputs else run


def find(description: Description) -> Any:
    """The overload of torch that a `Description` names.

    Raises:
        NotImplementedError: this worker does not know it.
    """
    name, overload = description.operation
    define(description.defined_by)
    packet = getattr(getattr(torch.ops, name.partition("::")[0]), name.partition("::")[2], None)
    if packet is None:
        raise NotImplementedError(
            f"workers do not know the operation {name}, which the script has registered: call a function of the module "
            'that registers it by remote("module.function"), so that they import it, or define the operation by '
            "torch.library.custom_op"
        )
    return getattr(packet, overload)


def _checking(site: Site, description: Description, run: Run) -> Run:
    """Runs the first instruction, and checks that the result is as the script expects.

    The script knows strides from torch's rules for fake tensors, but kernels may use other layouts for their results.
    From then on the results of such a site are copied to the expected layout.
    """

    def check(heap: Heap, code: Sequence[int], at: int, constants: Sequence[Any], constant: int) -> None:
        run(heap, code, at, constants, constant)
        differs = False
        for index, (_, expected) in enumerate(description.outputs):
            result = heap[code[at + 1 + index]]
            if tuple(result.shape) != expected.shape or result.dtype != expected.dtype:
                raise RuntimeError(
                    f"the script expects {expected!r} of {site.name}, and it has returned "
                    f"{str(result.dtype).removeprefix('torch.')}{list(result.shape)}"
                )
            if index not in description.views and result.stride() != expected.stride:
                heap[code[at + 1 + index]] = laid_out(result, expected)
                differs = True
        site.run = _compile(description, checked=True) if differs else run
        site.is_laid_out = differs

    return check


def laid_out(result: torch.Tensor, expected: TensorMetadata) -> torch.Tensor:
    """The tensor, with the strides that the script expects."""
    if result.stride() == expected.stride:
        return result
    return torch.empty_strided(expected.shape, expected.stride, dtype=result.dtype, device=result.device).copy_(result)


def _compile(description: Description, *, checked: bool) -> Run:
    """The generated function that runs an instruction; its namespace has the operations and values."""
    namespace: dict[str, Any] = {"alias": torch.ops.aten.alias.default}
    namespace["op"] = find(description)._op  # without its Python wrapper
    first = 1 + len(description.outputs)

    def fixed(value: object) -> str:
        name = f"v{len(namespace)}"
        namespace[name] = value
        return name

    call = description.written(
        "op",
        lambda index: f"heap[code[at + {first + index}]]",
        lambda index: f"constants[constant + {index}]",
        fixed,
    )
    lines = ["def run(heap, code, at, constants, constant):"]
    if len(description.outputs) == 1 and not description.outputs[0][0] and not checked:
        lines.append(f"    heap[code[at + 1]] = {call}")
    else:
        lines.append(f"    result = {call}")
        for index, (path, expected) in enumerate(description.outputs):
            found = "result" + "".join(f"[{step}]" for step in path)
            if checked and index not in description.views:
                namespace["laid_out"] = laid_out
                found = f"laid_out({found}, {fixed(expected)})"
            lines.append(f"    heap[code[at + {1 + index}]] = {found}")
    exec("\n".join(lines), namespace)
    return cast(Run, namespace["run"])
