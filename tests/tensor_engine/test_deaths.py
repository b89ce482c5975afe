"""Workers that are killed while others communicate with them: whoever is left gets an error, and at once."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from control import this_host
from tensor_engine import collectives
from tensor_engine.errors import CommunicationError
from tensor_engine.groups import Group
from tensor_engine.metadata import metadata
from tensor_engine.point_to_point import transfer

from .conftest import Failures
from .members import PATIENCE_S, members_of

LARGE = 100_003
"""Elements that go through shared memory."""


def meet(group: Group) -> None:
    collectives.all_reduce(group, torch.ones(()), metadata(()), "sum")


def reduce(group: Group) -> None:
    collectives.all_reduce(group, torch.ones(LARGE), metadata((LARGE,)), "sum")


def read(group: Group) -> None:
    transfer(group, None, metadata(()))


def send_on(group: Group) -> None:
    for _ in range(20):  # a few go out before somebody has to take them
        transfer(group, torch.ones(LARGE), metadata((LARGE,)))


def die(group: Group) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def error_of(group: Group, function: Callable[[Group], None]) -> str:
    with pytest.raises(CommunicationError) as caught:
        function(group)
    return str(caught.value)


@pytest.mark.usefixtures("failures")
def test_a_killed_worker_is_an_error_for_those_that_reduce_with_it_read_from_it_or_send_to_it(
    failures: Failures,
) -> None:
    procs = this_host().spawn_procs({"gpus": 4}, env={"OMP_NUM_THREADS": "1"})
    mesh = members_of(procs).mesh
    workers = [mesh.slice(gpus=number) for number in range(4)]

    def start(number: int, function: Callable[..., Any], numbers: tuple[int, ...], *args: Any) -> Any:
        return workers[number].run.call_one(function, numbers, "main", args)

    for work, numbers in (reduce, (0, 1, 2, 3)), (read, (2, 0)), (send_on, (0, 1)):
        for future in [start(number, meet, numbers) for number in numbers]:
            future.get(PATIENCE_S)
        victim = 3 if work is reduce else next(number for number in numbers if number)
        survivors = [number for number in numbers if number != victim]
        began = time.monotonic()
        start(victim, die, numbers)
        for future in [start(number, error_of, numbers, work) for number in survivors]:
            assert "failed on the group of workers" in future.get(PATIENCE_S)
        assert time.monotonic() - began < 10
    began = time.monotonic()
    while len(failures) < 3:  # or one would come when nobody expects it any more
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.005)
    procs.stop().get(PATIENCE_S)
