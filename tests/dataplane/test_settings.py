"""What a process says of its backends, and how it is told which to use."""

import os

import pytest

from skipper import dataplane
from skipper.dataplane import ConfigurationError, process
from skipper.dataplane.config import Config
from tests.dataplane.scripts import run


def test_every_backend_says_whether_it_is_usable_and_why() -> None:
    statuses = {status.name: status for status in dataplane.backends()}
    assert set(statuses) == {"local", "shm", "cuda_ipc", "ucx", "verbs"}
    assert statuses["local"].usable
    assert statuses["shm"].usable
    assert statuses["ucx"].usable
    assert "UCX 1." in statuses["ucx"].reason
    assert all(status.reason for status in statuses.values())


def test_the_rdma_backend_is_the_one_for_ordinary_memory() -> None:
    assert dataplane.get_rdma_backend() in ("ucx", "verbs")
    assert dataplane.is_ibverbs_available() == (
        os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband"))
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": "carrier-pigeon"},
        {"copy_threads": 0},
        {"copy_threads": 1.5},
        {"export": "some"},
        {"ucx": ["TLS"]},
        {"ucx": {"not a name": "x"}},
        {"ucx": {"TLS": None}},
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_and_changes_nothing(wrong: dict[str, object]) -> None:
    before = process.current().config
    with pytest.raises(ConfigurationError):
        dataplane.configure(**wrong)  # type: ignore[arg-type]
    assert process.current().config == before


def test_settings_of_ucx_come_before_its_first_use() -> None:
    run(
        "import numpy; from skipper import dataplane\n"
        "dataplane.configure(ucx={'UCX_TLS': 'tcp,self'})\n"
        "dataplane.configure(ucx={'TLS': 'tcp,self', 'net_devices': 'lo'})\n"
        "dataplane.RDMABuffer(numpy.zeros(9)).serialize()\n"
        "dataplane.configure(ucx={'TLS': 'tcp,self', 'NET_DEVICES': 'lo'}, backend='ucx')\n"
        "try: dataplane.configure(ucx={'TLS': 'all'})\n"
        "except dataplane.ConfigurationError as error: assert 'runs already' in str(error)\n"
        "else: raise SystemExit('accepted')\n"
    )


def test_an_option_that_ucx_does_not_take_is_a_typed_error() -> None:
    run(
        "import numpy; from skipper import dataplane\n"
        "dataplane.configure(ucx={'TLS': 'no_such_transport'})\n"
        "try: dataplane.RDMABuffer(numpy.zeros(9)).serialize()\n"
        "except dataplane.BackendUnavailableError as error: assert 'no_such_transport' in str(error), error\n"
        "else: raise SystemExit('accepted')\n"
    )


def test_a_library_that_is_not_there_is_a_typed_error() -> None:
    run(
        "import numpy; from skipper import dataplane\n"
        "dataplane.configure(ucx_library='/nowhere/libucp.so.0')\n"
        "ucx = next(s for s in dataplane.backends() if s.name == 'ucx')\n"
        "assert not ucx.usable and '/nowhere' in ucx.reason\n"
        "try: dataplane.RDMABuffer(numpy.zeros(9)).serialize()\n"
        "except dataplane.BackendUnavailableError as error: assert '/nowhere' in str(error)\n"
        "else: raise SystemExit('accepted')\n"
    )


def test_private_memory_cannot_be_exported_for_shared_memory_only() -> None:
    run(
        "import numpy; from skipper import dataplane\n"
        "dataplane.configure(backend='shm')\n"
        "try: dataplane.RDMABuffer(numpy.zeros(9)).serialize()\n"
        "except dataplane.BackendUnavailableError as error: assert 'dataplane.empty' in str(error)\n"
        "else: raise SystemExit('accepted')\n"
    )


@pytest.mark.parametrize(
    "how",
    ["dataplane.configure(export='all')", "os.environ['SKIPPER_DATA_PLANE_HOST'] = '127.0.0.1'  # hosts are attached"],
)
def test_export_all_makes_shared_memory_reachable_by_ucx_too(how: str) -> None:
    raw = run(
        "import os; from skipper import dataplane\n"
        "buffer = dataplane.RDMABuffer(dataplane.empty_array(9))\n"
        "few = len(buffer.serialize())\n"
        f"{how}\n"
        "assert len(buffer.serialize()) > few\n"
        "print(buffer.serialize().hex())\n"
    )
    buffer = dataplane.RDMABuffer.deserialize(bytes.fromhex(raw))
    assert buffer.backend == "shm"
    dataplane.configure(backend="ucx")
    try:
        assert buffer.backend == "ucx"
    finally:
        dataplane.configure(backend="auto")


def test_between_hosts_verbs_come_before_a_ucx_without_rdma() -> None:
    assert Config().far_order == ("shm", "verbs", "ucx")
    assert Config(ucx_library="/usr/lib/libucp.so.0").far_order == Config().order == ("shm", "cuda_ipc", "ucx", "verbs")
    assert Config(backend="ucx").far_order == ("ucx",)
