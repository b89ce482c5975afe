"""Handles that were not made by their owner as they are: refused before any of it is used, whatever the backend."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from skipper.dataplane import BufferDroppedError, DataplaneError, DescriptorError, RDMABuffer
from skipper.dataplane import handle as handles
from skipper.dataplane.keys import Keys
from skipper.dataplane.regions import MemoryKind
from tests.conformance.conftest import Case
from tests.conformance.test_transfers import handle_to, pattern
from tests.handles import parsed, proved_handle
from tests.sameness import assert_same

Owner = Any
CONTENT = pattern(3000)


def resealed(raw: bytes, **changes: Any) -> bytes:
    """A handle with other numbers in its body, and the proof that it had."""
    handle, offset, nbytes = parsed(raw)
    _, sealed = handles.split(raw)
    body = handle.body(offset, nbytes)
    offset, nbytes = changes.pop("offset", offset), changes.pop("nbytes", nbytes)
    other = dataclasses.replace(handle, **changes)
    return handles.join(handle.card.encoded, other.body(offset, nbytes) + sealed[len(body) :])


@pytest.mark.parametrize("field", ["slot", "epoch", "base", "total", "device", "offset"])
def test_a_handle_with_another_number_in_it_is_refused(owner: Owner, field: str) -> None:
    _, raw = owner("make", CONTENT)
    value = 8 if field == "offset" else getattr(parsed(raw)[0], field) + 8
    changes = {field: value, "nbytes": len(CONTENT) - 8}
    with pytest.raises(DescriptorError, match="altered"):
        RDMABuffer.deserialize(resealed(raw, **changes))


def test_a_handle_with_other_rights_or_of_other_memory_is_refused(owner: Owner) -> None:
    name, raw = owner("make", CONTENT, False)
    for changes in ({"writable": True}, {"kind": MemoryKind.CUDA}, {"sections": {}}):
        with pytest.raises(DescriptorError, match="altered"):
            RDMABuffer.deserialize(resealed(raw, **changes))
    assert_same(owner("content", name), CONTENT)


def test_no_byte_of_a_handle_can_be_changed_or_left_out(owner: Owner) -> None:
    _, raw = owner("make", CONTENT)
    for at in range(len(raw)):
        altered = bytearray(raw)
        altered[at] ^= 1
        with pytest.raises(DescriptorError):
            RDMABuffer.deserialize(altered)
        with pytest.raises(DescriptorError):
            RDMABuffer.deserialize(raw[:at])


def test_a_handle_under_the_key_of_somebody_else_is_refused_and_says_what_to_do(owner: Owner) -> None:
    _, raw = owner("make", CONTENT)
    handle, offset, nbytes = parsed(raw)
    body = Keys(b"of somebody else").seal(handle.card.encoded, handle.body(offset, nbytes))
    with pytest.raises(DescriptorError, match=r"dataplane\.configure\(secret="):
        RDMABuffer.deserialize(handles.join(handle.card.encoded, body))


def test_the_proof_of_one_handle_is_none_for_another(owner: Owner) -> None:
    raws = [owner("make", CONTENT)[1] for _ in range(2)]
    (handle, offset, nbytes), (_, sealed) = parsed(raws[0]), handles.split(raws[1])
    body = handle.body(offset, nbytes)
    with pytest.raises(DescriptorError, match="altered"):
        RDMABuffer.deserialize(handles.join(handle.card.encoded, body + sealed[len(body) :]))


def test_a_handle_that_is_replayed_after_the_drop_reaches_nothing(owner: Owner) -> None:
    name, raw = owner("make", CONTENT)
    owner("drop", name)
    owner("churn", 3, len(CONTENT))
    later, _ = owner("make", CONTENT)
    replayed = RDMABuffer.deserialize(raw)
    with pytest.raises(BufferDroppedError):
        replayed.read_into(bytearray(len(CONTENT))).get()
    with pytest.raises(BufferDroppedError):
        replayed.write_from(bytes(len(CONTENT))).get()
    assert_same(owner("content", later), CONTENT)


def test_an_owner_does_not_believe_a_proved_handle_more_than_its_own_registration(case: Case, owner: Owner) -> None:
    """The peer that changed it knows the secret. Where the owner takes part, it decides."""
    if not (case.backend == "local" or "tcp" in case.id or "posix" in case.id):
        pytest.skip("one-sided: the owner takes no part")
    name, raw = owner("make", CONTENT, False)
    handle, _, nbytes = parsed(raw)
    page = 4096
    wrong = (
        {"base": handle.base - page},
        {"base": handle.base + page},
        {"total": nbytes + page},
        {"writable": True},
        {"slot": 100_000},
        {"epoch": handle.epoch + 1},
        {"base": 0},
        {"base": (1 << 63) - nbytes - 1},
    )
    for changes in wrong:
        other = dataclasses.replace(handle, **changes)
        buffer = RDMABuffer.deserialize(proved_handle(other, other.total - nbytes, nbytes))
        if "writable" not in changes or case.backend == "local":
            with pytest.raises(DataplaneError):
                buffer.read_into(np.empty(nbytes, np.uint8), timeout=20).get()
        if other.writable:
            with pytest.raises(DataplaneError):
                buffer.write_from(bytes(nbytes), timeout=20).get()
    assert_same(owner("content", name), CONTENT)


def test_a_dropped_registration_is_not_dropped_again_by_a_handle_that_claims_other_memory(
    case: Case, owner: Owner
) -> None:
    if case.remote:
        pytest.skip("only its owner can drop a buffer")
    _, raw = owner("make", CONTENT)
    handle, _, nbytes = parsed(raw)
    forged = RDMABuffer.deserialize(proved_handle(dataclasses.replace(handle, base=handle.base + 64), 0, nbytes))
    with pytest.raises(DescriptorError):
        forged.drop()
    RDMABuffer.deserialize(raw).read_into(bytearray(nbytes)).get()


def test_a_handle_whose_bytes_were_proved_after_they_were_damaged_ends_in_an_error(case: Case, owner: Owner) -> None:
    """What a buggy peer proves: keys and addresses that are cut short are not given to a library."""
    name, buffer = handle_to(owner, CONTENT)
    handle, _, nbytes = parsed(buffer.serialize())
    for number, section in handle.card.sections.items():
        for end in range(0, len(section), 5):
            card = handles.Card.make(handle.card.owner, handle.card.page_token, {number: section[:end]})
            cut = RDMABuffer.deserialize(proved_handle(dataclasses.replace(handle, card=card), 0, nbytes))
            if not case.remote:
                continue
            with pytest.raises(DataplaneError):
                RDMABuffer.deserialize(
                    proved_handle(_of_nobody_known(dataclasses.replace(handle, card=card)), 0, nbytes)
                ).read_into(bytearray(nbytes), timeout=20).get()
            assert cut.nbytes == nbytes
    for number, section in handle.sections.items():
        for end in range(0, len(section), 5):
            cut = RDMABuffer.deserialize(
                proved_handle(dataclasses.replace(handle, sections={number: section[:end]}), 0, nbytes)
            )
            if case.remote:
                with pytest.raises(DataplaneError):
                    cut.read_into(bytearray(nbytes), timeout=20).get()
    assert_same(owner("content", name), CONTENT)


def _of_nobody_known(handle: handles.Handle) -> handles.Handle:
    """Of an owner to whom there is no connection yet, so that the card is looked at."""
    owner = dataclasses.replace(handle.card.owner, token=handle.card.owner.token ^ 1)
    return dataclasses.replace(handle, card=handles.Card.make(owner, handle.card.page_token, handle.card.sections))
