import ast
import dataclasses
from pathlib import Path

import pytest

from skipper.control import Accumulator, ActorMesh
from skipper.control.api import mesh
from skipper.control.services import Service, ServiceOptions, Session

VIEWS = ast.parse(Path(mesh.__file__).with_name("views.pyi").read_text(encoding="utf-8"))


def members_of(name: str) -> set[str]:
    """What a class of ``control/api/views.pyi`` declares."""
    (cls,) = (node for node in VIEWS.body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    return methods | {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]


@pytest.mark.parametrize("cls", [ActorMesh, Service, Session])
def test_type_checkers_know_every_attribute(cls: type) -> None:
    assert {name for name in dir(cls) if not name.startswith("_")} <= members_of("MeshAttributes")


def test_type_checkers_are_told_of_no_other_attribute() -> None:
    known = {*dir(ActorMesh), *dir(Service), *dir(Session)}
    assert members_of("MeshAttributes") <= known


def test_type_checkers_know_every_option_of_a_service() -> None:
    options = {field.name for field in dataclasses.fields(ServiceOptions)}
    assert members_of("ServiceKeywords") | {"procs"} == options


def test_an_accumulator_is_annotated_by_its_value_alone() -> None:
    assert Accumulator[float].__origin__ is Accumulator
