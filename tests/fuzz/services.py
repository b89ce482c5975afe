"""Names, URLs, calls from any language, pages over HTTP and the lines that processes write, as targets call it."""

import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from skipper.control.api import namespaces
from skipper.control.cluster.jobs import pods, slurm
from skipper.control.model.errors import NameNotFoundError, ResolverError, SupervisionError
from skipper.control.observe.dashboard import Dashboard
from skipper.control.observe.log_files import PROCESSES_FILE, stamped
from skipper.control.observe.log_history import JobLog, decode_processes
from skipper.control.observe.log_reader import Collector
from skipper.control.rpc import encoding
from skipper.control.rpc.gcs import GcsResolver
from skipper.control.rpc.metadata import FullError, MetadataService
from skipper.control.rpc.urls import ServiceUrl, split_address
from skipper.control.rpc.wire.messages import MethodCall
from skipper.control.support.pages import PageServer
from tests.fuzz.mutation import join_parts, parts_in_json, split_parts
from tests.fuzz.verdicts import Broken

_SECONDS = 20.0


# Names


def parse_url(data: bytes) -> None:
    """A URL; what is taken for one has to be one when it is written down again."""
    url = ServiceUrl.parse(data.decode("utf-8", "surrogateescape"))
    if ServiceUrl.parse(str(url)) != url:
        raise Broken(f"{url} is another URL when it is read again")
    split_address(url.target)


def url_seeds() -> Iterator[bytes]:
    """Of every kind."""
    yield from (b"actor://host:80/name", b"grpc://[::1]:7000/a/b", b"grpc://10.0.0.1:1")


def check_name(data: bytes) -> None:
    """A name, and where it is."""
    text = data.decode("utf-8", "surrogateescape")
    namespaces.check_name(namespaces.absolute(text, "team"))
    namespaces.check_namespace(text)


def name_seeds() -> Iterator[bytes]:
    """Names."""
    yield from (b"trainer", b"/team/trainer", b"team/trainer")


def register(data: bytes) -> None:
    """What somebody registers who has the secret: any values that JSON can have."""
    lease, name, url, lease_s = parts_in_json(data, 4)
    metadata = MetadataService()
    metadata.register(lease, name, url, lease_s)
    metadata.renew([lease])
    metadata.resolve(name)
    metadata.names()
    metadata.withdraw(lease)


def register_seeds() -> Iterator[bytes]:
    """A registration."""
    yield json.dumps(["lease", "/team/trainer", "actor://host:80/name", 10.0]).encode()


REGISTER_ERRORS = (ValueError, TypeError, FullError)


def resolve_machine(data: bytes) -> None:
    """What a cloud says of a machine, and the machine's own metadata."""
    key, value, ip = parts_in_json(data, 3)
    item = SimpleNamespace(key=str(key), value=str(value))
    interface = SimpleNamespace(network_i_p=str(ip), ipv6_address="")
    machine = SimpleNamespace(name="machine", metadata=SimpleNamespace(items=[item]), network_interfaces=[interface])
    url = GcsResolver("project", url="grpc://:7000/{name}", client=object())._url_on(machine, "trainer")
    if url is not None:
        ServiceUrl.parse(url)


def machine_seeds() -> Iterator[bytes]:
    """A machine that says where, and one that does not."""
    yield json.dumps(["skipper-service-trainer", "actor://:7000/{name}", "10.0.0.1"]).encode()
    yield json.dumps(["other", "", "fd00::1"]).encode()


RESOLVER_ERRORS = (NameNotFoundError, ResolverError)


def decode_arguments(data: bytes) -> None:
    """Arguments in JSON, from any language, before anybody has proved anything."""
    args, kwargs = encoding.decode_arguments(MethodCall("step", (data,), is_json=True))
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise Broken(f"arguments that are no arguments: {args!r}, {kwargs!r}")


def arguments_seeds() -> Iterator[bytes]:
    """Positional and by name."""
    yield b'[1, "a", {"b": null}]'
    yield b'{"n": 1.5}'


# What runs the hosts of a job


def read_pod(data: bytes) -> None:
    """What Kubernetes says of a pod and of its Job."""
    pod, status, index = parts_in_json(data, 3)
    seen = pods.Pod.of(pod)
    pods.place_of(seen, 80)
    pods.failure_of(status, index)


def pod_seeds() -> Iterator[bytes]:
    """A pod that runs, and one that waits."""
    head = {"name": "pod", "uid": "1", "creationTimestamp": "2026", "annotations": {pods.INDEX: "3"}}
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running", "podIP": "10.0.0.1"}
    waits = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]}
    for status in (ready, waits):
        yield json.dumps([{"metadata": head, "status": status}, {"failedIndexes": "1,3-5"}, 3]).encode()


def read_queue(data: bytes) -> None:
    """A line of Slurm's."""
    fields = [part.decode("utf-8", "replace") for part in split_parts(data)]
    slurm.place_of(*[*fields, "", "", ""][:3])


def queue_seeds() -> Iterator[bytes]:
    """States."""
    yield join_parts(b"RUNNING", b"node[1-3]", b"None")
    yield join_parts(b"CANCELLED by 0", b"", b"Priority")


# Pages


_PAGE_TOKEN = "a-token-of-letters"


class _NoJob:
    """A source of a page that knows of no job."""

    name = outcome = ""

    def status(self) -> NoReturn:
        """The job."""
        raise SupervisionError("there is no job")

    errors = stacks = output = status


@cache
def _pages() -> tuple[PageServer, ...]:
    return Dashboard(_NoJob(), 0, "127.0.0.1", ""), Dashboard(_NoJob(), 0, "127.0.0.1", _PAGE_TOKEN)


def ask_for_page(data: bytes) -> None:
    """A request over HTTP, to the dashboard: with a token, or without; the first byte says which."""
    server = _pages()[bool(data) and data[0] % 2]
    request = data[1:].replace(b"PORT", str(server.port).encode())
    with socket.create_connection((server.host, server.port), timeout=_SECONDS) as client:
        answer = b""
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(1 << 16):
                answer += part
        except OSError:
            return  # it was hung up on
    status = answer.partition(b"\r\n")[0]
    if b" 500 " in status or b"Traceback" in answer:
        raise Broken(f"{status!r}: {answer[-300:]!r}")
    if server.token and b" 200 " in status and _PAGE_TOKEN.encode() not in request:
        raise Broken("a page was shown to who has no token")


def page_seeds() -> Iterator[bytes]:
    """What a browser asks for."""
    for which in (b"\0", b"\1"):
        for path in (
            b"/",
            b"/data.json",
            b"/logs.json?who=a&after=3&reader=b",
            b"/none?x=1",
            b"/?token=" + _PAGE_TOKEN.encode(),
        ):
            yield which + b"GET " + path + b" HTTP/1.1\r\nHost: localhost:PORT\r\nConnection: close\r\n\r\n"
        cookie = b"Cookie: skipper-token-PORT=" + _PAGE_TOKEN.encode() + b"; a=b\r\nOrigin: http://localhost:PORT\r\n"
        yield which + b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n" + cookie + b"\r\n"


# Lines


@cache
def _collector() -> tuple[Collector, list[str]]:
    lines: list[str] = []
    collector = Collector(lambda source, line: lines.append(line), lambda: None)
    collector.start()
    return collector, lines


def collect_lines(data: bytes) -> None:
    """What a process of another host has written, in pieces."""
    collector, lines = _collector()
    done = threading.Event()
    chunks = [(1, "worker", 7, part) for part in split_parts(data)]
    collector.feed("host", "there", [*chunks, (1, "worker", 7, b""), (1, "worker", 7, None)], done.set)
    if not done.wait(_SECONDS):
        raise Broken("the thread that collects lines is gone")
    if any("\n" in line for line in lines):
        raise Broken("a line of several lines")
    lines.clear()


def lines_seeds() -> Iterator[bytes]:
    """Lines, and a bar of progress."""
    yield join_parts(b"one\ntwo\nthr", b"ee\n", b"\xff\xfe \r 10 %\r 20 %\n")
    yield join_parts(b"x" * 20_000, b"\n\n\n")


def hand_in_pipes(data: bytes) -> None:
    """What a process says of itself when it hands in its pipes; another one is listened to afterwards."""
    collector, _ = _collector()
    for said in (data, b'{"name": "worker", "pid": 7}'):
        ends = [os.pipe() for _ in range(2)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as process:
            process.settimeout(_SECONDS)
            process.connect("\0" + collector.address)
            socket.send_fds(process, [said or b" "], [ends[0][0], ends[1][0]])
            try:
                answer = process.recv(1)
            except ConnectionError:
                answer = b""
        for reading, writing in ends:
            os.close(reading)
            os.close(writing)
    if answer != b"+":
        raise Broken("a process of the job is not listened to any more")


def pipes_seeds() -> Iterator[bytes]:
    """What every process says."""
    yield b'{"name": "worker", "pid": 7}'
    yield b'{"name": "worker", "pid": 7, "actors": ["trainers"]}'


def read_log_files(data: bytes) -> None:
    """A file of what a process has written, whoever has written to the file."""
    with tempfile.TemporaryDirectory(prefix="skipper-fuzz-") as name:
        folder = Path(name)
        (folder / PROCESSES_FILE).write_bytes(next(iter(log_processes_seeds())))
        (folder / "worker-7.log").write_bytes(data)
        with JobLog(folder) as log:
            entries = [*log.entries(), *log.rest()]
    if any("\n" in entry.text or "\r" in entry.text for entry in entries):
        raise Broken("a line of several lines")


def log_files_seeds() -> Iterator[bytes]:
    """Lines, a bar of progress, and a line in parts."""
    yield stamped(b"one\ntwo\nthr", 1, 1.7e9) + stamped(b"ee\n", 1, 1.7e9) + stamped(b"\r1 %\r2 %", 2, 1.7e9)
    yield stamped(b"x" * 20_000, 1, 1.7e9)


def read_log_processes(data: bytes) -> None:
    """The file that says whose files there are."""
    for by in decode_processes(data):
        by.is_meant_by("trainers[3]")
        if "/" in by.file:
            raise Broken("a file elsewhere")


def log_processes_seeds() -> Iterator[bytes]:
    """A line."""
    yield b'{"file": "worker-7.log", "name": "procs{\'gpus\': 3}", "pid": 7, "host": "", "actors": ["trainers"]}'
