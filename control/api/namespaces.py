"""Namespaces: the same name means different actors in different jobs.

A name such as ``trainer/0`` is relative to a namespace; one that begins with a slash, such as ``/shared/curriculum``,
is absolute. A name in a namespace is the absolute name ``/namespace/name``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar

from skipper.control.runtime import current_runtime

NAMESPACE_VARIABLE = "SKIPPER_NAMESPACE"
"""Environment variable that names the namespace; the children of a job inherit it."""

JOB_ID_VARIABLE = "SKIPPER_JOB_ID"
"""Environment variable with a job's id, set by the launcher of the job; the namespace if none is given."""

ROOT = "/"
"""The namespace in which every name is absolute."""

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = re.compile(rf"/?{_PART}(/{_PART})*")
_MAX_LENGTH = 512

_here: ContextVar[str | None] = ContextVar("namespace", default=None)


def namespace() -> str:
    """The namespace of names for which the code gives none.

    It is that of `use_namespace`, or else that of the environment variable ``SKIPPER_NAMESPACE``, or else the id of the
    job: ``SKIPPER_JOB_ID``, or the id of the Skipper job of which this process is part (one starts if there is none).

    Raises:
        ValueError: the environment variable is not a valid namespace.
    """
    given = _here.get()
    return given if given is not None else check_namespace(os.environ.get(NAMESPACE_VARIABLE) or job_id())


def job_id() -> str:
    """The id of the job that this process belongs to, for any engine that has launched it."""
    return os.environ.get(JOB_ID_VARIABLE) or current_runtime.current().me.job


@contextlib.contextmanager
def use_namespace(name: str) -> Iterator[str]:
    """Use another namespace for names, in this thread or task, until the end of the block.

    Raises:
        ValueError: it is not a valid namespace.
    """
    token = _here.set(check_namespace(name))
    try:
        yield name
    finally:
        _here.reset(token)


def environment() -> dict[str, str]:
    """The environment variables that a child process needs to be in the same namespace and job.

    Processes that Skipper spawns have them; pass them to processes that something else starts. With another
    ``SKIPPER_NAMESPACE`` a child gets a namespace of its own.
    """
    return {NAMESPACE_VARIABLE: namespace(), JOB_ID_VARIABLE: job_id()}


def absolute(name: str, within: str) -> str:
    """A name as an absolute one.

    Args:
        name: name of an actor or a service; absolute, or relative to the namespace ``within``.
        within: a namespace.

    Raises:
        ValueError: it is not a valid name.
    """
    if check_name(name).startswith("/"):
        return name
    return f"/{name}" if within == ROOT else f"/{within}/{name}"


def check_name(name: str) -> str:
    """Return a name unchanged, if it is valid.

    Raises:
        TypeError: it is not a string.
        ValueError: it is not a valid name.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, not {type(name).__name__}")
    if not _NAME.fullmatch(name) or len(name) > _MAX_LENGTH:
        raise ValueError(
            f"{name!r} is not a name: parts of letters, digits, '.', '_' and '-', with slashes between them, "
            f"{_MAX_LENGTH} characters at most"
        )
    return name


def check_namespace(name: str) -> str:
    """Return a namespace unchanged, if it is valid: a name without a leading slash, or `ROOT`.

    Raises:
        TypeError: it is not a string.
        ValueError: it is not a valid namespace.
    """
    if name != ROOT and check_name(name).startswith("/"):
        raise ValueError(f"{name!r} is not a namespace: it begins with a slash, as absolute names do")
    return name
