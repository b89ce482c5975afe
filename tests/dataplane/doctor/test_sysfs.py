from pathlib import Path

import pytest

from skipper.dataplane.doctor.sysfs import Interface, interfaces, mellanox_adapters, rdma_ports

SAMPLES = Path(__file__).parent / "doctor_samples"


@pytest.fixture
def laid_out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder like /sys, from a sample."""
    for line in (SAMPLES / f"{request.param}.txt").read_text().splitlines():
        if not line.startswith("#"):
            path, _, content = line.partition(" = ")
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content + "\n")
    return tmp_path


@pytest.mark.parametrize("laid_out", ["soft_roce"], indirect=True)
def test_a_soft_roce_device_is_told_with_its_addresses_and_as_software(laid_out: Path) -> None:
    (port,) = rdma_ports(laid_out)
    assert (port.device, port.number, port.state, port.link) == ("rxe0", 1, "ACTIVE", "Ethernet")
    assert (port.gbit_per_s, port.software) == (2.5, True)
    assert [(gid.index, gid.gid, gid.kind, gid.interface) for gid in port.gids] == [
        (0, "fe80::d843:7bff:fefe:75e3", "RoCE v2", "rdma0"),
        (1, "10.77.0.1", "RoCE v2", "rdma0"),
    ]
    assert interfaces(laid_out) == [
        Interface("ea", "up", 10.0, 4200, software=True),
        Interface("rdma0", "unknown", None, 4200, software=True),
    ]


@pytest.mark.parametrize("laid_out", ["infiniband"], indirect=True)
def test_an_adapter_has_a_rate_and_a_port_without_a_cable_is_down(laid_out: Path) -> None:
    up, down = rdma_ports(laid_out)
    assert (up.device, up.state, up.link, up.gbit_per_s, up.software) == ("mlx5_0", "ACTIVE", "InfiniBand", 200, False)
    assert (down.device, down.state, down.gids) == ("mlx5_1", "DOWN", ())
    assert mellanox_adapters(laid_out) == 1


@pytest.mark.parametrize("laid_out", ["infiniband"], indirect=True)
def test_a_driver_that_states_no_speed_gives_none(laid_out: Path) -> None:
    assert interfaces(laid_out) == [
        Interface("eth0", "up", None, 1400, software=False),
        Interface("ib0", "up", 200.0, 2044, software=False),
    ]


def test_a_kernel_without_rdma_shows_nothing(tmp_path: Path) -> None:
    assert rdma_ports(tmp_path) == []
    assert interfaces(tmp_path) == []
    assert mellanox_adapters(tmp_path) == 0


def test_this_machine_has_a_loopback() -> None:
    assert any(item.name == "lo" and item.software for item in interfaces())
