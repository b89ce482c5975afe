"""How a process moves data: one immutable record, which `configure` replaces as a whole."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skipper.dataplane.errors import ConfigurationError
from skipper.trust import MIN_SECRET_NBYTES

BACKENDS = ("shm", "cuda_ipc", "ucx", "verbs")
"""Transports between processes, in the order in which "auto" tries them within a host."""

HOST_VARIABLE = "SKIPPER_DATA_PLANE_HOST"
"""Environment variable with the IP at which the other hosts of a job reach this machine. If it is set, handles have
all that those hosts need, and the verbs backend listens on it. Arguments of `configure` override it."""

_VERBS_NUMBERS = {
    "port": range(1, 256),
    "gid_index": range(256),
    "mtu": (256, 512, 1024, 2048, 4096),
    "timeout": range(1, 32),
    "retry_cnt": range(7),
    "depth": range(16, 8193),
}
_MOST_PORTS = 8
_DEVICE = re.compile(r"[\w.-]+(:[1-9]\d{0,2})?")


@dataclass(frozen=True, slots=True)
class Config:
    """See `dataplane.configure` for the meaning of each."""

    backend: str = "auto"
    copy_threads: int = 0
    export: str | None = None
    ucx: dict[str, str] = field(default_factory=dict)
    ucx_library: str | None = None
    verbs: dict[str, str | int | tuple[str, ...]] = field(default_factory=dict)
    secret: bytes | None = field(default=None, repr=False)

    @property
    def exports_all(self) -> bool:
        """Whether handles have what every backend needs; set in the environment when hosts are attached."""
        return self.export == "all" if self.export is not None else HOST_VARIABLE in os.environ

    @property
    def verbs_options(self) -> dict[str, str | int | tuple[str, ...]]:
        """The options of the verbs backend, with those of the environment."""
        host = os.environ.get(HOST_VARIABLE)
        return {"listen": f"{host}:0", **self.verbs} if host else self.verbs

    @property
    def order(self) -> tuple[str, ...]:
        """The transports that may be used, best first."""
        return BACKENDS if self.backend == "auto" else (self.backend,)

    @property
    def far_order(self) -> tuple[str, ...]:
        """The same for owners on other hosts. The UCX of the wheel has no RDMA; one that the user chose may have it."""
        if self.backend == "auto" and self.ucx_library is None:
            return ("shm", "verbs", "ucx")
        return self.order

    @property
    def threads(self) -> int:
        """Copy threads, with 0 resolved."""
        return self.copy_threads or min(4, len(os.sched_getaffinity(0)))


def checked(
    old: Config,
    *,
    backend: str | None,
    copy_threads: int | None,
    export: str | None,
    ucx: Mapping[str, Any] | None,
    ucx_library: str | os.PathLike[str] | None,
    verbs: Mapping[str, Any] | None,
    secret: bytes | None = None,
) -> Config:
    """`old` with the arguments that are not None.

    Raises:
        ConfigurationError: A value is not one of the possible ones.
    """
    if backend is not None and backend not in ("auto", *BACKENDS):
        raise ConfigurationError(f"backend must be one of auto, {', '.join(BACKENDS)}; not {backend!r}")
    if copy_threads is not None and (not isinstance(copy_threads, int) or not 1 <= copy_threads <= 64):
        raise ConfigurationError(f"copy_threads must be an integer from 1 to 64, not {copy_threads!r}")
    if export is not None and export not in ("nearest", "all"):
        raise ConfigurationError(f"export must be 'nearest' or 'all', not {export!r}")
    return Config(
        backend=old.backend if backend is None else backend,
        copy_threads=old.copy_threads if copy_threads is None else copy_threads,
        export=old.export if export is None else export,
        ucx=old.ucx if ucx is None else _ucx_options(ucx),
        ucx_library=old.ucx_library if ucx_library is None else os.fspath(ucx_library),
        verbs=old.verbs if verbs is None else _verbs_options(verbs),
        secret=old.secret if secret is None else _secret(secret),
    )


def _secret(given: Any) -> bytes:
    if not isinstance(given, bytes):  # not repeated in the message
        raise ConfigurationError(f"secret must be bytes, not {type(given).__name__}")
    if len(given) < MIN_SECRET_NBYTES:
        raise ConfigurationError(f"a secret has {MIN_SECRET_NBYTES} bytes or more, this one has {len(given)}")
    return given


def _ucx_options(options: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"ucx must map option names to values, not {options!r}")
    checked_options: dict[str, str] = {}
    for name, value in options.items():
        if not isinstance(name, str) or not name.isidentifier() or not isinstance(value, (str, int)):
            raise ConfigurationError(f"ucx option {name!r}={value!r}: a name and a string or integer are needed")
        checked_options[name.upper().removeprefix("UCX_")] = str(value)
    return checked_options


def _verbs_options(options: Mapping[str, Any]) -> dict[str, str | int | tuple[str, ...]]:
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"verbs must map option names to values, not {options!r}")
    taken = dict(options)
    for name, value in options.items():
        allowed = _VERBS_NUMBERS.get(name)
        if name == "device":
            taken[name] = _devices(value)
        elif name == "listen":
            if not isinstance(value, str) or not value.isascii() or not _is_address(value):
                raise ConfigurationError(f"verbs option {name}={value!r}: HOST:PORT is needed")
        elif name == "rdma_cm":
            if not isinstance(value, bool):
                raise ConfigurationError(f"verbs option rdma_cm={value!r} must be True or False")
        elif allowed is None:
            names = ", ".join(("device", "listen", "rdma_cm", *_VERBS_NUMBERS))
            raise ConfigurationError(f"there is no verbs option {name!r}: {names}")
        elif isinstance(value, bool) or value not in allowed:
            raise ConfigurationError(f"verbs option {name}={value!r} is none of {allowed}")
    return taken


def _devices(value: Any) -> str | tuple[str, ...]:
    """One device's name or "all" as it is, a list of "NAME" or "NAME:PORT" as a tuple."""
    several = isinstance(value, (list, tuple))
    names = tuple(value) if several else (value,)
    if not 0 < len(names) <= _MOST_PORTS or len(set(names)) < len(names):
        raise ConfigurationError(f"verbs option device={value!r}: 1 to {_MOST_PORTS} different ports are possible")
    for name in names:
        if (
            not isinstance(name, str)
            or not name.isascii()
            or not _DEVICE.fullmatch(name)
            or (several and name == "all")
        ):
            raise ConfigurationError(f"verbs option device={value!r}: NAME, a list of NAME or NAME:PORT, or all")
    return names if several else names[0]


def _is_address(text: str) -> bool:
    """Whether peers could connect to it as it is written; not to the wildcard address."""
    host, _, port = text.rpartition(":")
    return host.strip("[]") not in ("", "0.0.0.0", "::") and port.isdecimal() and int(port) <= 0xFFFF
