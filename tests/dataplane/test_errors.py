"""The error tree, and the names that the package exports."""

import re

from skipper import dataplane
from skipper.dataplane import errors


def test_the_tree_that_is_drawn_is_the_tree_that_is() -> None:
    drawn = re.findall(r"^ *[│ ]*(?:[├└]── )?(\w+Error)(?: \((\w+)\))?", errors.__doc__ or "", re.MULTILINE)
    classes = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert {name for name, _ in drawn} == set(classes)
    for name, other_base in drawn:
        assert issubclass(classes[name], errors.DataplaneError)
        if other_base:
            assert other_base in {base.__name__ for base in classes[name].__mro__}


def test_every_error_is_exported() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type):
            assert getattr(dataplane, name) is kind
            assert name in dataplane.__all__


def test_every_exported_name_exists_and_is_documented() -> None:
    for name in dataplane.__all__:
        assert getattr(dataplane, name).__doc__, name


def test_a_foreign_status_stays_on_the_error() -> None:
    assert errors.TransferTimeoutError("late", status=-16).status == -16
    assert errors.TransferError("bad").status is None
