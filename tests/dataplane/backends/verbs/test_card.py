"""What a handle says for verbs: numbers and addresses that cannot be are refused before anything is dialled."""

import dataclasses

import numpy as np
import pytest

from skipper.dataplane import DescriptorError, empty_array
from skipper.dataplane.backends.verbs.card import VerbsCard, pack_body, parse_section, remote_of
from skipper.dataplane.backends.verbs.device import Atomics
from skipper.dataplane.buffer import RDMABuffer
from skipper.dataplane.handle import VERBS, Card, Handle
from tests.handles import parsed

CONTACT = VerbsCard(bytes(16), 1 << 40, (7,), Atomics.DEVICE, "tcp:10.0.0.1:4791")


def handle(contact: VerbsCard, body: bytes) -> Handle:
    made, _, _ = parsed(RDMABuffer(empty_array(100, np.uint8)).serialize())
    card = Card.make(made.card.owner, made.card.page_token, {VERBS: contact.pack()})
    return dataclasses.replace(made, card=card, sections={VERBS: body})


@pytest.mark.parametrize(
    "address", ["tcp:10.0.0.1:4791", "tcp:some-host.example:1", "tcp:fe80::1%eth0:80", "unix:name"]
)
def test_a_contact_is_read_back(address: str) -> None:
    contact = dataclasses.replace(CONTACT, address=address)
    assert parse_section(contact.pack()) == contact


@pytest.mark.parametrize(
    "address",
    ["tcp:10.0.0.1:70000", "tcp:10.0.0.1:123456", f"tcp:{'a' * 300}:1", "tcp:a b:1", "tcp::1", "udp:a:1", "x"],
)
def test_an_address_that_no_socket_takes_is_refused(address: str) -> None:
    with pytest.raises(DescriptorError):
        parse_section(dataclasses.replace(CONTACT, address=address).pack())


def test_memory_and_pages_where_none_can_be_are_refused() -> None:
    with pytest.raises(DescriptorError):
        parse_section(dataclasses.replace(CONTACT, page=(1 << 63) - 8).pack())
    assert remote_of(handle(CONTACT, pack_body(1 << 41, (7,)))).address == 1 << 41
    with pytest.raises(DescriptorError):
        remote_of(handle(CONTACT, pack_body((1 << 63) - 50, (7,))))


@pytest.mark.parametrize("keys", [(), (7, 8)])
def test_a_body_with_keys_for_other_rails_is_refused(keys: tuple[int, ...]) -> None:
    with pytest.raises(DescriptorError):
        remote_of(handle(CONTACT, pack_body(1 << 41, keys)))
