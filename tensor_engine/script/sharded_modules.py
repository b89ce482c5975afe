"""torch's `fully_shard` in a script: parameters are sharded over processes of a mesh, and whole while they are used.

Each module that is passed to it is one group. Its parameters are DTensors, of which each rank has a part. While the
module runs, whole plain tensors replace them: one all-gather before it assembles the parts of all ranks, and one
reduce-scatter averages and shards the gradients when backward is done with the group. In between the whole tensors are
not kept: what autograd saved of them is recorded, and they are gathered again when backward reaches the outputs of the
module. The exchanges are the engine's, like those of `device_meshes`.

    parts (DTensor) -- _Unshard --> whole tensors -- forward --> outputs
    their gradients <-- average, cut up -- gradients of the whole <-- backward

Programs that do not know this module import torch's `fully_shard` by name, perhaps before Skipper. So the code of that
function itself is changed to call this module if the device mesh consists of processes of the script.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map

from skipper.tensor_engine.errors import MisuseError
from skipper.tensor_engine.script import activation
from skipper.tensor_engine.script.device_meshes import is_of_processes, on_first_use
from skipper.tensor_engine.script.sharded_parameters import GROUP, ShardedGroup, ShardingLayout, ShardingOptions

_FSDP = "torch.distributed.fsdp._fully_shard._fully_shard"
_OURS = "_skipper_fully_shard"
_WITHOUT_EFFECT = (
    "reset_iter_state",
    "set_allocate_memory_from_process_group_for_comm",
    "set_force_sum_reduction_for_comms",
    "set_is_last_backward",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_post_optim_event",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_separate_reduce_scatter_group",
    "set_unshard_in_backward",
)
"""Methods that say when to communicate, and change no result: here communication always begins as soon as possible."""

_is_inside = contextvars.ContextVar("_is_inside", default=False)
"""Whether a sharded module is running."""


def offer() -> None:
    """Redirect `fully_shard` to this module: at once if torch's FSDP is imported, else with the first device mesh."""
    if _FSDP in sys.modules:
        _wrap()
    elif _wrap not in on_first_use:
        on_first_use.append(_wrap)


@functools.cache
def _wrap() -> None:
    module = importlib.import_module(_FSDP)
    function = cast(types.FunctionType, module.fully_shard.__wrapped__)
    of_torch = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    of_torch.__kwdefaults__ = function.__kwdefaults__
    dispatch = functools.partial(_fully_shard, of_torch, _sharded_class(module.FSDPModule))
    function.__globals__[_OURS] = dispatch

    def fully_shard(module, **options):  # type: ignore[no-untyped-def]
        return _skipper_fully_shard(module, **options)  # type: ignore[name-defined]  # noqa: F821

    function.__code__ = fully_shard.__code__
    function.__kwdefaults__ = None


def _fully_shard(
    of_torch: Callable[..., Any],
    sharded: Callable[[type], type],
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Any:
    modules = [module] if isinstance(module, torch.nn.Module) else list(module)
    active = activation.current()
    if mesh is None and active is not None:
        axes = dict(active.mesh.extent)
        kind = next((each.device.type for every in modules for each in every.parameters()), "cpu")
        everyone = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
        mesh = everyone if len(axes) == 1 else everyone._flatten("shards")
    if mesh is None or not is_of_processes(mesh):
        return of_torch(module, mesh=mesh, **options)
    group = ShardedGroup(modules, ShardingLayout.of(mesh), ShardingOptions.of(options))
    for each in modules:
        each.__dict__[GROUP] = group
        each.__class__ = sharded(each.__class__)
    return module


def _sharded_class(of_torch: type) -> Callable[[type], type]:
    """A function that makes the class of a sharded module: a subclass of torch's, with the same methods."""

    class MeshFSDPModule(of_torch):  # type: ignore[misc]
        """A module of tensors of a mesh whose parameters are sharded: see `sharded_modules`."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return cls.__mro__[3](*args, **kwargs)  # a slice of a container is an ordinary container

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            group: ShardedGroup = self.__dict__[GROUP]
            policy = group.options.policy
            if policy.cast_forward_inputs and policy.param_dtype is not None:
                args, kwargs = (_cast(each, policy.param_dtype) for each in (args, kwargs))
            outermost = not _is_inside.get()
            token = _is_inside.set(True)
            try:
                with group.running(outermost):
                    output = super().__call__(*args, **kwargs)
            finally:
                _is_inside.reset(token)
            if policy.output_dtype is not None:
                output = _cast(output, policy.output_dtype)
            if torch.is_grad_enabled():
                for each in tree_leaves(output):
                    if isinstance(each, torch.Tensor) and each.requires_grad:
                        each.register_hook(lambda _: group.begin_backward())  # type: ignore[no-untyped-call]
            return output

        def unshard(self, async_op: bool = False) -> Any:
            group: ShardedGroup = self.__dict__[GROUP]
            group.unshard()
            return types.SimpleNamespace(wait=lambda: None) if async_op else None

        def reshard(self) -> None:
            self.__dict__[GROUP].reshard()

        def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
            for each in self.modules() if recurse else [self]:
                if GROUP in each.__dict__:
                    each.__dict__[GROUP].options.reshards = reshard_after_forward

        def set_gradient_divide_factor(self, factor: float) -> None:
            self.__dict__[GROUP].options.divide_by = factor

    def refuse(self: Any) -> NoReturn:
        """Raise: the other methods first ask for the state that torch keeps for a module, by this one."""
        raise MisuseError("modules whose tensors are on a mesh of processes do not support this method of FSDP")

    setattr(MeshFSDPModule, "_get_fsdp_state", refuse)  # noqa: B010

    def without_effect(self: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: it would change no result."""

    for name in _WITHOUT_EFFECT:
        if hasattr(of_torch, name):
            setattr(MeshFSDPModule, name, without_effect)
    setattr(MeshFSDPModule, "set_reduce_scatter_divide_factor", MeshFSDPModule.set_gradient_divide_factor)  # noqa: B010

    def refuse_copy(self: Any, memo: Any) -> NoReturn:
        raise MisuseError("a module cannot be copied after fully_shard: copy it before")

    @functools.cache
    def sharded(cls: type) -> type:
        return type(f"FSDP{cls.__name__}", (MeshFSDPModule, cls), {"__deepcopy__": refuse_copy})

    return sharded


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda each: each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each, tree
    )
