"""What `configure(verbs=...)` takes, and what it refuses. Needs no RDMA device."""

from typing import Any

import pytest

from skipper.dataplane.config import Config, checked
from skipper.dataplane.errors import ConfigurationError


def configured(options: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("backend", "copy_threads", "export", "ucx", "ucx_library"))
    return dict(checked(Config(), **nothing, verbs=options).verbs)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("mlx5_0", "mlx5_0"),
        ("mlx5_0:2", "mlx5_0:2"),
        ("all", "all"),
        (["mlx5_0", "mlx5_1:2"], ("mlx5_0", "mlx5_1:2")),
        (("rocep1s0",), ("rocep1s0",)),
        (["mlx5_0:1", "mlx5_0:2"], ("mlx5_0:1", "mlx5_0:2")),
    ],
)
def test_one_port_or_several_can_be_named(given: Any, kept: Any) -> None:
    assert configured({"device": given}) == {"device": kept}


def test_other_options_are_kept_as_they_are() -> None:
    options = {"port": 1, "gid_index": 3, "mtu": 4096, "timeout": 14, "retry_cnt": 0, "depth": 64, "rdma_cm": True}
    assert configured({**options, "listen": "[fd00::1]:0"}) == {**options, "listen": "[fd00::1]:0"}


@pytest.mark.parametrize(
    "options",
    [
        5,
        {"colour": 1},
        {"device": ""},
        {"device": "a b"},
        {"device": "mlx5_0:0"},
        {"device": []},
        {"device": ["mlx5_0", "mlx5_0"]},
        {"device": ["mlx5_0", 1]},
        {"device": ["mlx5_0", "all"]},
        {"device": [f"mlx5_{n}" for n in range(9)]},
        {"listen": "0.0.0.0:1"},
        {"listen": 1},
        {"retry_cnt": 7},
        {"mtu": 9000},
        {"depth": 8},
        {"gid_index": True},
        {"rdma_cm": 1},
    ],
)
def test_what_does_not_exist_is_refused(options: Any) -> None:
    with pytest.raises(ConfigurationError):
        configured(options)
