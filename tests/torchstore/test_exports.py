"""The public surface: what is exported, and the call forms of Meta's torchstore that must keep working."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from skipper import torchstore
from skipper.torchstore.support.coroutines import is_public


def test_all_names_what_the_package_exports_and_nothing_else() -> None:
    public = {
        name
        for name, value in vars(torchstore).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(torchstore.__all__)


@pytest.mark.parametrize(
    ("function", "positional"),
    [
        (torchstore.initialize, ["num_storage_volumes", "strategy", "store_name", "mesh"]),
        (torchstore.initialize_spmd, ["strategy", "store_name"]),
        (torchstore.shutdown, ["store_name"]),
        (torchstore.client, ["store_name"]),
        (torchstore.reset_client, ["store_name"]),
        (torchstore.put, ["key", "value", "store_name"]),
        (torchstore.put_batch, ["entries", "store_name"]),
        (torchstore.get, ["key", "inplace_tensor", "tensor_slice_spec", "store_name"]),
        (torchstore.get_batch, ["keys", "store_name"]),
        (torchstore.delete, ["key"]),
        (torchstore.delete_batch, ["keys"]),
        (torchstore.keys, ["prefix"]),
        (torchstore.exists, ["key", "store_name"]),
        (torchstore.put_state_dict, ["state_dict", "key", "store_name", "direct_rdma", "transfer_dtype"]),
        (torchstore.get_state_dict, ["key", "user_state_dict", "strict", "store_name", "direct_rdma"]),
    ],
)
def test_positional_arguments_are_those_of_metas_torchstore(
    function: Callable[..., Any], positional: list[str]
) -> None:
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert names == positional


WITHOUT_A_STORE = {"share_memory_", "init_logging", "record_plan", "prove", "join_proofs"}


def test_every_function_takes_a_store_name_and_every_wait_a_timeout() -> None:
    for name in torchstore.__all__:
        function = getattr(torchstore, name)
        if inspect.isfunction(function) and name not in WITHOUT_A_STORE:
            parameters = inspect.signature(function).parameters
            assert "store_name" in parameters, name
            has_timeout = any(parameter.endswith("timeout") for parameter in parameters)
            assert has_timeout or not is_public(function), name


def test_every_coroutine_function_is_one_whose_coroutines_are_named() -> None:
    for name in torchstore.__all__:
        function = inspect.unwrap(getattr(torchstore, name))
        assert not inspect.iscoroutinefunction(function) or is_public(getattr(torchstore, name))


def test_everything_public_is_documented() -> None:
    for name in torchstore.__all__:
        value = getattr(torchstore, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), name
