"""What the links between hosts are made of: addresses, and large values that cannot be lent."""

import numpy as np
import pytest

from skipper.control.cluster.hosts.protocol import answer, read_answer, refusal, request
from skipper.control.model.errors import HostError, HostMismatchError
from skipper.control.wire import addresses
from skipper.control.wire.addresses import device_of
from skipper.control.wire.bulk import BULK_NBYTES
from skipper.control.wire.frames import Decoder, encode
from skipper.control.wire.messages import Call, Reply
from skipper.control.wire.payload import in_full, pack_arguments, unpack
from tests.sameness import assert_same


def test_large_values_that_go_in_full_arrive_as_they_were() -> None:
    plain, array = bytes(range(256)) * (BULK_NBYTES // 128), np.arange(BULK_NBYTES, dtype=np.int64)
    payload = in_full(pack_arguments((plain, array), {"again": plain}))
    there = Decoder()
    (message,) = [
        message for piece in encode([Call(1, method="echo", payload=payload)]) for message in there.feed(piece)
    ]
    (first, second), keywords = unpack(message.payload)
    assert type(first) is bytes
    assert_same(first, plain)
    assert_same(keywords["again"], plain)
    assert_same(second.tobytes(), array.tobytes())
    second[0] = 7  # memory of its own


@pytest.mark.parametrize(
    ("address", "host", "port", "target"),
    [
        ("10.0.0.2:7000", "10.0.0.2", 7000, "ipv4:10.0.0.2:7000"),
        ("10.0.0.2:0", "10.0.0.2", 0, "ipv4:10.0.0.2:0"),
        ("[fd00::2]:7000", "fd00::2", 7000, "ipv6:[fd00::2]:7000"),
        (addresses.within_host("job-1"), "", 0, addresses.within_host("job-1")),
    ],
)
def test_an_address_says_host_and_port(address: str, host: str, port: int, target: str) -> None:
    assert (addresses.host_of(address), addresses.port_of(address), addresses.target(address)) == (host, port, target)
    if host:
        assert addresses.at(host, port) == address


@pytest.mark.parametrize(
    "text", ["", "tcp://", "tcp://host", "tcp://10.0.0.1:x", "http://10.0.0.1:80", "10.0.0.1:70000"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://HOST:PORT|cannot be resolved"):
        addresses.parse(text)


def test_names_are_looked_up() -> None:
    assert addresses.parse("tcp://localhost:7000") in {("127.0.0.1", 7000), ("::1", 7000)}
    assert addresses.parse("[::1]:5") == ("::1", 5)


def test_the_device_of_an_address_is_found() -> None:
    assert device_of("127.0.0.1") == device_of("127.0.0.7") == "lo"
    assert device_of("192.0.2.1") is None
    assert device_of("::1") is None


def test_agents_and_scripts_understand_each_other_and_nothing_else() -> None:
    assert request("attach", {"a": 1}, 7).reply_to == 7
    assert read_answer(answer(7, {"a": 1})) == {"a": 1}
    with pytest.raises(HostMismatchError, match="other"):
        read_answer(refusal(7, HostMismatchError("other")))
    for nonsense in (b"", b"\xff", b"[1]"):
        with pytest.raises(HostError, match="another version of the protocol"):
            read_answer(Reply(7, payload=(nonsense,)))
