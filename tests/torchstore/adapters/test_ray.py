"""Tensors of a real Ray's actors, read one-sidedly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from skipper import dataplane
from skipper.dataplane import DescriptorError, TransferTimeoutError
from tests.ray_scripts import run_ray_script
from tests.tree import ROOT

pytest.importorskip("ray", reason="ray is not installed")
transports = pytest.importorskip("skipper.torchstore.adapters.ray", reason="this Ray takes no transports of others")

pytestmark = pytest.mark.timeout(400)  # where the machine is busy, Ray alone takes half a minute to start

TOTAL = 999 * 1000 / 2

Found = Callable[[str], Any]


@pytest.fixture(scope="module")
def found() -> Found:
    """What `ray_script` has found out in a scenario."""
    done = run_ray_script("tests.torchstore.adapters.ray_script", f"{ROOT}/src", timeout=380)
    lines = {line["name"]: line for line in done.lines}

    def look(name: str) -> Any:
        assert name in lines, f"the script ended with {done.status}: {done.written[-3000:]}"
        assert "error" not in lines[name], lines[name]["error"]
        return lines[name]["found"]

    return look


def test_every_kind_of_tensor_arrives_as_it_was_made(found: Found) -> None:
    assert found("values") == {"actor to actor": [], "actor to script": [], "script to actor": []}


def test_a_maker_that_is_busy_is_read_all_the_same(found: Found) -> None:
    assert found("a_busy_maker") == {"total": pytest.approx(1e6 * (1e6 - 1) / 2, rel=1e-5), "is_busy": True}


def test_what_the_maker_writes_later_is_read_later(found: Found) -> None:
    assert found("changes") == [TOTAL, TOTAL + 1000]


def test_a_tensor_of_the_reader_is_filled_if_it_fits(found: Found) -> None:
    kept = found("own_memory")
    assert (kept["is_there"], kept["total"]) == (True, TOTAL)
    assert "torch.Size([999])" in kept["misfit"]


def test_registrations_end_with_the_last_reference(found: Found) -> None:
    assert found("let_go") == [3, 1]


def test_readers_of_a_maker_that_was_killed_are_told_and_live_on(found: Found) -> None:
    assert found("a_killed_maker") == {"told": 2, "next": 3.0}


def test_who_does_not_know_the_secret_reads_nothing(found: Found) -> None:
    assert found("a_stranger") == TOTAL


@pytest.fixture
def transport() -> Any:
    return transports.TensorTransport()


def test_an_object_of_a_task_that_was_repeated_is_not_registered_anew(transport: Any) -> None:
    tensors = [torch.arange(4.0)]
    first = transport.extract_tensor_transport_metadata("a", tensors)
    again = transport.extract_tensor_transport_metadata("a", tensors)
    assert first.handles == again.handles
    transport.garbage_collect("a", first, tensors)
    transport.garbage_collect("a", first, tensors)  # it may be asked for twice
    with pytest.raises(dataplane.BufferDroppedError):
        transport.recv_multiple_tensors("a", first, None)


def test_tensors_of_an_object_are_on_one_kind_of_device(transport: Any) -> None:
    with pytest.raises(ValueError, match="cpu and meta"):
        transport.extract_tensor_transport_metadata("a", [torch.ones(1), torch.ones(1, device="meta")])


def test_a_tensor_without_memory_is_refused_and_nothing_is_kept(transport: Any) -> None:
    with pytest.raises(TypeError):
        transport.extract_tensor_transport_metadata("a", [torch.ones(1), torch.eye(2).to_sparse()])
    assert not transport._buffers


def test_an_altered_handle_is_refused(transport: Any) -> None:
    described = transport.extract_tensor_transport_metadata("a", [torch.ones(1)])
    described.handles = [described.handles[0][:-1] + b"x"]
    with pytest.raises(DescriptorError):
        transport.fetch_multiple_tensors("a", described, None)


def test_looking_at_a_read_that_goes_on_is_a_timeout(transport: Any) -> None:
    pending = transports.PendingRead("a", [], dataplane.operation.Operation(1))
    for timeout in (0, 0.01):
        with pytest.raises(TransferTimeoutError):
            transport.wait_fetch_complete(pending, timeout)
