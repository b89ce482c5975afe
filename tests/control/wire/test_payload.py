import abc
import sys
import threading
import traceback
import types
from typing import Any

import numpy as np
import pytest

from skipper.control.model.errors import PayloadError
from skipper.control.wire.payload import OUT_OF_BAND_NBYTES, pack, pack_arguments, pack_construction, unpack


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


def test_a_class_that_its_module_does_not_have_any_more_travels_by_value() -> None:
    """As after `importlib.reload`: objects of the old class are still there."""

    class Replaced:
        def answer(self) -> int:
            return 42

    pack(PayloadError("this module is known, and found by name"))
    Replaced.__module__, Replaced.__qualname__ = "skipper.control.model.errors", "PayloadError"
    assert type(unpack(pack(Replaced()))) is not PayloadError
    assert unpack(pack(Replaced())).answer() == 42


def test_what_travels_by_value_knows_from_which_file_it_is() -> None:
    def fail() -> None:
        raise LookupError("here")

    copy = unpack(pack(fail))
    assert copy is not fail
    with pytest.raises(LookupError) as raised:
        copy()
    trace = traceback.extract_tb(raised.tb)[-1]
    assert (trace.filename, trace.lineno) == (__file__, fail.__code__.co_firstlineno + 1)
    assert trace.line == 'raise LookupError("here")'


def test_a_module_that_is_on_no_path_travels_by_value() -> None:
    module = types.ModuleType("nowhere_to_be_found")
    exec("def double(x): return FACTOR * x\nFACTOR = 2", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        packed = pack(module.double)
    finally:
        del sys.modules[module.__name__]
    assert unpack(packed)(21) == 42


class Holder:
    def __init__(self, part: object) -> None:
        self.part = part


def refusal(*args: object, **kwargs: object) -> str:
    with pytest.raises(PayloadError) as caught:
        pack_arguments(args, kwargs)
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_the_argument_that_cannot_be_pickled_is_named_with_the_way_to_it() -> None:
    lock = threading.Lock()
    assert refusal(1, lock).startswith("cannot pickle args[1], of type lock: TypeError: ")
    assert refusal(1, [2, {"x": (3, lock)}]).startswith("cannot pickle args[1][1]['x'][1], of type lock: ")
    assert refusal(1, spam=lock).startswith("cannot pickle kwargs['spam'], of type lock: ")
    assert refusal(Holder([Holder(lock)])).startswith("cannot pickle args[0].part[0].part, of type lock: ")
    assert refusal(lambda: lock).startswith("cannot pickle the variable 'lock' that args[0] uses, of type lock: ")
    assert refusal({Unpicklable()}).startswith("cannot pickle an element of args[0], of type Unpicklable: ")
    with pytest.raises(PayloadError, match="cannot pickle the class, of type ABCMeta"):
        pack_construction(type("Made", (Base,), {"lock": lock}), (), {})


class Base(abc.ABC):  # noqa: B024
    pass


class Exiting:
    """Neither pickling nor unpickling it goes as it should, and neither raises an `Exception`."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __reduce__(self) -> Any:
        return sys.exit(5) if self.when == "pickled" else (sys.exit, (6,))


def test_a_value_that_exits_is_an_error_like_others_and_the_first_error_is_its_cause() -> None:
    with pytest.raises(PayloadError, match=r"args\[0\], of type Exiting: SystemExit: 5") as caught:
        pack_arguments((Exiting("pickled"),), {})
    assert isinstance(caught.value.__cause__, SystemExit)
    with pytest.raises(PayloadError, match="cannot unpickle what arrived: SystemExit: 6") as caught:
        unpack(pack(Exiting("unpickled")))
    assert isinstance(caught.value.__cause__, SystemExit)


def test_a_value_without_an_honest_length_is_refused_without_a_look_into_it() -> None:
    class Odd:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("no attributes")

        def __reduce__(self) -> Any:
            raise RuntimeError("stays here")

    with pytest.raises(PayloadError, match="stays here"):
        pack(Odd())
