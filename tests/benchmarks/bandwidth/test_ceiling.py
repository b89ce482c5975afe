from pathlib import Path

import pytest

from skipper.benchmarks.bandwidth import ceiling
from skipper.benchmarks.bandwidth.ceiling import link, wire_ceiling
from skipper.benchmarks.bandwidth.messages import Wire
from skipper.dataplane.doctor.sysfs import Interface, RdmaPort

PORTS = [
    RdmaPort("mlx5_0", 1, "DOWN", "InfiniBand", 10.0, False, ()),
    RdmaPort("mlx5_1", 1, "ACTIVE", "InfiniBand", 400.0, False, ()),
    RdmaPort("mlx5_2", 1, "ACTIVE", "InfiniBand", 400.0, False, ()),
    RdmaPort("rxe0", 1, "ACTIVE", "Ethernet", 2.5, True, ()),
]
INTERFACES = [
    Interface("eth0", "up", 25.0, 1500, software=False),
    Interface("eth1", "up", None, 1500, software=False),
    Interface("lo", "unknown", None, 65536, software=True),
]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with adapters, since this one may have none."""
    monkeypatch.setattr(ceiling, "rdma_ports", lambda: PORTS)
    monkeypatch.setattr(ceiling, "interfaces", lambda: INTERFACES)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("backend", "devices", "gbit_per_s", "told"),
    [
        ("verbs", None, 400.0, "mlx5_1 port 1"),
        ("verbs", "mlx5_1,mlx5_2:1", 800.0, "mlx5_1 port 1, 400 Gb/s and mlx5_2 port 1"),
        ("verbs", "rxe0", None, "made of software"),
        ("ucx", "eth0", 25.0, "eth0, 25 Gb/s"),
        ("ucx", "eth1", None, "the driver of eth1 states no rate"),
        ("ucx", "mlx5_1:1", 400.0, "mlx5_1 port 1"),
        ("ucx", None, None, "lo has no wire"),
        ("ucx", "all", None, "names no single link"),
        ("shm", None, None, "no wire is crossed"),
    ],
)
def test_an_end_knows_its_link(backend: str, devices: str | None, gbit_per_s: float | None, told: str) -> None:
    found = link(backend, devices)
    assert found.gbit_per_s == gbit_per_s
    assert told in found.told


def test_the_environment_of_ucx_names_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    assert link("ucx", None).gbit_per_s == 25


def test_the_slower_end_is_the_ceiling() -> None:
    fast, slow, unknown = Wire(100.0, "fast"), Wire(25.0, "slow"), Wire(None, "not stated")
    assert wire_ceiling("ucx", fast, slow, one_host=False) == slow
    assert wire_ceiling("ucx", fast, unknown, one_host=False) == unknown
    assert wire_ceiling("ucx", fast, slow, one_host=True).gbit_per_s is None
    assert wire_ceiling("verbs", fast, fast, one_host=True) == fast


def test_the_machine_at_hand_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert Path("/sys/class/net/lo").exists()
    assert link("ucx", "lo").told == "lo has no wire behind it"
