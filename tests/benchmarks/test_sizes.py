import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipper.benchmarks.errors import UsageError
from skipper.benchmarks.sizes import SWEEP, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("4K", 4096), ("4800K", 4_915_200), ("64M", 67_108_864), ("1G", 1 << 30), ("2t", 2 << 40)],
)
def test_sizes_are_powers_of_two(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@given(st.integers(1, 1 << 44))
def test_a_printed_size_reads_back_as_itself(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize(("nbytes", "text"), [(4_915_200, "4800K"), (1 << 30, "1G"), (1000, "1000"), (0, "0")])
def test_sizes_print_in_the_largest_exact_unit(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize("text", ["", "0", "0K", "-4K", "4KB", "4.5M", "K", "1e6", "²", "4 K", "9" * 16])
def test_what_is_no_size_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match="size"):
        parse_size(text)


def test_the_sweep_goes_from_4k_to_1g() -> None:
    assert [format_size(nbytes) for nbytes in SWEEP] == (
        ["4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M", "256M", "1G"]
    )
