"""`RayJob`: hosts that a Ray cluster places, each in a bundle of a placement group.

A separate process, `ray_driver`, uses Ray, and ends with this one; that module explains why.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from skipper.control.cluster.jobs.authority import Authority
from skipper.control.cluster.jobs.engine import Place, PlaceState
from skipper.control.cluster.jobs.folder import JobFolder
from skipper.control.cluster.jobs.job import Job
from skipper.control.model.errors import JobError, JobLibraryError
from skipper.control.wire.certificates import AUTHORITY, AUTHORITY_KEY, SECRET, SIGNER

DRIVER = Path(__file__).with_name("ray_driver.py")
TIMEOUT_S = 60.0

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""How Ray places bundles: on few nodes, on many, all on one, or each on its own."""

_END_S = 10.0


class RayJob(Job):
    """Agents in the bundles of a placement group of Ray, an actor for each. Elastic: Ray places lost bundles again.

    The script runs on a node of the cluster, or on a machine that reaches it by ``ray://``. All parts of this job end
    with this process, in any way that it ends. The secret and the authority of the job are arguments of the actors: all
    that can run code in the Ray cluster can read them.

    Args:
        places: how many bundles.
        address: address of the cluster, as for `ray.init`: ``auto`` for the cluster of this machine.
        cpus: CPUs of each bundle.
        gpus: GPUs of each bundle; processes there see only these.
        resources: other resources of each bundle, by name, such as ``{"rdma": 1}``.
        strategy: how bundles are placed; ``STRICT_SPREAD`` gives each a node of its own.
        env: environment variables for the agents, and for what they start.
        insecure: use no TLS to other machines. Otherwise each node makes a certificate for its IP.
        certs: the folder of the certificates of this machine; the nodes then have theirs in ``node_certs``. None: those
            of a new authority of this script.
        node_certs: the folder of certificates on each node; None: the same path as ``certs``.
        init: further arguments of `ray.init`, if JSON can express them.
        timeout: seconds for Ray to answer a request.
        own_address: the IP at which the hosts reach this script.
        data_plane: whether the data plane may carry data between hosts; as in `attach_to_hosts`.

    Raises:
        JobLibraryError: (an `ImportError`) Ray is not installed.
        ValueError: ``places`` is below 1, there is no such strategy, resources are negative, or there are none.
        TypeError: JSON cannot express ``init`` or ``env``.

    Example:
        ```python
        from skipper.control.cluster.jobs import RayJob

        job = RayJob(2, cpus=8, gpus=8, resources={"rdma": 1})
        # `with job:` asks Ray for the bundles, and job.hosts() attaches their agents, as with any Job.
        ```
    """

    def __init__(
        self,
        places: int,
        *,
        address: str = "auto",
        cpus: float = 1.0,
        gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
        strategy: Strategy = "STRICT_SPREAD",
        env: Mapping[str, str] | None = None,
        insecure: bool = False,
        certs: str | os.PathLike[str] | None = None,
        node_certs: str | os.PathLike[str] | None = None,
        init: Mapping[str, Any] | None = None,
        timeout: float = TIMEOUT_S,
        own_address: str | None = None,
        data_plane: bool | None = None,
    ) -> None:
        there = certs if node_certs is None else node_certs
        if (certs is None and there is not None) or (certs is not None and insecure):
            raise ValueError("pass certs= alone or with node_certs=, and neither of them with insecure=")
        options = ["--insecure"] if insecure else [] if there is None else ["--certs", os.path.abspath(there)]
        config = {
            "address": address,
            "resources": bundle(cpus, gpus, resources or {}),
            "strategy": strategy,
            "options": options,
            "env": dict(env or {}),
            "init": dict(init or {}),
            "name": f"skipper-{secrets.token_hex(4)}",
        }
        if strategy not in get_args(Strategy):
            raise ValueError(f"a strategy of Ray is one of {', '.join(get_args(Strategy))}, not {strategy!r}")
        json.dumps(config)
        if importlib.util.find_spec("ray") is None:
            raise JobLibraryError("a RayJob needs Ray: pip install 'skipper-mesh[ray]'")
        folder = JobFolder()
        trust = None if insecure else Authority(folder, own_address) if certs is None else Path(certs)
        engine = RayEngine(folder, config, trust, timeout)
        super().__init__(engine, places, insecure=insecure, address=own_address, data_plane=data_plane)


def bundle(cpus: float, gpus: float, others: Mapping[str, float]) -> dict[str, float]:
    """The resources of a place, with Ray's names.

    Raises:
        ValueError: there are none, or one is negative.
    """
    if {"CPU", "GPU"} & set(others):
        raise ValueError("ask for CPUs and GPUs with cpus= and gpus=")
    asked = {"CPU": cpus, "GPU": gpus, **others}
    if any(amount < 0 for amount in asked.values()):
        raise ValueError(f"the amount of a resource cannot be negative: {asked}")
    found = {name: amount for name, amount in asked.items() if amount}
    if not found:
        raise ValueError("Ray cannot place a bundle without resources: ask for at least one")
    return found


class RayEngine:
    """Bundles of a placement group as places; see `Engine`.

    ``trust`` is the authority of the job, or the folder of the certificates of this machine; None: no TLS. The driver
    may take ``timeout_s`` for a request.
    """

    is_elastic = True

    def __init__(
        self, folder: JobFolder, config: Mapping[str, Any], trust: Authority | Path | None, timeout_s: float
    ) -> None:
        self._folder = folder
        self._trust = trust
        self._config = config
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._driver: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._logs: list[str] = []
        self._is_over = False

    @property
    def secret_file(self) -> Path:
        """See `Engine`."""
        return self._folder.secret_file

    @property
    def certs(self) -> Path | None:
        """See `Engine`."""
        return self._trust.certs if isinstance(self._trust, Authority) else self._trust

    def submit(self, places: int) -> None:
        """Start the driver, and make it request the placement group."""
        files = {SECRET: self._folder.secret_file}
        if isinstance(self._trust, Authority):
            files |= {name: self._trust.path / name for name in (AUTHORITY, AUTHORITY_KEY, SIGNER)}
        texts = {name: path.read_text(encoding="ascii") for name, path in files.items()}
        self._logs = [""] * places
        self._driver = subprocess.Popen(
            [sys.executable, str(DRIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        with self._lock:
            self._write({**self._config, "files": texts})
        self._request("submit", places)

    def poll(self) -> Sequence[Place]:
        """The places from the actors' reports."""
        if self._is_over:
            return [Place(PlaceState.ENDED, reason="the job was cancelled")] * len(self._logs)
        name = self._config["name"]
        return [
            Place(PlaceState(place["state"]), place["address"], f"{name}-{rank}", place["reason"] or _waiting(place))
            for rank, place in enumerate(self._request("poll"))
        ]

    def replace(self, rank: int) -> None:
        """Kill the actor, and make Ray start another in the same bundle, wherever that is by then."""
        self._request("replace", rank)

    def log(self, rank: int) -> str:
        """The end of the output: as much as the driver keeps, even after its node is gone."""
        if not self._is_over:
            self._logs[rank] = self._request("log", rank)
        return self._logs[rank]

    def cancel(self) -> None:
        """Remove actors and placement group, and end the driver; Ray would also end them with it."""
        try:
            if self._driver is not None:
                self._logs = self._request("cancel") or self._logs
        finally:
            self._is_over = True
            self._end_driver()
            self._folder.close()

    # The conversation with the driver

    def _request(self, method: str, *arguments: object) -> Any:
        with self._lock:
            if self._driver is None:
                raise JobError("the process that talks to Ray has ended, so the job is lost")
            self._write([method, *arguments])
            answer = json.loads(self._read())
        if "error" in answer:
            raise JobError(f"Ray: {answer['error']}")
        return answer["result"]

    def _write(self, content: object) -> None:
        assert self._driver is not None  # the callers look
        assert self._driver.stdin is not None  # it was asked for
        try:
            self._driver.stdin.write(json.dumps(content).encode() + b"\n")
            self._driver.stdin.flush()
        except OSError as error:
            self._end_driver()
            raise JobError("the process that talks to Ray has ended; its standard error says why") from error

    def _read(self) -> bytes:
        """Read the driver's answer, one line."""
        assert self._driver is not None  # the callers look
        assert self._driver.stdout is not None  # it was asked for
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._driver.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    self._end_driver()
                    raise JobError(f"Ray did not answer within {self._timeout_s:g} s: the job was given up")
                content = os.read(self._driver.stdout.fileno(), 1 << 16)
                if not content:
                    self._end_driver()
                    raise JobError("the process that talks to Ray has ended; its standard error says why")
                self._unread += content
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is None:
            return
        for pipe in (driver.stdin, driver.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both were asked for
        try:
            driver.wait(_END_S)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()


def _waiting(place: Mapping[str, Any]) -> str:
    return "Ray has not placed it, or its agent does not listen yet" if place["state"] == PlaceState.PENDING else ""
