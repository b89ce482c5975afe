"""What the control group of this process says of its limits, under cgroups of version 2 and of version 1.

The files are described in the kernel's Documentation/admin-guide: cgroup-v2.rst, cgroup-v1/memory.rst and pids.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

_UNLIMITED = 1 << 60
"""Version 1 gives a number above this if there is no limit."""


def oom_kills() -> int | None:
    """How many processes of the group the kernel has killed because memory ran out; None if that is not known."""
    for folder in _folders("memory"):
        for name in ("memory.events", "memory.oom_control"):
            for line in _read(f"{folder}/{name}").splitlines():
                key, _, count = line.partition(" ")
                if key == "oom_kill":
                    return int(count)
    return None


def machine_oom_kills() -> int:
    """How many processes of the machine the kernel has killed because memory ran out."""
    lines = (line.partition(" ") for line in _read("/proc/vmstat").splitlines())
    return next((int(count) for key, _, count in lines if key == "oom_kill"), 0)


def memory_limit() -> int | None:
    """The group's limit of memory in bytes; None: it has none of its own."""
    return _limit("memory", "memory.max", "memory.limit_in_bytes")


def free_memory() -> int:
    """How many bytes this process may still take: what the machine has free, or less if the group's limit is lower.

    Files in the page cache count as free. The memory of other processes of the group is not subtracted from the limit.
    """
    found = next(line for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable:"))
    free, limit = int(found.split()[1]) << 10, memory_limit()
    if limit is None:
        return free
    resident = int(_read("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return min(free, max(limit - resident, 0))


def process_limit() -> int | None:
    """The group's limit of processes and threads together; None: it has none of its own."""
    return _limit("pids", "pids.max")


def process_count() -> int | None:
    """How many processes and threads the group has."""
    return next((int(text) for folder in _folders("pids") if (text := _read(f"{folder}/pids.current"))), None)


@dataclass(slots=True)
class OomWatch:
    """Tells which of several deaths by SIGKILL the kernel's out-of-memory killer has probably caused."""

    _explained: tuple[int, int] = (0, 0)

    @staticmethod
    def mark() -> tuple[int, int]:
        """Take a mark when a process starts."""
        return oom_kills() or 0, machine_oom_kills()

    def explain(self, mark: tuple[int, int]) -> str:
        """The explanation for a process that was killed and had started at ``mark``; empty: none."""
        now = self.mark()
        for place, (count, before, explained) in enumerate(zip(now, mark, self._explained, strict=True)):
            if count > max(before, explained):  # each kill explains one death
                first, second = (max(seen, then) for seen, then in zip(self._explained, mark, strict=True))
                self._explained = (first + (place == 0), second + 1)
                return _explanation(memory_limit() if place == 0 else None)
        return ""


def _explanation(limit: int | None) -> str:
    if limit is None:
        return "probably by the kernel's out-of-memory killer, since the machine ran out of memory"
    return (
        "probably by the kernel's out-of-memory killer, since the processes of its control group together reached the "
        f"limit of {limit} bytes of memory"
    )


def _limit(controller: str, *names: str) -> int | None:
    """The lowest limit on the way up."""
    found = []
    for folder in _folders(controller):
        for name in names:
            text = _read(f"{folder}/{name}").strip()
            if text.isdigit() and int(text) < _UNLIMITED:
                found.append(int(text))
    return min(found, default=None)


def _folders(controller: str) -> Iterator[str]:
    """The folders of this process' group and of those above it, as far as they are visible here."""
    place = _place(controller)
    if place is None:
        return
    top, path = place
    while True:
        if os.path.isdir(top + path):
            yield top + path
        if path in ("", "/"):
            return
        path = os.path.dirname(path)


def _place(controller: str) -> tuple[str, str] | None:
    """Where the hierarchy with a controller is mounted, and the path of this process' group in it."""
    paths = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            paths[name] = path
    found = None
    for line in _read("/proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        fields, (fstype, _, options) = mount.split(), kind.split(" ", 2)
        if fstype == "cgroup" and controller in options.split(",") and controller in paths:
            return fields[4], _below(fields[3], paths[controller])
        if fstype == "cgroup2" and "" in paths:
            found = fields[4], _below(fields[3], paths[""])
    return found


def _below(root: str, path: str) -> str:
    """A path of the hierarchy, seen from the part of it that is mounted."""
    return path[len(root) :] if root != "/" and path.startswith(root) else path


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
