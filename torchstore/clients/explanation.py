"""The plan of a read, in figures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

import torch

from skipper import dataplane
from skipper.torchstore.clients.catalog import Opened
from skipper.torchstore.clients.delta_read import DeltaRead
from skipper.torchstore.tensors.plan import Plan

_PROBE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ReadLink:
    """One source of a read, and how its bytes move.

    The example of `Explanation` shows one.

    Attributes:
        source: The owner of the memory: a volume, or a publisher's process.
        backend: The backend that moves the bytes: "local", "shm", "cuda_ipc", "ucx", "verbs".
        nbytes: How many bytes.
        parts: In how many blocks, before adjacent ones are merged.
    """

    source: str
    backend: str
    nbytes: int
    parts: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plan of one read, in figures; printing it gives a small table.

    Attributes:
        mode: "snapshot", "direct" or "inline".
        tensors: How many tensors are read.
        needed: Bytes of the destination.
        nbytes: Bytes that move.
        segments: Contiguous runs after adjacent blocks were merged.
        links: One for each source.
        known: Whether the plan already existed.
        compile_s: How long making the plan took, now or before.
        predicted_s: How long moving the bytes should take.
        proof_nbytes: Bytes that are fetched in addition to ``nbytes`` to verify what arrives: checksums, and cells that
            the destination cuts; 0 if the version has no checksums.
        saved_nbytes: ``delta=True``: bytes that the destination already has and that do not move.
        rate_from: The basis of the prediction: "last read" of this process, or "memcpy", which is a lower bound.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        ts.initialize()
        ts.put_state_dict({"w": torch.ones(256)}, "policy")
        plan: torchstore.Explanation = ts.explain("policy", {"w": torch.empty(256)})
        link: torchstore.ReadLink = plan.links[0]
        print(plan.nbytes, plan.amplification, link.nbytes, len(plan.links))  # 1024 1.0 1024 1
        ts.shutdown()
        ```
    """

    key: str
    version: int
    mode: str
    tensors: int
    needed: int
    nbytes: int
    segments: int
    links: tuple[ReadLink, ...]
    known: bool
    compile_s: float
    predicted_s: float
    rate_from: str
    proof_nbytes: int = 0
    saved_nbytes: int = 0

    @property
    def amplification(self) -> float:
        """Bytes moved for each byte needed; 1.0 is the best possible."""
        return self.nbytes / self.needed if self.needed else 1.0

    def __str__(self) -> str:
        lines = [
            f"version {self.version} of {self.key!r} ({self.mode}): {self.tensors} tensors, {self.nbytes:,} bytes "
            f"in {self.segments:,} segments, amplification {self.amplification:.2f}",
            f"  plan {'known' if self.known else 'made now'} ({self.compile_s * 1e3:.1f} ms); "
            f"{self.predicted_s * 1e3:.1f} ms to move, estimated from {self.rate_from}",
        ]
        if self.saved_nbytes:
            lines.append(f"  {self.saved_nbytes:>14,} bytes are already there from the previous version")
        if self.proof_nbytes:
            lines.append(f"  {self.proof_nbytes:>14,} bytes of checksums verify what arrives")
        lines += [
            f"  {link.nbytes:>14,} bytes in {link.parts:,} blocks from {link.source} by {link.backend}"
            for link in self.links
        ]
        return "\n".join(lines)


def explain_plan(
    key: str, opened: Opened, plan: Plan, reduced: DeltaRead | None = None, *, known: bool, last_rate: float
) -> Explanation:
    """The figures of a plan."""
    links, part = [], reduced or plan
    for source, writer, (nbytes, parts) in zip(opened.sources, opened.writers, part.of_source, strict=True):
        if not parts or source.binding is None:
            continue
        where = f"volume {source.binding.volume!r}" if source.binding.mode == "snapshot" else str(writer)
        links.append(ReadLink(where, source.binding.buffers[0].backend, nbytes, parts))
    return Explanation(
        key,
        opened.grant.version,
        opened.mode,
        plan.tensors,
        plan.needed,
        part.nbytes,
        part.segments,
        tuple(links),
        known,
        plan.compile_s,
        part.nbytes / (last_rate or _memcpy_rate()),
        "last read" if last_rate else "memcpy",
        plan.proof.nbytes if plan.proof is not None else 0,
        plan.nbytes - part.nbytes,
    )


@lru_cache(maxsize=1)
def _memcpy_rate() -> float:
    """Bytes per second of one thread's copy, measured once."""
    source, target = (torch.ones(_PROBE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2))
    dataplane.memcpy(target, source)
    begin = time.perf_counter()
    dataplane.memcpy(target, source)
    return _PROBE_BYTES / (time.perf_counter() - begin)
