import numpy as np
import pytest

from tests.sameness import assert_same


@pytest.mark.parametrize("wanted", [b"", b"abc", bytearray(1 << 20), np.arange(5)])
def test_the_same_bytes_pass_whatever_holds_them(wanted: bytes) -> None:
    assert_same(memoryview(bytes(wanted)), wanted)


def test_a_difference_is_told_by_its_place_and_in_one_line() -> None:
    found = np.zeros(1 << 20, np.uint8)
    found[1000:1003] = 7
    with pytest.raises(AssertionError) as failure:
        assert_same(found, bytes(1 << 20))
    assert "3 of 1048576 bytes are wrong, from 1000 to 1002: 07 07 07 00" in str(failure.value)
    assert len(str(failure.value)) < 200


def test_another_length_is_a_difference() -> None:
    with pytest.raises(AssertionError, match="2 bytes, not 3"):
        assert_same(b"ab", b"abc")
