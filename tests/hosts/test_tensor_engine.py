"""Tensors of one script on several machines: what ranks of different hosts reduce, move and lose."""

import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch

from skipper import tensor_engine
from skipper.control import HostMesh, ProcMesh, SupervisionError
from skipper.tensor_engine import (
    EngineClosedError,
    RemoteError,
    RespawnedError,
    fetch_shard,
    inspect,
    process_group,
    reduce_,
    rejoin,
    remote,
    restore,
    to_mesh,
)
from tests.control.conftest import PATIENCE_S, Failures, wait_until
from tests.hosts import llama
from tests.hosts.conftest import serve
from tests.hosts.netns import Machine, Network
from tests.tensor_engine.members import members_of
from tests.tensor_engine.worker.test_gloo_port import HAMMER, STRANGER, listening, swap

HEARTBEAT_S = 3.0
LISTENS = "0A"  # a state in /proc/net/tcp


@pytest.fixture(scope="module", autouse=True)
def end_the_engine() -> Iterator[None]:
    yield
    tensor_engine.shutdown()


def workers_on(hosts: HostMesh, count: int, gpus: int = 2) -> ProcMesh:
    """Workers on the first machines, each with one thread."""
    first = hosts.reattach().slice(hosts=slice(0, count))
    return first.spawn_procs({"gpus": gpus}, env={"OMP_NUM_THREADS": "1"})


@pytest.fixture
def procs(hosts: HostMesh) -> Iterator[ProcMesh]:
    """Two on each of two machines."""
    mesh = workers_on(hosts, 2)
    yield mesh
    mesh.stop().get(PATIENCE_S)


def at(tensor: torch.Tensor, host: int, gpu: int) -> torch.Tensor:
    return inspect(tensor, hosts=host, gpus=gpu, timeout=2 * PATIENCE_S)


def test_ranks_of_several_machines_reduce_and_exchange(procs: ProcMesh) -> None:
    with procs.activate():
        rank = procs.rank_tensor("hosts") * 2 + procs.rank_tensor("gpus")
        x = torch.arange(4.0) + 10 * rank
        total, across, within = (x.reduce(axes) for axes in (("hosts", "gpus"), "hosts", "gpus"))
        swapped = x.all_to_all(("hosts", "gpus"))
        large = torch.full((1 << 18,), 1.0) * (rank + 1)  # 1 MiB: within a host by shared memory
        sums = large.reduce(("hosts", "gpus"))
        product = compiled(x)
    assert at(total, 1, 1).tolist() == [60, 64, 68, 72]
    assert at(across, 1, 0).tolist() == [20, 22, 24, 26]
    assert at(within, 1, 0).tolist() == [50, 52, 54, 56]
    assert at(swapped, 1, 0).tolist() == [2, 12, 22, 32]
    assert at(sums, 0, 1).unique().tolist() == [10]
    assert at(product, 1, 1).tolist() == [120, 128, 136, 144]


@tensor_engine.compile
def compiled(x: torch.Tensor) -> torch.Tensor:
    return x.reduce(("hosts", "gpus")) * 2  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("numel", [3, 1 << 20])
def test_tensors_move_between_machines(procs: ProcMesh, numel: int) -> None:
    first, second = procs.slice(hosts=0), procs.slice(hosts=1, gpus=0)
    with first.activate():
        x = torch.arange(float(numel)) * (first.rank_tensor("gpus") + 1)
    moved = x.slice_mesh(gpus=1).to_mesh(second) + to_mesh(torch.ones(()), second)
    assert torch.equal(inspect(moved, timeout=2 * PATIENCE_S), torch.arange(float(numel)) * 2 + 1)
    for turn in range(5):  # blocks are used again
        there = (x * turn).slice_mesh(gpus=0).to_mesh(procs)
    assert torch.equal(at(there, 1, 1), torch.arange(float(numel)) * 4)


def total_by_torch(x: torch.Tensor, group: object) -> torch.Tensor:
    torch.distributed.all_reduce(x, group=group)  # type: ignore[arg-type]
    return x


def test_functions_on_the_workers_get_process_groups_of_several_machines(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.ones(3) * (procs.rank_tensor("hosts") + 1)
        result = remote(total_by_torch, propagate=lambda x, group: x)(x, process_group(procs, "hosts"))
    assert at(result, 0, 1).tolist() == [3, 3, 3]


def test_a_model_learns_on_several_machines_what_it_learns_on_one(procs: ProcMesh) -> None:
    torch.manual_seed(0)
    samples, wanted = torch.randn(16, 6), torch.randn(16, 3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    there = procs.place(model)

    def trained(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
        losses = []
        for _ in range(4):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                if isinstance(parameter.grad, tensor_engine.Tensor):
                    reduce_(parameter.grad, ("hosts", "gpus"), "avg")
            optimizer.step()
            losses.append(loss.detach())
        return losses

    alone = trained(model, samples, wanted)
    with procs.activate():
        mine = (procs.rank_tensor("hosts") * 2 + procs.rank_tensor("gpus")).view(1)
        x, y = (procs.place(each.view(4, 4, -1)).index_select(0, mine).squeeze(0) for each in (samples, wanted))
        losses = [loss.reduce(("hosts", "gpus"), "avg") for loss in trained(there, x, y)]  # type: ignore[attr-defined]
    for one, several in zip(alone, losses, strict=True):
        torch.testing.assert_close(at(several, 1, 0), one)


def test_a_llama_in_data_tensor_and_pipeline_parallel_learns_what_it_learns_in_one_process(hosts: HostMesh) -> None:
    procs = workers_on(hosts, 4)
    try:
        layers, texts = llama.made(2, seed=1), llama.batches(4)
        pipeline = llama.Pipeline(layers, halves(procs))
        losses = [fetch_shard(pipeline.step(*text), hosts=1, gpus=1) for text in texts]
        found = [loss.get(2 * PATIENCE_S).item() for loss in losses]
        assert found == pytest.approx(llama.trained_alone(layers, texts), rel=1e-4)
        assert found[-1] < found[0] + 1
    finally:
        procs.stop().get(PATIENCE_S)


def test_training_goes_on_with_the_machine_that_was_killed_in_a_step(
    net: Network, hosts: HostMesh, secret_file: Path, failures: Failures
) -> None:
    texts, lost = llama.batches(6), net.machines[3]
    before = workers_on(hosts, 4, gpus=1)
    pipeline = llama.Pipeline(llama.made(2, seed=2), halves(before))
    for text in texts[:2]:
        pipeline.step(*text)
    kept = [stage.whole() for stage in (pipeline.first, pipeline.last)]
    loss = pipeline.step(*texts[2])
    lost.clear()
    with pytest.raises((RemoteError, SupervisionError, EngineClosedError), match=r"is gone|CommunicationError"):
        inspect(pipeline.step(*texts[3]), hosts=0, timeout=PATIENCE_S)
    with pytest.raises((RemoteError, SupervisionError, EngineClosedError), match=r"is gone|CommunicationError"):
        inspect(loss, hosts=1, timeout=PATIENCE_S)  # it was there
    assert failures.wait().rank == {"hosts": 3, "gpus": 0}
    before.stop().get(PATIENCE_S)

    serve(lost, "--insecure", "--secret-file", str(secret_file))
    after = workers_on(hosts, 4, gpus=1)
    again = llama.Pipeline(kept, halves(after))
    found = [inspect(again.step(*text), hosts=1, timeout=2 * PATIENCE_S).item() for text in texts[2:]]
    assert found == pytest.approx(llama.trained_alone(kept, texts[2:]), rel=1e-4)
    after.stop().get(PATIENCE_S)


def part_of(batch: torch.Tensor, procs: ProcMesh) -> torch.Tensor:
    """The part of a batch that each of the ranks works on."""
    with procs.activate():
        mine = (procs.rank_tensor("hosts") * procs.extent["gpus"] + procs.rank_tensor("gpus")).view(1)
        return procs.place(batch.view(procs.size, -1, batch.shape[-1])).index_select(0, mine).squeeze(0)


def test_a_machine_that_was_killed_in_a_step_rejoins_and_training_goes_on_with_the_same_tensors(
    net: Network, hosts: HostMesh, secret_file: Path, failures: Failures
) -> None:
    both = ("hosts", "gpus")
    torch.manual_seed(4)
    batches = [(torch.randn(12, 6), torch.randn(12, 3)) for _ in range(5)]
    model = torch.nn.Sequential(torch.nn.Linear(6, 400), torch.nn.Tanh(), torch.nn.Linear(400, 3))
    procs = workers_on(hosts, 3)
    there = procs.place(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, fused=True) for each in (model, there)]
    losses, lost = [], net.machines[2]
    with procs.activate():
        own = torch.ones(1 << 18) * procs.rank_tensor("hosts")
        is_on_the_last = procs.rank_tensor("hosts")
    for attempt in range(6):
        x, y = (part_of(each, procs) for each in batches[len(losses)])
        optimizers[1].zero_grad()
        loss = (there(x) - y).square().mean()
        loss.backward()
        if attempt == 2:
            remote(stay_away)(is_on_the_last)  # so that the others are in the middle of a reduction when it dies
        total = loss.detach().reduce(both, "avg")
        grads = [parameter.grad.reduce_(both, "avg") for parameter in there.parameters()]  # type: ignore[union-attr]
        committed = fetch_shard(total + 0 * sum(grad.sum() for grad in grads), strict=True)
        if attempt == 2:
            lost.clear()
            with pytest.raises((RemoteError, SupervisionError, EngineClosedError)):
                committed.get(2 * PATIENCE_S)
            serve(lost, "--insecure", "--secret-file", str(secret_file))
            back = hosts.reattach().slice(hosts=slice(2, 3)).spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
            procs = procs.with_successors({4: back.slice(gpus=0), 5: back.slice(gpus=1)})
            assert rejoin(procs) == (4, 5)
            restore([there, optimizers[1]], "hosts")
            continue
        losses.append(committed.get(2 * PATIENCE_S).item())
        optimizers[1].step()
    alone = []
    for x, y in batches:
        optimizers[0].zero_grad()
        (loss := (model(x) - y).square().mean()).backward()
        optimizers[0].step()
        alone.append(loss.item())
    assert losses == pytest.approx(alone, rel=1e-4)
    for one, several in zip(model.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(at(several.detach(), 2, 1), one.detach(), rtol=1e-4, atol=1e-5)
    assert at(own, 1, 0)[0] == 1
    with pytest.raises(RespawnedError, match="rank 5"):
        at(own, 2, 1)
    assert {failure.rank["hosts"] for failure in failures} == {2}
    procs.stop().get(PATIENCE_S)


def halves(procs: ProcMesh) -> list[ProcMesh]:
    """The stages of a pipeline on four machines."""
    return [procs.slice(hosts=slice(0, 2)), procs.slice(hosts=slice(2, 4))]


def stay_away(host: torch.Tensor) -> None:
    """Have those of the third machine come too late."""
    threading.Event().wait(2 * PATIENCE_S if host == 2 else 0)


def test_ranks_that_wait_for_a_machine_that_is_cut_off_are_told_within_the_bound(
    net: Network, hosts: HostMesh, failures: Failures
) -> None:
    procs = workers_on(hosts, 3, gpus=1)
    try:
        with procs.activate():
            x = torch.ones(1 << 20) * (procs.rank_tensor("hosts") + 1)
            assert inspect(x.reduce("hosts"), hosts=1, timeout=2 * PATIENCE_S)[0] == 6
            remote(stay_away)(procs.rank_tensor("hosts"))
            total = x.reduce("hosts")
            waiting = fetch_shard(total, hosts=0)
            net.machines[2].pull()
        with pytest.raises(RemoteError, match="CommunicationError"):
            waiting.get(PATIENCE_S)
        assert failures.wait().rank == {"hosts": 2, "gpus": 0}
        left = procs.slice(hosts=slice(0, 2))
        with left.activate():
            assert inspect((torch.ones(2) * 2).reduce("hosts"), hosts=1, timeout=PATIENCE_S).tolist() == [4, 4]
    finally:
        net.machines[2].plug()
        procs.stop().get(PATIENCE_S)
    wait_until(lambda: len(hosts.reattach().names) == 4, "the machine is back")


def ports_of(machine: Machine) -> set[tuple[str, int]]:
    """Where the processes of a machine listen."""
    lines = Path(f"/proc/{machine.running()[-1]}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    words = [line.split() for line in lines]
    places = [word[1].split(":") for word in words if word[3] == LISTENS]
    return {(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in places}


def tell_new_ports(machines: list[Machine], hammers: list[Popen[str]], is_over: threading.Event) -> None:
    """Say at which ports these machines begin to listen, sooner than a stranger could know."""
    told = set().union(*map(ports_of, machines))
    while not is_over.is_set():
        for address, port in set().union(*map(ports_of, machines)) - told:
            told.add((address, port))
            for hammer in hammers:
                assert hammer.stdin is not None
                hammer.stdin.write(f"{address} {port}\n")
                hammer.stdin.flush()


def test_another_user_and_another_machine_that_try_every_port_get_nothing_and_disturb_no_group(
    net: Network, procs: ProcMesh
) -> None:
    members = members_of(procs)
    assert members.run(swap, stream="first") == [[1, 2, 3, 4]] * 4
    before = members.run(listening)
    command = [sys.executable, "-S", str(HAMMER), str(STRANGER)]
    is_over = threading.Event()
    hammers = [net.machines[number].start(command, stdin=PIPE, stdout=PIPE, cwd="/") for number in (1, 3)]
    teller = threading.Thread(target=tell_new_ports, args=(net.machines[:2], hammers, is_over))
    teller.start()
    try:
        for number in range(6):
            assert members.run(swap, stream=f"beside strangers {number}") == [[1, 2, 3, 4]] * 4
    finally:
        is_over.set()
        teller.join()
    for hammer in hammers:
        tried, heard = map(int, hammer.communicate(timeout=PATIENCE_S)[0].split())
        assert tried > 0
        assert heard == 0
    assert members.run(listening) == before
