import os
import threading
from collections.abc import Callable

import pytest

from skipper.control import ProcMesh, SupervisionError, this_host
from skipper.control.runtime.procs import binding
from skipper.control.runtime.procs.binding import CpuBinding
from skipper.control.runtime.procs.children import describe_exit
from skipper.control.runtime.procs.worker_config import EXIT_BINDING
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Failures, Output

CPUS = sorted(os.sched_getaffinity(0))
NODE = next(iter(sorted(int(path.name[4:]) for path in binding._NODES.glob("node[0-9]*"))), None)
needs_numa = pytest.mark.skipif(NODE is None, reason="the kernel shows no NUMA nodes")


def affinity() -> list[int]:
    """Of a thread that was started after the process was bound."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(sorted(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    return found


def test_processes_are_bound_as_they_are_told(own_procs: Callable[..., ProcMesh]) -> None:
    first, last = CPUS[0], CPUS[-1]
    procs = own_procs(
        {"gpus": 2}, proc_bind=[{"cpus": str(first)}, {"cpus": f"{first},{last}", "physcpubind": str(last)}]
    )
    echoes = procs.spawn("echoes", Echo)
    assert echoes.run.call(affinity).get(PATIENCE_S) == [[first], [last]]
    assert sorted(os.sched_getaffinity(0)) == CPUS  # this one is not


@needs_numa
def test_processes_are_bound_to_numa_nodes(own_procs: Callable[..., ProcMesh]) -> None:
    procs = own_procs(proc_bind=[{"cpunodebind": str(NODE), "membind": str(NODE)}])
    echo = procs.spawn("echo", Echo)
    assert set(echo.run.call_one(affinity).get(PATIENCE_S)) <= set(CPUS)
    assert echo.run.call_one(memory_policy).get(PATIENCE_S) == f"bind:{NODE}"


def memory_policy() -> str:
    """The policy that the kernel shows for the first mapping of this process."""
    with open("/proc/self/numa_maps", encoding="utf-8") as maps:
        return maps.readline().split()[1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cpu": "0"}, "unknown option 'cpu'; there are cpus, physcpubind, cpunodebind, membind"),
        ({"cpus": "all"}, "must be a list such as '0-3,8', not 'all'"),
        ({"cpus": "0-"}, "must be a list"),
        ({"cpus": "99999"}, "there are"),
        ({"cpus": str(CPUS[0]), "physcpubind": "99999"}, r"leaves the CPUs \[\]"),
        ({"membind": "99999"}, "no NUMA node 99999"),
        ({"cpunodebind": "99999"}, "no NUMA node 99999"),
    ],
)
def test_what_the_host_has_not_is_refused_before_anything_starts(options: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        this_host().spawn_procs(proc_bind=[options])


def test_there_is_one_binding_for_each_process() -> None:
    with pytest.raises(ValueError, match="describes 1 processes"):
        this_host().spawn_procs({"gpus": 2}, proc_bind=[{"cpus": "0"}])
    with pytest.raises(TypeError, match="must be a string"):
        this_host().spawn_procs(proc_bind=[{"cpus": 0}])  # type: ignore[dict-item]


def test_lists_of_numbers_are_read_as_taskset_and_numactl_do() -> None:
    assert binding._numbers("cpus", "0-2, 5,7-7") == (0, 1, 2, 5, 7)
    assert CpuBinding.of({}) == CpuBinding()


def test_a_process_that_cannot_be_bound_ends_with_the_reason(
    failures: Failures, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBinding, "of", staticmethod(lambda options: CpuBinding(cpus=(99999,))))
    echo = this_host().spawn_procs(proc_bind=[{}]).spawn("echo", Echo)
    with pytest.raises(SupervisionError, match="could not be bound"):
        echo.pid.call_one().get(PATIENCE_S)
    failures.wait()
    output.wait_for("Invalid argument", on_stderr=True)
    assert "proc_bind" in describe_exit(EXIT_BINDING)
