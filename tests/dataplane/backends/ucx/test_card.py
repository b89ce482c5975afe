"""What UCX has packed arrives whole or is refused: it is told no lengths."""

import numpy as np
import pytest

from skipper.dataplane import DescriptorError, RDMABuffer
from skipper.dataplane.backends.ucx import card as ucx_card
from skipper.dataplane.handle import UCX
from tests.handles import parsed

PARTS = (b"a packed key", b"", b"an address")


def test_what_is_packed_is_unpacked() -> None:
    assert ucx_card.unpack_parts(ucx_card.pack_parts(*PARTS), 3) == list(PARTS)


def test_what_is_cut_short_damaged_or_followed_by_more_is_refused() -> None:
    packed = ucx_card.pack_parts(*PARTS)
    for at in range(len(packed)):
        altered = bytearray(packed)
        altered[at] ^= 1
        for wrong in (packed[:at], bytes(altered)):
            with pytest.raises(DescriptorError):
                ucx_card.unpack_parts(wrong, 3)
    for count in (2, 4):
        with pytest.raises(DescriptorError):
            ucx_card.unpack_parts(packed, count)


def test_the_keys_of_this_ucx_are_whole_and_their_beginnings_are_not() -> None:
    handle, _, _ = parsed(RDMABuffer(np.zeros(10)).serialize())
    (key,) = ucx_card.unpack_parts(handle.sections[UCX], 1)
    ucx_card.require_key(key)
    for end in range(9):
        with pytest.raises(DescriptorError):
            ucx_card.require_key(key[:end])
    with pytest.raises(DescriptorError):
        ucx_card.require_key(b"\x03" + bytes(8) + b"\x02ab" + b"\x05abcd")
