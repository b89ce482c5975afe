"""Which RDMA ports are used, and by which address: read from a tree like that of /sys. Needs no RDMA device."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skipper.dataplane.backends.verbs import port as verbs_port
from skipper.dataplane.backends.verbs.port import MOST_PORTS, VerbsPort, find_ports
from skipper.dataplane.errors import BackendUnavailableError

EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:0211:22ff:fe33:4455"
IPV6 = "fd00:0000:0000:0000:0000:0000:0000:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a09:0001"

Add = Callable[..., Path]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Add:
    """Adds a port; `gids` are (address, type), a type of None is how an unused entry looks."""
    monkeypatch.setattr(verbs_port, "_SYS", tmp_path)

    def one(
        device: str,
        number: int = 1,
        state: str = "4: ACTIVE",
        layer: str = "Ethernet",
        gids: tuple[tuple[str, str | None], ...] = ((IPV4, "RoCE v2"),),
    ) -> Path:
        path = tmp_path / "class" / "infiniband" / device / "ports" / str(number)
        (path / "gids").mkdir(parents=True)
        (path / "gid_attrs" / "types").mkdir(parents=True)
        (path / "state").write_text(f"{state}\n")
        (path / "link_layer").write_text(f"{layer}\n")
        for index, (gid, kind) in enumerate(gids):
            (path / "gids" / str(index)).write_text(f"{gid}\n")
            if kind is not None:
                (path / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
        return path

    return one


def test_the_first_active_port_is_used_unless_told_otherwise(add: Add) -> None:
    add("mlx5_0", state="1: DOWN")
    add("mlx5_1", 1, state="2: INIT")
    add("mlx5_1", 2)
    add("mlx5_2")
    assert find_ports({}) == (VerbsPort("mlx5_1", 2, 0, True),)
    assert find_ports({"device": "mlx5_2"}) == (VerbsPort("mlx5_2", 1, 0, True),)
    assert find_ports({"port": 1}) == (VerbsPort("mlx5_2", 1, 0, True),)


def test_the_port_with_the_address_that_peers_connect_to_comes_before_the_first(add: Add) -> None:
    add("rxe0", gids=(("0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2"),))
    add("rxe1")
    assert find_ports({"listen": "10.9.0.1:0"}) == (VerbsPort("rxe1", 1, 0, True),)
    assert find_ports({"listen": "10.9.0.7:0"}) == (VerbsPort("rxe0", 1, 0, True),)
    assert find_ports({"listen": "10.9.0.1:0", "device": "rxe0"}) == (VerbsPort("rxe0", 1, 0, True),)


def test_several_ports_are_used_in_the_order_in_which_they_are_named(add: Add) -> None:
    add("mlx5_0", 1)
    add("mlx5_0", 2)
    add("mlx5_1")
    named = find_ports({"device": ("mlx5_1", "mlx5_0:2", "mlx5_0")})
    assert [str(port) for port in named] == ["mlx5_1 port 1", "mlx5_0 port 2", "mlx5_0 port 1"]
    assert [str(port) for port in find_ports({"device": "mlx5_0:2"})] == ["mlx5_0 port 2"]


def test_all_means_every_active_port_up_to_the_limit(add: Add) -> None:
    add("mlx5_0", state="1: DOWN")
    for number in range(1, MOST_PORTS + 3):
        add("mlx5_1", number)
    found = find_ports({"device": "all"})
    assert [port.number for port in found] == list(range(1, MOST_PORTS + 1))
    assert all(port.device == "mlx5_1" for port in found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "mlx5_0"}, "mlx5_0 port 1 is DOWN"),
        ({"device": ("mlx5_1", "mlx5_0")}, "mlx5_0 port 1 is DOWN"),
        ({"device": "mlx5_7"}, "no RDMA device mlx5_7 with port 1"),
        ({"device": ("mlx5_1", "mlx5_1:3")}, "no RDMA device mlx5_1 with port 3"),
    ],
)
def test_a_port_that_is_named_must_be_there_and_active(add: Add, options: dict[str, object], words: str) -> None:
    add("mlx5_0", state="1: DOWN")
    add("mlx5_1")
    with pytest.raises(BackendUnavailableError, match=words):
        find_ports(options)


def test_no_device_at_all_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs_port, "_SYS", tmp_path)
    with pytest.raises(BackendUnavailableError, match="no RDMA device"):
        find_ports({"device": "all"})


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        (((LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2")), 3),
        (((LINK_LOCAL, "RoCE v2"), (IPV6, "RoCE v2")), 1),
        (((LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2")), 1),
        (((EMPTY, None), (EMPTY, "RoCE v2"), (IPV6, "RoCE v2"), (IPV4, "RoCE v2")), 3),
        (((EMPTY, None),), 0),
    ],
)
def test_on_ethernet_the_best_address_is_chosen(add: Add, gids: tuple[tuple[str, str | None], ...], index: int) -> None:
    add("mlx5_0", gids=gids)
    assert find_ports({})[0].gid_index == index
    assert find_ports({"gid_index": 7})[0].gid_index == 7


def test_infiniband_needs_no_address(add: Add) -> None:
    add("mlx5_0", layer="InfiniBand", gids=((LINK_LOCAL, "IB/RoCE v1"), (IPV4, "RoCE v2")))
    assert find_ports({}) == (VerbsPort("mlx5_0", 1, 0, False),)


def test_a_port_tells_whether_it_is_active_now(add: Add) -> None:
    path = add("mlx5_0")
    (port,) = find_ports({})
    assert port.active
    (path / "state").write_text("1: DOWN\n")
    assert not port.active
    (path / "state").unlink()
    assert not port.active
