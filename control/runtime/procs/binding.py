"""`CpuBinding`: the CPUs and the NUMA memory that a process is bound to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_MPOL_BIND = 2  # linux/mempolicy.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # asm/unistd.h
_CPU_KEYS = ("cpus", "physcpubind")
_NODE_KEYS = ("cpunodebind", "membind")


@dataclass(frozen=True, slots=True)
class CpuBinding:
    """What one process is bound to; an empty tuple leaves it as its parent is.

    Attributes:
        cpus: numbers of CPUs.
        memory_nodes: numbers of the NUMA nodes that its memory comes from.
    """

    cpus: tuple[int, ...] = ()
    memory_nodes: tuple[int, ...] = ()

    @staticmethod
    def of(options: Mapping[str, str]) -> CpuBinding:
        """The binding that ``spawn_procs(proc_bind=...)`` describes for one process.

        Args:
            options: ``cpus`` (or ``physcpubind``), lists of CPUs such as ``"0-3,8"``; ``cpunodebind``, NUMA nodes whose
                CPUs are used; ``membind``, NUMA nodes whose memory is. If several options name CPUs: the CPUs that all
                of them name.

        Raises:
            TypeError: an option is not a string.
            ValueError: an option is unknown or not a list of numbers, or names what this host does not have.
        """
        for key, value in options.items():
            if not isinstance(value, str):
                raise TypeError(f"proc_bind: {key!r} must be a string such as '0-3,8', not {value!r}")
            if key not in _CPU_KEYS + _NODE_KEYS:
                raise ValueError(f"proc_bind: unknown option {key!r}; there are {', '.join(_CPU_KEYS + _NODE_KEYS)}")
        named = [frozenset(_numbers(key, options[key])) for key in _CPU_KEYS if key in options]
        if "cpunodebind" in options:
            nodes = _numbers("cpunodebind", options["cpunodebind"])
            named.append(frozenset(cpu for node in nodes for cpu in _cpus_of(node)))
        cpus = frozenset.intersection(*named) if named else frozenset()
        usable = os.sched_getaffinity(0)
        if named and not (cpus and cpus <= usable):
            raise ValueError(f"proc_bind: {dict(options)} leaves the CPUs {sorted(cpus)}; there are {sorted(usable)}")
        memory = _numbers("membind", options["membind"]) if "membind" in options else ()
        for node in memory:
            _cpus_of(node)
        return CpuBinding(tuple(sorted(cpus)), memory)

    def apply(self) -> None:
        """Bind the calling thread, and with it the threads that it starts from now on.

        Raises:
            OSError: the kernel refuses.
        """
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)
        if self.memory_nodes:
            _bind_memory(self.memory_nodes)


def _numbers(key: str, text: str) -> tuple[int, ...]:
    """``"0-2,5"`` as 0, 1, 2, 5."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"proc_bind: {key!r} must be a list such as '0-3,8', not {text!r}")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def _cpus_of(node: int) -> tuple[int, ...]:
    path = _NODES / f"node{node}" / "cpulist"
    if not path.exists():
        raise ValueError(f"proc_bind: this host has no NUMA node {node}")
    text = path.read_text().strip()
    return _numbers("cpunodebind", text) if text else ()  # a node may have only memory


def _bind_memory(nodes: tuple[int, ...]) -> None:
    import ctypes

    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        raise OSError(f"binding memory is not supported on {os.uname().machine}")
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (nodes[-1] // bits + 1))()
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel uses one bit less than it is given: set_mempolicy(2), "maxnode".
    if libc.syscall(number, _MPOL_BIND, mask, ctypes.c_ulong(len(mask) * bits + 1)) != 0:
        raise OSError(ctypes.get_errno(), f"cannot bind memory to the NUMA nodes {nodes}")
