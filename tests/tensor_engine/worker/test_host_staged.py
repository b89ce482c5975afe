"""Operations by way of the host, between two members in threads of this process, over a real gloo."""

import datetime
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from skipper.tensor_engine.worker.host_staged import HostStaged, share_a_gpu
from tests.gpu import gates

WAIT_S = 30.0
DEVICE = "cpu" if gates.missing() else "cuda"
"""Where the members' tensors lie: the way is the same, with one copy less."""


@pytest.fixture
def members() -> "Iterator[Callable[[Callable[[HostStaged, int], Any]], list[Any]]]":
    """Runs a function as each of the members, which gets its backend and its rank; the results by rank."""
    store, patience = dist.HashStore(), datetime.timedelta(seconds=WAIT_S)
    with ThreadPoolExecutor(2) as pool:

        def together(do: Callable[[HostStaged, int], Any]) -> list[Any]:
            def member(rank: int) -> Any:
                if rank not in backends:
                    backends[rank] = HostStaged(dist.ProcessGroupGloo(store, rank, 2, patience))
                return do(backends[rank], rank)

            return [done.result(WAIT_S) for done in [pool.submit(member, rank) for rank in range(2)]]

        backends: dict[int, HostStaged] = {}
        yield together
        for backend in backends.values():
            backend.abort()


def test_rows_are_swapped(members: Any) -> None:
    def swap(backend: HostStaged, rank: int) -> list[int]:
        outgoing = torch.tensor([[10 * rank], [10 * rank + 1]], dtype=torch.uint8, device=DEVICE)
        incoming = torch.zeros_like(outgoing)
        work = backend.alltoall_base(incoming, outgoing, [], [], dist.AllToAllOptions())
        outgoing.zero_()  # it has been taken
        work.wait()
        return [int(each) for each in incoming.flatten()]

    assert members(swap) == [[0, 10], [1, 11]]


def test_messages_arrive_by_their_tags_and_may_change_once_they_are_sent(members: Any) -> None:
    def talk(backend: HostStaged, rank: int) -> list[float]:
        if rank == 0:
            message = torch.arange(4.0, device=DEVICE)
            works = [backend.send([message], 1, 7)]
            message += 1
            works.append(backend.send([message], 1, 8))
            for work in works:
                work.wait()
            return []
        second, first = (torch.zeros(4, device=DEVICE) for _ in range(2))
        works = [backend.recv([second], 0, 8), backend.recv([first], 0, 7)]
        for work in works:
            work.wait()
        return [*first.tolist(), *second.tolist()]

    assert members(talk)[1] == [0, 1, 2, 3, 1, 2, 3, 4]


@pytest.mark.parametrize(("gpus", "shared"), [(("a", "b"), False), (("a", "a"), True)])
def test_members_find_out_whether_they_share_a_gpu(gpus: tuple[str, str], shared: bool) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(share_a_gpu, store, rank, 2, gpu) for rank, gpu in enumerate(gpus)]
        assert [each.result(WAIT_S) for each in asked] == [shared, shared]
