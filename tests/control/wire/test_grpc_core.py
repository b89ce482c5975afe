"""gRPC's core is used under a name that promises nothing: what is needed of it is checked."""

import types
from contextlib import ExitStack

from skipper.control.wire.grpc_core import WakePeriod, core, missing_in, wake_period


def test_the_installed_grpc_has_all_that_is_needed() -> None:
    assert missing_in(core) == []


def test_a_grpc_that_has_changed_is_described() -> None:
    names = {name: getattr(core, name) for name in dir(core)}
    del names["SegregatedCall"]
    names["CompletionQueue"] = types.SimpleNamespace(shutdown=None)
    assert missing_in(types.SimpleNamespace(**names)) == ["SegregatedCall", "CompletionQueue.poll"]


def test_the_more_streams_wait_the_more_seldom_each_wakes() -> None:
    period = WakePeriod(core)
    before = period.period_ms
    with ExitStack() as streams:
        found: list[int | None] = []
        for wanted in (1, 16, 32, 2000):
            while period._streams < wanted:
                streams.enter_context(period.waiting())
            found.append(period.period_ms)
        assert found == [200, 200, 400, 5000]
    assert period.period_ms == 200
    wake_period._add(0)
    assert wake_period.period_ms == before


def test_without_the_variable_nothing_is_changed() -> None:
    period = WakePeriod(types.SimpleNamespace())
    with period.waiting():
        assert period.period_ms is None
