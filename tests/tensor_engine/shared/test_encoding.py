import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skipper import tensor_engine
from skipper.tensor_engine import RemoteError, errors
from skipper.tensor_engine.shared.encoding import (
    FREE,
    Form,
    pack,
    pack_code,
    unpack,
    unpack_code,
)
from skipper.tensor_engine.shared.metadata import metadata, metadata_of
from skipper.tensor_engine.shared.stacks import capture, describe
from skipper.tensor_engine.worker.heap import Poison
from skipper.tensor_engine.worker.interpreter import Interpreter

words = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 9)
numbers = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.complex_numbers(allow_nan=False))
forms = st.builds(Form, st.text(), st.text(), counts, counts)


@given(st.lists(words))
def test_code_survives_the_way(code: list[int]) -> None:
    assert unpack_code(pack_code(code)) == code


@given(st.lists(numbers))
def test_constants_survive_the_way_with_their_types(constants: list[Any]) -> None:
    found = unpack(pack(constants))
    assert list(found) == constants
    assert [type(value) for value in found] == [type(value) for value in constants]


def test_constants_of_other_kinds_pass_as_they_are() -> None:
    plain = [torch.ones(1), "text"]
    assert unpack(plain) is plain
    assert math.isnan(unpack(pack([math.nan]))[0])


@given(st.lists(st.tuples(words, st.one_of(st.none(), forms), st.binary())))
def test_definitions_survive_the_way(definitions: list[Any]) -> None:
    assert list(unpack(pack(definitions))) == definitions


def test_a_site_that_cannot_be_made_fails_each_of_its_instructions_and_none_behind_them() -> None:
    reports: list[Poison] = []
    worker = Interpreter(1, 0, 5, None, {}, reports.append)
    broken = Form("skipper.tensor_engine.no_such_module:maker", "broken", outputs=2, inputs=1)
    sound = Form("tests.tensor_engine.shared.test_encoding:three", "sound", outputs=1, inputs=0)
    worker.define([(7, broken, None), (8, sound, None)])
    reached = worker.execute(3, 10, [7, 1, 2, 99, 8, 4, FREE, 1, 1, 8, 5], [])
    assert reached == 13
    assert isinstance(worker.heap[2], Poison)
    assert (worker.heap[4], worker.heap[5], 1 in worker.heap) == (3, 3, False)
    (poison,) = reports
    assert (poison.rank, poison.instruction_stream, poison.sequence, poison.operation) == (5, 3, 10, "broken")
    assert "no_such_module" in poison.summary


def three(worker: Interpreter, site: object, description: object) -> Any:
    """A maker of sites that put 3 into their output."""

    def run(heap: dict[int, Any], code: list[int], at: int, constants: object, constant: int) -> None:
        heap[code[at + 1]] = 3

    return run


def test_equal_metadata_are_one_object() -> None:
    x = torch.empty(2, 3).t()
    assert metadata_of(x) is metadata((3, 2), stride=(1, 3))
    assert metadata_of(x) is not metadata((3, 2))
    assert metadata_of(x).contiguous() is metadata((3, 2))
    assert metadata((4,), torch.int64, offset=2).extent == 6
    assert (metadata((0, 3)).numel, metadata((0, 3)).extent, metadata((2, 2), torch.bfloat16).nbytes) == (0, 0, 8)


def test_a_stack_is_written_out_with_its_lines() -> None:
    def inner() -> list[Any]:
        return capture(1)  # here it was

    text = describe(inner())
    assert text.splitlines()[-1].strip() == "return capture(1)  # here it was"
    assert "in test_a_stack_is_written_out_with_its_lines" in text


def test_every_error_stands_in_the_tree_at_the_top_of_the_file() -> None:
    defined = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert all(issubclass(error, errors.TensorEngineError) for error in defined)
    assert [error.__name__ for error in defined if error.__name__ not in (errors.__doc__ or "")] == []
    assert {error.__name__ for error in defined} - set(tensor_engine.__all__) == {"PickleError"}


def test_a_remote_error_says_what_failed_where_on_both_sides() -> None:
    error = RemoteError(3, "aten::add", "ValueError: no", "  script.py", "  worker.py")
    assert str(error).splitlines()[0] == "aten::add failed on rank 3: ValueError: no"
    assert "script.py" in str(error)
    assert "worker.py" in str(error)
    assert "no longer known" in str(RemoteError(0, "x", "y", "", "z"))
    with pytest.raises(RuntimeError):
        raise error
