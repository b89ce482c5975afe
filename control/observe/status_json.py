"""`decode_status`: a job's status from the plain data of `JobStatus.to_dict`."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

from skipper.control.observe.status import JobStatus


def decode_status(data: Mapping[str, Any]) -> JobStatus:
    """The status from plain data. Attributes that the data of an earlier version lacks have their defaults.

    Raises:
        ValueError: it is not a status.
    """
    try:
        status = _decode(JobStatus, data)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"this is not a status of a job: {type(error).__name__}: {error}") from None
    assert isinstance(status, JobStatus)
    return status


def _decode(kind: Any, data: Any) -> Any:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _decode(hints[name], data[name]) for name in hints if name in _mapping(data)})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _one_of(arguments, data)
    if origin is not None and issubclass(origin, Mapping):
        return {str(key): _decode(arguments[1], value) for key, value in _mapping(data).items()}
    if origin is not None:
        if not isinstance(data, list):
            raise TypeError(f"a list is expected, not {type(data).__name__}")
        return [_decode(arguments[0], each) for each in data]
    if kind is float and isinstance(data, int):
        return float(data)
    if not isinstance(data, kind):
        raise TypeError(f"{kind.__name__} is expected, not {type(data).__name__}")
    return data


def _one_of(kinds: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in kinds:
        return None
    if isinstance(data, str) and str in kinds:
        return data
    return _decode(next(kind for kind in kinds if kind not in (type(None), str)), data)


def _mapping(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise TypeError(f"an object is expected, not {type(data).__name__}")
    return data


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind)}
