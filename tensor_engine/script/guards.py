"""What a compiled program assumes, and whether that still holds."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from skipper.tensor_engine.errors import CompileError, LocalTensorError
from skipper.tensor_engine.script import activation, recording
from skipper.tensor_engine.script.tensor import Tensor, local_of

CallKey = tuple[Hashable, ...]


def look_at(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CallKey, list[Tensor]]:
    """The key of a call, by which programs for such calls are found.

    Returns:
        What has to be equal; and the input tensors, each followed by its gradient if it has one that the function may
        add to.

    Raises:
        LocalTensorError: an argument is a tensor of the script.
        CompileError: an argument cannot be compared, or comes from operations that autograd has recorded outside.
        DroppedTensorError: an argument has been dropped.
        BorrowedTensorError: an argument is lent, or was borrowed and given back.
    """
    active = activation.current()
    with_grad = torch.is_grad_enabled()
    key: list[Any] = [
        with_grad,
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
    ]
    if active is not None:
        key += (active.mesh, active.instruction_stream, active.instruction_stream.session.numbers)
    tensors: list[Tensor] = []
    for argument in args:
        _look(argument, key, tensors, with_grad)
    for name, argument in kwargs.items():
        key.append(name)
        _look(argument, key, tensors, with_grad)
    if len(tensors) > 1:
        places: dict[int, int] = {}
        for index, tensor in enumerate(tensors):
            places.setdefault(id(tensor.remote_value.storage), index)
            places.setdefault(tensor.remote_value.ref, index)
            places.setdefault(-id(tensor), index)
        if len(places) < 3 * len(tensors):
            key += (
                (places[id(tensor.remote_value.storage)], places[tensor.remote_value.ref], places[-id(tensor)])
                for tensor in tensors
            )
    return tuple(key), tensors


def _look(argument: Any, key: list[Any], tensors: list[Tensor], with_grad: bool) -> None:
    kind = type(argument)
    if isinstance(argument, Tensor):
        value = argument.remote_value
        if value.barred is not None or value.storage.barred is not None:
            value.check()
        key += (value.meta, value.instruction_stream, value.mesh, value.instruction_stream.session.numbers)
        tensors.append(argument)
        if not argument.requires_grad:
            return
        key.append(nn.Parameter if isinstance(argument, nn.Parameter) else Tensor)
        if with_grad:
            if not argument.is_leaf:
                raise CompileError(
                    "an argument of a compiled function is the result of operations that autograd has recorded, and "
                    "gradients do not flow out of the function: compile these operations too, or pass x.detach()"
                )
            if isinstance(argument.grad, Tensor):
                key.append("grad")
                _look(argument.grad, key, tensors, with_grad=False)
    elif isinstance(argument, torch.Tensor):
        raise LocalTensorError(
            "an argument of a compiled function is a tensor of the script: bring it to the mesh by "
            "to_mesh(tensor, mesh)"
        )
    elif isinstance(argument, list | tuple):
        key += (kind, len(argument))
        for item in argument:
            _look(item, key, tensors, with_grad)
    elif kind is dict:
        key += (kind, len(argument))
        for name, item in argument.items():
            key.append(name)
            _look(item, key, tensors, with_grad)
    else:
        try:
            hash(argument)
        except TypeError as error:
            raise CompileError(
                f"an argument of a compiled function is of {kind.__name__}, which cannot be compared with that of "
                "another call: pass numbers, strings, tensors, and lists, tuples and dictionaries of these"
            ) from error
        key += (kind, argument)


def gradients() -> dict[int, tuple[Tensor, torch.Tensor | None]]:
    """The gradient of every tensor of a mesh that may get one, by the identity of the tensor."""
    return {
        id(found): (found, found.grad)
        for found in all_objects()
        if type(found) is Tensor and found.requires_grad and found.is_leaf
    }


def all_objects() -> list[Any]:
    """All objects that the garbage collector tracks, including those that `gc.freeze` has set aside."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


class TraceSurroundings:
    """What replays depend on besides arguments: modes of the modules and settings of the optimizers in the trace.

    During the trace `torch.compiler.is_compiling` is true, so that models do not read values. Optimizers step as
    without a compiler: their compiled step would treat tensors of all dtypes as one group.
    """

    def __init__(self) -> None:
        self._modules: dict[int, tuple[nn.Module, bool]] = {}
        self._optimizers: dict[int, tuple[Optimizer, list[dict[str, Any]]]] = {}
        self._settings: list[tuple[dict[str, Any], str, Any]] = []
        self._hooks: list[Any] = []
        self._said = False

    def __enter__(self) -> TraceSurroundings:
        self._hooks = [
            register_module_forward_pre_hook(self._meet_module),
            register_optimizer_step_pre_hook(self._meet_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ]
        self._said = _say_compiling(True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _say_compiling(self._said)

    def hold(self) -> bool:
        """Whether nothing of it has changed."""
        for module, training in self._modules.values():
            if module.training is not training:
                return False
        for optimizer, groups in self._optimizers.values():
            if optimizer.param_groups is not groups:
                return False
        for group, name, value in self._settings:
            now = group.get(name)
            if now is not value and (isinstance(now, torch.Tensor) or type(now) is not type(value) or now != value):
                return False
        return True

    def _meet_module(self, module: nn.Module, inputs: Any) -> None:
        self._modules.setdefault(id(module), (module, module.training))

    def _meet_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _say_compiling(False)
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = (optimizer, optimizer.param_groups)
        self._settings += [
            (group, name, value)
            for group in optimizer.param_groups
            for name, value in group.items()
            if name != "params"
        ]

    def _leave_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _say_compiling(True)


def _say_compiling(is_so: bool) -> bool:
    """Set what `torch.compiler.is_compiling` returns from now on, in all threads; returns the old value."""
    compiler: Any = torch.compiler
    before: bool = compiler._is_compiling_flag
    compiler._is_compiling_flag = is_so
    return before


class Guarding(activation.DispatchMode):
    """Refuses what a trace would make constant: values of the script's tensors, and changes to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)  # decomposed below this mode
        if func is torch.ops.aten._local_scalar_dense.default:
            recording.refuse(
                "the value of a tensor, as .item() and `if tensor:` want it,",
                "replays would not see it change. Keep it a tensor (torch.where), or return it and look outside; of "
                "torch's optimizers, those with fused=True, or on GPUs with capturable=True, read no values",
            )
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[index] if index < len(args) else kwargs.get(argument.name)
                for each in written if isinstance(written, list | tuple) else (written,):
                    if _is_of_script(each) and id(each) not in self._own:
                        recording.refuse(
                            "a change to a tensor of the script", "it would happen once. Make it a tensor of the mesh"
                        )
        result = func(*args, **kwargs)
        for each in result if isinstance(result, list | tuple) else (result,):
            if _is_of_script(each):
                self._own[id(each)] = each
        return result


def _is_of_script(argument: object) -> bool:
    """Whether it is a tensor, but not one of a mesh; a `DTensor` counts as its local tensor."""
    return isinstance(argument, torch.Tensor) and not isinstance(local_of(argument), Tensor)
