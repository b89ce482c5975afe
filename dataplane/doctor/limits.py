"""What the kernel allows this process: locked memory, files, shared memory, huge pages, other processes' memory."""

import mmap
import os
import resource
from pathlib import Path
from typing import Any

from skipper.dataplane.doctor.checks import Check, Verdict
from skipper.dataplane.doctor.probes import ProbeError, ask

_CAP_IPC_LOCK = 14  # linux/capability.h
_FEW_FILES = 1024
_SMALL_SHM = 64 << 20  # the default of container engines
_TRIED = 1 << 16

Facts = dict[str, Any]


def within_host() -> tuple[list[Check], Facts]:
    """Whether processes may copy each other's memory (CMA, which UCX uses within a host)."""
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    try:
        answer = ask("cma")
    except ProbeError as error:
        answer = {"error": str(error)}
    works = answer.get("read") == 0 and answer.get("write") == 0 and answer.get("whole") is True
    facts = {"ptrace_scope": scope, "cma": works, "cma_tried": answer}
    return [cma_check(works, scope, answer)], facts


def cma_check(works: bool, scope: str | None, answer: Facts) -> Check:
    """Whether UCX can copy between processes by the kernel (CMA), and what forbids it."""
    told = "no yama" if scope is None else f"ptrace_scope {scope}"
    if works:
        return Check(
            "within a host", "CMA", Verdict.OK, f"process_vm_readv and _writev work between processes ({told})"
        )
    number = answer.get("read") or answer.get("write") or 0
    reason = answer.get("error") or (os.strerror(number) if number else "the bytes are not right")
    advice = "let ptrace through: a container needs --cap-add=SYS_PTRACE, or a seccomp profile that allows it"
    if scope in ("2", "3"):
        advice = "sysctl kernel.yama.ptrace_scope=1 (3 is undone by a reboot only)"
    found = f"process_vm_readv fails between processes: {reason} ({told}); ucx moves memory over TCP instead, slower"
    return Check(
        "within a host", "CMA", Verdict.WARNING, found, f"{advice}; memory of dataplane.empty needs none of it"
    )


def memory() -> tuple[list[Check], Facts]:
    """Shared memory, huge pages, and the limits of files and memory."""
    checks = [_memfd(), _huge_pages(), _files(), _dev_shm()]
    free = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    facts = {
        "nofile": _limit(resource.RLIMIT_NOFILE),
        "transparent_hugepage": {
            "enabled": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
            "shmem_enabled": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        },
        "dev_shm_nbytes": None if free is None else free.f_blocks * free.f_frsize,
        "memory_limit_nbytes": memory_limit(),
    }
    return checks, facts


def memlock(*, needed: bool) -> tuple[Check, Facts]:
    """How much memory may be locked, as its registration with an RDMA device requires.

    Args:
        needed: There is such a device here.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = soft == resource.RLIM_INFINITY or capable(_CAP_IPC_LOCK)
    facts = {"memlock": _limit(resource.RLIMIT_MEMLOCK), "cap_ipc_lock": capable(_CAP_IPC_LOCK)}
    limit = f"soft {_size(soft)}, hard {_size(hard)}"
    if free:
        why = "" if soft == resource.RLIM_INFINITY else ", which does not bind this process (CAP_IPC_LOCK)"
        return Check("memory", "locked memory", Verdict.OK, f"{limit}{why}"), facts
    if not needed:
        return Check("memory", "locked memory", Verdict.OK, f"{limit}: only an RDMA device would need more"), facts
    advice = "ulimit -l unlimited"
    if hard != resource.RLIM_INFINITY:
        advice = "'* - memlock unlimited' in /etc/security/limits.conf; a systemd unit: LimitMEMLOCK=infinity; docker: "
        advice += "--ulimit memlock=-1"
    found = f"{limit}: no more than that can be registered with the RDMA device"
    return Check("memory", "locked memory", Verdict.PROBLEM, found, advice), facts


def capable(capability: int) -> bool:
    """Whether this process has a capability, by its number."""
    status = _read("/proc/self/status") or ""
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> capability & 1)


def memory_limit() -> int | None:
    """Bytes that this process' control group may use; None without a limit."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path)
        if text is not None and text.isdecimal() and int(text) < 1 << 60:
            return int(text)
    return None


def _memfd() -> Check:
    """Make, map, write and seal some shared memory, as `dataplane.empty` does."""
    try:
        fd = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _TRIED)
            with mmap.mmap(fd, _TRIED) as mapped:
                mapped[:4] = b"okay"
            whole = os.pread(fd, 4, 0) == b"okay"
        finally:
            os.close(fd)
    except OSError as error:
        advice = "Linux 3.17 or newer, and a seccomp profile that allows memfd_create"
        return Check("memory", "shared memory", Verdict.PROBLEM, f"memfd_create fails: {error.strerror}", advice)
    if not whole:
        return Check("memory", "shared memory", Verdict.PROBLEM, "a memfd does not hold what was written to it")
    limit = memory_limit()
    bound = "by nothing but memory" if limit is None else f"by the control group's {_size(limit)}"
    return Check("memory", "shared memory", Verdict.OK, f"memfd works; limited {bound}, not by /dev/shm")


def _huge_pages() -> Check:
    chosen = _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if chosen is None:
        return Check("memory", "huge pages", Verdict.ABSENT, "this kernel has no transparent huge pages")
    found = f"for shared memory: {chosen}"
    if chosen in ("never", "deny"):
        advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (root): far faster first writes"
        return Check("memory", "huge pages", Verdict.OK, found, advice)
    return Check("memory", "huge pages", Verdict.OK, found)


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"soft {_count(soft)}, hard {_count(hard)}"
    if 0 <= soft < _FEW_FILES:
        return Check(
            "memory", "open files", Verdict.WARNING, f"{found}: each peer costs a few", f"ulimit -n {_FEW_FILES}"
        )
    return Check("memory", "open files", Verdict.OK, found)


def _dev_shm() -> Check:
    """UCX keeps the queues of its own shared-memory transports there, a few megabytes for each process."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return Check("memory", "/dev/shm", Verdict.WARNING, "is not there; UCX's posix transport needs it", "mount it")
    nbytes = stat.f_blocks * stat.f_frsize
    if nbytes <= _SMALL_SHM:
        found = f"{_size(nbytes)}: enough for a few processes that use UCX"
        return Check("memory", "/dev/shm", Verdict.WARNING, found, "--shm-size=1g for docker")
    return Check("memory", "/dev/shm", Verdict.OK, f"{_size(nbytes)}, used by UCX's posix transport only")


def _limit(which: int) -> dict[str, int | None]:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return {"soft": soft, "hard": hard}


def _chosen(path: str) -> str | None:
    """The word in brackets of a file such as ``always [madvise] never``."""
    text = _read(path)
    return None if text is None or "[" not in text else text.partition("[")[2].partition("]")[0]


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _count(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _size(nbytes: int) -> str:
    if nbytes == resource.RLIM_INFINITY:
        return "unlimited"
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes >> 10} KiB"
