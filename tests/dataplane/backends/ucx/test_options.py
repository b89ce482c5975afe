"""What `configure(ucx=...)` takes, and what happens to what it does not."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from skipper.dataplane import RDMABuffer, TransferError
from skipper.dataplane.backends.ucx.card import Segments
from skipper.dataplane.backends.ucx.engine import find_library
from tests.conformance.owner import RemoteOwner
from tests.dataplane.scripts import run

START = "import os, sys, numpy as np; from skipper import dataplane\nbefore = dict(os.environ)\n"
REFUSED = (
    START
    + """
try: dataplane.configure(ucx={option!r})
except dataplane.ConfigurationError as error: print(error)
else: print('taken')
"""
)


def test_an_option_that_ucx_does_not_know_is_named_and_nothing_is_started() -> None:
    out = run(
        REFUSED.format(option={"NO_SUCH_OPTION": 1})
        + "import threading\nassert threading.active_count() == 1\n"
        + "assert dataplane.process.current().config.ucx == {}\n"
    )
    assert "NO_SUCH_OPTION" in out


def test_a_value_that_ucx_does_not_take_is_named() -> None:
    assert "RNDV_THRESH that can be 'soon'" in run(REFUSED.format(option={"RNDV_THRESH": "soon"}))


def test_options_are_taken_with_and_without_prefix_and_leave_the_environment_alone() -> None:
    out = run(
        START
        + "dataplane.configure(ucx={'UCX_TLS': 'tcp,self', 'tcp_put_enable': 'n', 'LOG_LEVEL': 'fatal'})\n"
        + "dataplane.RDMABuffer(np.zeros(9)).serialize()\n"
        + "assert dict(os.environ) == before\n"
        + "print(sorted(dataplane.process.current().config.ucx))\n"
    )
    assert out == "['LOG_LEVEL', 'TCP_PUT_ENABLE', 'TLS']\n"


def test_options_come_too_late_once_ucx_runs() -> None:
    out = run(
        START
        + "dataplane.RDMABuffer(np.zeros(9)).serialize()\n"
        + "try: dataplane.configure(ucx={'TLS': 'tcp,self'})\n"
        + "except dataplane.ConfigurationError as error: print(error)\n"
    )
    assert "before its first use" in out


def test_without_descriptors_ucx_is_refused_and_works_once_there_are_some() -> None:
    out = run(
        START
        + "import resource\n"
        + "dataplane.RDMABuffer(np.zeros(9))\n"
        + "_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        + "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 10, most))\n"
        + "buffer = dataplane.RDMABuffer(np.zeros(9))\n"
        + "try: buffer.serialize()\n"
        + "except dataplane.BackendUnavailableError as error: print(error)\n"
        + "resource.setrlimit(resource.RLIMIT_NOFILE, (1000, most))\n"
        + "buffer.serialize()\n"
    )
    assert "ulimit -n" in out


def test_pieces_that_would_end_their_receiver_are_not_sent_and_both_options_are_named() -> None:
    options = {"TLS": "tcp,self", "TCP_TX_SEG_SIZE": "64k", "TCP_RX_SEG_SIZE": "64k"}
    owner = RemoteOwner({"backend": "ucx", "ucx": options}, shared=False)
    try:
        name, raw = owner("make_filled", 300_000, 7)
        buffer = RDMABuffer.deserialize(raw)
        for attempt in (
            lambda: buffer.read_into(np.zeros(300_000, np.uint8)).get(),
            lambda: buffer.write_from(np.zeros(300_000, np.uint8)).get(),
            lambda: buffer.fetch_add(1).get(),
        ):
            with pytest.raises(TransferError, match="TCP_TX_SEG_SIZE is 262144 bytes here and TCP_RX_SEG_SIZE 65536 "):
                attempt()
        assert set(owner("content", name)) == {7}
    finally:
        owner.close()


@pytest.mark.parametrize(
    ("here", "there", "fit"),
    [
        ((64, 64), (64, 64), True),
        ((64, 128), (128, 64), True),
        ((128, 128), (64, 64), False),
        ((64, 64), (128, 128), False),
        ((128, 128), (0, 0), True),
    ],
)
def test_a_piece_must_not_be_larger_than_its_receiver_takes(
    here: tuple[int, int], there: tuple[int, int], fit: bool
) -> None:
    assert (Segments(*here).obstacle(Segments(*there)) is None) == fit


def test_sizes_are_read_as_ucx_reads_them_and_come_behind_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TCP_RX_SEG_SIZE", "1M")
    mine = Segments.of({"TCP_TX_SEG_SIZE": "256kb"})
    assert mine == Segments(1 << 18, 1 << 20)
    assert Segments.after(b"address" + mine.pack()) == mine
    assert Segments.after(b"the address of one that says nothing") == Segments(0, 0)
    monkeypatch.setenv("UCX_TCP_RX_SEG_SIZE", "auto")
    assert Segments.of({"TCP_TX_SEG_SIZE": "12"}) == Segments(12, 0)


def test_processes_without_a_common_transport_are_told_what_to_name() -> None:
    owner = RemoteOwner({"backend": "ucx", "ucx": {"TLS": "tcp,self"}}, shared=False)
    try:
        _, raw = owner("make", bytes(100))
        out = run(
            "from skipper import dataplane\n"
            f"buffer = dataplane.RDMABuffer.deserialize({raw!r})\n"
            "try: buffer.read_into(bytearray(100)).get()\n"
            "except dataplane.TransferError as error: print(error)\n"
        )
    finally:
        owner.close()
    assert "no transport of UCX in common" in out


def test_a_ucx_that_this_process_has_loaded_before_is_used_and_not_the_wheels_beside_it(tmp_path: Path) -> None:
    """As a torch that was built with MPI brings that of the system along."""
    wheels = Path(find_library(None))
    for name in ("libucs", "libucs_signal", "libuct", "libucp"):
        shutil.copy(wheels.parent / f"{name}.so.0", tmp_path)
    out = run(
        "import ctypes\n"
        + f"for name in ('libucs', 'libuct', 'libucp'): ctypes.CDLL(f'{tmp_path}/{{name}}.so.0')\n"
        + START
        + "dataplane.RDMABuffer(np.zeros(9)).serialize()\n"
        + "print(next(status.reason for status in dataplane.backends() if status.name == 'ucx'))\n"
    )
    assert str(tmp_path) in out
    assert "running" in out
