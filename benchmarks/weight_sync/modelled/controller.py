"""What a sync costs the store's controller, by its own index of versions and grants: measured, without a network."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass

from skipper.benchmarks.errors import BenchmarkError
from skipper.torchstore.algebra.manifest import Binding, Manifest
from skipper.torchstore.controller.grants import grant_all
from skipper.torchstore.controller.index import Index
from skipper.torchstore.controller.version import Contribution
from skipper.torchstore.protocol.messages import Wanted
from skipper.torchstore.protocol.origin import Origin, Turn
from skipper.torchstore.support.process import ProcessId

__all__ = ["ControllerCost", "measure_controller"]

_KEY = "policy"
_READS = 20


@dataclass(frozen=True, slots=True)
class ControllerCost:
    """Processor time of one core.

    Attributes:
        first_publish_s: For the first version: all shares, whether they agree, and whether they are the whole.
        publish_s: For a later one.
        read_s: For each read of it: the request unpickled, the grant made and pickled, the lease given back.
        first_nbytes: Bytes of the first grant of a reader, which brings all manifests.
        grant_nbytes: Bytes of a later one.
        request_nbytes: Bytes of the request for a later one.
    """

    first_publish_s: float
    publish_s: float
    read_s: float
    first_nbytes: int
    grant_nbytes: int
    request_nbytes: int


def measure_controller(manifests: Sequence[Manifest]) -> ControllerCost:
    """Publish two versions by as many ranks as there are manifests, and grant the second one to a reader.

    Raises:
        BenchmarkError: The shares do not make a version.
    """
    index = Index(lambda process, binding: None, lambda memory, spoilt: None, lambda history: None)
    bindings = [Binding(f"memory of rank {rank}", "direct", "", ()) for rank in range(len(manifests))]
    taken = []
    for step in (1, 2, 3):
        begin = time.process_time()
        for rank, (manifest, binding) in enumerate(zip(manifests, bindings, strict=True)):
            origin = Origin("trainers", rank, len(manifests))
            share = Contribution(
                ProcessId("trainers", rank + 1, 1),
                manifest.part,
                manifest,
                binding,
                generation=step,
                turn=Turn(origin, f"rank {rank}", step),
            )
            found = index.contribute(_KEY, share, None)
        taken.append(time.process_time() - begin)
        if not found.ready:
            raise BenchmarkError(f"the shares of {len(manifests)} ranks do not make a version")
    first_nbytes, _, _ = _read(index, Wanted(_KEY))
    known = tuple(record.id for pair in zip(manifests, bindings, strict=True) for record in pair)
    begin = time.process_time()
    for _ in range(_READS):
        grant_nbytes, request_nbytes, _ = _read(index, Wanted(_KEY, known=known))
    read_s = (time.process_time() - begin) / _READS
    return ControllerCost(taken[0], min(taken[1:]), read_s, first_nbytes, grant_nbytes, request_nbytes)


def _read(index: Index, wanted: Wanted) -> tuple[int, int, int]:
    """Bytes of the grant and of the request, and the lease."""
    request = pickle.dumps(wanted, protocol=5)
    grants = grant_all(index, (pickle.loads(request),), ProcessId("engine", 1, 1), 0.0)
    if grants is None:
        raise BenchmarkError("there is no version to be read")
    nbytes = len(pickle.dumps(grants, protocol=5))
    index.release(_KEY, grants[0].lease)
    return nbytes, len(request), grants[0].lease
