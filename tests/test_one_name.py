"""`skipper` is the one name: what it offers, when that is loaded, and what is said to who writes a room's bare name."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

import skipper

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ["control", "dataplane", "tensor_engine", "torchstore", "benchmarks"]
COSTLY = ["torch", "numpy", "grpc", "asyncio", *(f"skipper.{room}" for room in ROOMS)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, in the checkout, where the folders of the rooms are on the path."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def for_type_checkers() -> dict[str, str]:
    """What `skipper` imports for them: each name, and from where."""
    (guarded,) = (each for each in ast.parse(Path(skipper.__file__).read_text()).body if isinstance(each, ast.If))
    assert ast.unparse(guarded.test) == "TYPE_CHECKING"
    imports = [each for each in guarded.body if isinstance(each, ast.ImportFrom)]
    assert len(imports) == len(guarded.body)
    return {alias.name: str(each.module) for each in imports for alias in each.names}


def test_type_checkers_are_told_of_the_names_that_there_are() -> None:
    assert sorted(for_type_checkers()) == sorted(skipper.__all__)
    assert len(set(skipper.__all__)) == len(skipper.__all__)


@pytest.mark.parametrize("name", [name for name in skipper.__all__ if name not in ROOMS])
def test_a_name_is_that_of_its_room(name: str) -> None:
    room = sys.modules[getattr(skipper, name).__module__.rpartition(".")[0]]
    assert room.__name__.startswith("skipper.")
    told = for_type_checkers()[name]
    assert getattr(skipper, name) is getattr(__import__(told, fromlist=[name]), name)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_an_attribute(room: str) -> None:
    assert for_type_checkers()[room] == "skipper"
    assert getattr(skipper, room) is sys.modules[f"skipper.{room}"]


def test_an_import_loads_nothing_that_costs_time() -> None:
    done = run("-c", f"import sys, skipper\nprint([name for name in {COSTLY} if name in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    "names", ["Actor, endpoint, this_host, Future", "RDMABuffer, RDMAAction", "control, dataplane"]
)
def test_torch_comes_with_the_rooms_for_tensors_alone(names: str) -> None:
    done = run("-c", f"import sys\nfrom skipper import {names}\nprint('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_everything_is_listed() -> None:
    assert set(skipper.__all__) <= set(dir(skipper))
    done = run("-c", "import skipper\nprint(set(skipper.__all__) <= set(dir(skipper)))")
    assert done.stdout == "True\n", done.stderr


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'skipper' has no attribute 'Actors'"):
        skipper.Actors  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Actors' from 'skipper'"):
        from skipper import Actors  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize("name", ["Actor", "ActorError", "Extent", "RDMABuffer", "this_host", "endpoint"])
@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_a_name_is_pickled_by_reference(pickler: object, name: str) -> None:
    value = getattr(skipper, name)
    data = pickler.dumps(value)  # type: ignore[attr-defined]
    assert pickle.loads(data) is value
    assert len(data) < 200
    assert b"skipper." in data


def test_a_room_is_pickled_by_reference() -> None:
    assert pickle.loads(cloudpickle.dumps(skipper.dataplane)) is skipper.dataplane


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("statement", ["import {}", "from {} import Anything", "import {}.errors"])
def test_the_bare_name_of_a_room_is_an_error_that_says_what_to_write(statement: str, room: str) -> None:
    done = run("-c", statement.format(room))
    assert done.returncode == 1
    wanted = f"ImportError: write `from skipper import {room}`, or `from skipper.{room} import ...`"
    assert done.stderr.splitlines()[-1] == wanted


def test_the_bare_name_is_an_error_beside_the_right_one() -> None:
    done = run(
        "-c", "import skipper.control\ntry:\n    import control\nexcept ImportError as error:\n    print(error.name)"
    )
    assert done.stdout == "control\n", done.stderr
