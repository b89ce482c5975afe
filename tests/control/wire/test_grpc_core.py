"""gRPC's core is used under a name that promises nothing: what is needed of it is checked."""

import types

from skipper.control.wire.grpc_core import core, missing_in


def test_the_installed_grpc_has_all_that_is_needed() -> None:
    assert missing_in(core) == []


def test_a_grpc_that_has_changed_is_described() -> None:
    names = {name: getattr(core, name) for name in dir(core)}
    del names["SegregatedCall"]
    names["CompletionQueue"] = types.SimpleNamespace(shutdown=None)
    assert missing_in(types.SimpleNamespace(**names)) == ["SegregatedCall", "CompletionQueue.poll"]
