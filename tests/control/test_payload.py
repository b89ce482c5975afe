import sys
import types
from typing import Any

import numpy as np
import pytest

from control.errors import PayloadError
from control.wire.payload import OUT_OF_BAND_NBYTES, pack, pack_arguments, unpack


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("stays here")


class Explosive:
    def __reduce__(self) -> Any:
        return (int, ("not a number",))


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", b"bytes", (1, [2, {"a": {3}}]), ValueError("x")])
def test_values_survive_the_way(value: object) -> None:
    assert repr(unpack(pack(value))) == repr(value)


def test_large_arrays_travel_out_of_band_as_independent_writable_copies() -> None:
    array = np.arange(OUT_OF_BAND_NBYTES, dtype=np.int64)
    packed = pack({"array": array})
    assert len(packed) == 2
    array[0] = -1  # after packing: the payload holds its own copy
    first, second = unpack(packed)["array"], unpack(packed)["array"]
    assert first[0] == 0
    first[0] = 7
    assert second[0] == 0


def test_read_only_arrays_stay_read_only() -> None:
    array = np.zeros(OUT_OF_BAND_NBYTES)
    array.flags.writeable = False
    assert not unpack(pack(array)).flags.writeable


def test_arguments_survive_both_ways() -> None:
    for args, kwargs in [((1, "a"), {"k": None}), (([1], {}), {"k": (2,)})]:
        assert unpack(pack_arguments(args, kwargs)) == (args, kwargs)


def test_what_cannot_be_pickled_says_so() -> None:
    with pytest.raises(PayloadError, match=r"Unpicklable.*stays here"):
        pack(Unpicklable())
    with pytest.raises(PayloadError, match="cannot unpickle"):
        unpack(pack(Explosive()))


def test_a_module_that_is_on_no_path_travels_by_value() -> None:
    module = types.ModuleType("nowhere_to_be_found")
    exec("def double(x): return FACTOR * x\nFACTOR = 2", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        packed = pack(module.double)
    finally:
        del sys.modules[module.__name__]
    assert unpack(packed)(21) == 42
