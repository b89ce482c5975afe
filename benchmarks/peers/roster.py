"""The peers: what each needs, and which rows it cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from skipper.benchmarks.peers.environments import Environment
from skipper.benchmarks.peers.work import FAMILIES, Family

__all__ = ["OURS", "ROSTER", "PeerLibrary"]

OURS = "skipper"


@dataclass(frozen=True, slots=True)
class PeerLibrary:
    """A library that takes part.

    Attributes:
        name: Name of its script, and its name in reports.
        title: Its name for people.
        ways: How it does the rows of each family that it is asked for, in a few words.
        lacks: Why it is not asked for the rows of a family.
        environment: Where it is installed; None is this project's own environment.
        floor: Whether it is a yardstick rather than a competitor.
        checkout: Whether it needs a checkout of sources, given on the command line.
    """

    name: str
    title: str
    ways: Mapping[Family, str]
    lacks: Mapping[Family, str] = field(default_factory=dict)
    environment: Environment | None = None
    floor: bool = False
    checkout: bool = False

    def __post_init__(self) -> None:
        if not self.floor and set(self.ways) | set(self.lacks) != set(FAMILIES):
            raise ValueError(f"{self.name} says neither how nor why not for {set(FAMILIES) - set(self.ways)}")


_MONARCH_REQUIREMENTS = (
    "torchmonarch==0.7.0",
    *("pyzmq", "pyarrow", "requests", "pyre-extensions", "cloudpickle", "lark", "tabulate", "opentelemetry-api"),
    *("clusterscope", "flask", "py-spy", "xxhash", "typing-extensions", "typing-inspect", "mypy-extensions"),
)
_RAY_REQUIREMENTS = (
    "ray==2.60.0",
    *("click", "filelock", "jsonschema", "msgpack", "packaging", "protobuf", "pyyaml", "requests", "attrs"),
    *("referencing", "rpds-py", "jsonschema-specifications", "urllib3", "idna", "certifi", "charset-normalizer"),
    "typing-extensions",
)

ROSTER: tuple[PeerLibrary, ...] = (
    PeerLibrary(
        OURS,
        "Skipper",
        ways={
            "actors": "actors over one socket of packets for each pair of processes",
            "memory": "RDMABuffer of memory from dataplane.empty, mapped by the reader",
            "store": "torchstore: snapshots; `sync` in direct mode, out of the publisher's memory",
            "engine": "tensor_engine, one worker",
        },
    ),
    PeerLibrary(
        "skipper_ucx",
        "Skipper, ordinary memory",
        ways={"memory": "RDMABuffer of memory from malloc, over UCX (CMA)"},
        lacks=dict.fromkeys(("actors", "store", "engine"), "the same as Skipper"),
    ),
    PeerLibrary(
        "monarch",
        "Monarch",
        ways={
            "actors": "actors of two processes on this host",
            "memory": "RDMABuffer; without an RDMA device that is its TCP fallback",
            "engine": "its tensor engine, one worker",
        },
        lacks={"store": "its store is torchstore"},
        environment=Environment("monarch", "torchmonarch", _MONARCH_REQUIREMENTS),
    ),
    PeerLibrary(
        "meta_torchstore",
        "torchstore (Meta)",
        ways={"store": "on Monarch, its own choice of transport"},
        lacks=dict.fromkeys(("actors", "memory", "engine"), "it is a store, on Monarch"),
        environment=Environment("monarch", "torchmonarch", _MONARCH_REQUIREMENTS),
        checkout=True,
    ),
    PeerLibrary(
        "ray_core",
        "Ray",
        ways={
            "actors": "actors",
            "memory": "ray.get of an object in shared memory, and a copy into the destination",
            "store": "ray.put and ray.get in its object store, and a copy into the destination",
        },
        lacks={"engine": "it has no tensor engine"},
        environment=Environment("ray", "ray", _RAY_REQUIREMENTS),
    ),
    PeerLibrary(
        "nixl",
        "NIXL",
        ways={"memory": "its UCX backend, default options"},
        lacks={
            "actors": "it moves memory; it has no actors",
            "store": "it moves memory; it has no store",
            "engine": "it has no tensor engine",
        },
        environment=Environment("nixl", "nixl-cu12", ("nixl-cu12==1.5.1",)),
    ),
    PeerLibrary(
        "mooncake",
        "Mooncake",
        ways={"memory": "its transfer engine over TCP"},
        lacks={
            "actors": "it moves memory; it has no actors",
            "store": "not asked: Mooncake Store keeps bytes by key behind a master process, and has no tensors",
            "engine": "it has no tensor engine",
        },
        environment=Environment(
            "mooncake",
            "mooncake-transfer-engine-non-cuda",
            ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "aiohttp", "requests", "msgpack"),
            debian=("libibverbs1", "libnl-3-200", "libnl-route-3-200"),  # which its library is linked to
        ),
    ),
    PeerLibrary(
        "torch_rpc",
        "torch.distributed.rpc",
        ways={"actors": "rpc_sync to a remote object", "memory": "messages: rpc_sync with a tensor, and a copy"},
        lacks={"store": "it has no store", "engine": "it has no tensor engine"},
    ),
    PeerLibrary(
        "grpc",
        "plain gRPC",
        ways={
            "actors": "grpc.aio, unary calls over TCP on this host",
            "memory": "a stream of messages of 1 MiB",
            "store": "one unary call",
            "engine": "one unary call",
        },
        floor=True,
    ),
    PeerLibrary(
        "sockets",
        "plain sockets",
        ways={"actors": "blocking Unix sockets between processes", "memory": "bytes over TCP on this host"},
        floor=True,
    ),
    PeerLibrary(
        "memcpy",
        "memcpy",
        ways=dict.fromkeys(("memory", "store", "engine"), "one thread, warm memory"),
        floor=True,
    ),
)
