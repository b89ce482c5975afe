import pytest

from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.machine import available_nbytes, proc_nbytes


def test_some_memory_is_free() -> None:
    assert available_nbytes() > 1 << 20


def test_a_key_that_a_file_does_not_have_is_named() -> None:
    with pytest.raises(BenchmarkError, match="/proc/meminfo has no Nothing"):
        proc_nbytes("/proc/meminfo", "Nothing")
