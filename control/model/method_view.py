"""`MethodView`: shows the name, signature and docstring of a method of actors that run in other processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skipper.control.model.endpoint_spec import EndpointSpec, parameters_of


class _OfInstance:
    """An attribute of instances that the class does not have, or that has another value in the class."""

    def __init__(self, read: Callable[[Any], object], of_class: object = AttributeError) -> None:
        self._read = read
        self._of_class = of_class

    def __get__(self, instance: object | None, owner: type | None = None) -> object:
        if instance is not None:
            return self._read(instance)
        if self._of_class is AttributeError:
            raise AttributeError
        return self._of_class


class _Unknown:
    """A default value that is not known here. It is shown as ``...``."""

    def __repr__(self) -> str:
        return "..."


class MethodView:
    """Stands for a method of actors, so that `inspect.signature`, `help` and a notebook's ``?`` show the method's.

    It cannot be called. If the class of the actors is not known here, since the reference has come from elsewhere,
    there is no docstring, and defaults are shown as ``...``.
    """

    __slots__ = ()

    def _viewed(self) -> tuple[EndpointSpec, type | None]:
        """The method, and the class of the actors if it is known here."""
        raise NotImplementedError

    def _advice(self) -> str:
        """What to do in place of calling this, for the error message."""
        raise NotImplementedError

    @property
    def __name__(self) -> str:
        return self._viewed()[0].name

    if not TYPE_CHECKING:  # what type checkers see of this is in control/api/views.pyi; to them a call is an error

        def __init_subclass__(cls) -> None:
            super().__init_subclass__()
            cls.__doc__ = _OfInstance(_docstring, cls.__dict__.get("__doc__"))

        def __call__(self, *args: object, **kwargs: object) -> None:
            """Raise a `TypeError` that says how it is called."""
            raise TypeError(self._advice())

        __signature__ = _OfInstance(lambda self: _signature(*self._viewed()))


def _docstring(view: MethodView) -> str | None:
    spec, cls = view._viewed()
    return None if cls is None else inspect.getdoc(inspect.getattr_static(cls, spec.name))


def _signature(spec: EndpointSpec, cls: type | None) -> inspect.Signature:
    """The signature that callers see: without ``self`` and the response port."""
    if cls is None or spec.is_wrapped:
        return inspect.Signature(parameters_of(spec, default=_Unknown()))
    known = inspect.signature(inspect.getattr_static(cls, spec.name))
    hidden = 2 if spec.explicit_response_port else 1
    return known.replace(parameters=list(known.parameters.values())[hidden:])
