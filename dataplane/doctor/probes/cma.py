"""Whether one process may copy another's memory: ``cma.py``. Starts a second process, ``cma.py PID ADDRESS``.

It is the child that looks into its parent: a kernel that restricts ptrace lets parents look into their children, and
nobody else. Where it is each process' own choice (ptrace_scope 1) the parent chooses as UCX does, to let others look.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys

_NBYTES = 1 << 16
_PATTERN = b"\x5a" * _NBYTES
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)  # linux/prctl.h
_TIMEOUT_S = 5.0


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def main() -> None:
    """Own the memory, let a child at it, and pass its answer on."""
    memory = mmap.mmap(-1, _NBYTES)
    memory.write(_PATTERN)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
    command = [sys.executable, "-P", __file__, str(os.getpid()), str(address)]
    subprocess.run(command, check=True, timeout=_TIMEOUT_S)


def look(pid: int, address: int) -> None:
    """Read all of it, write its first byte; print {"read": errno or 0, "write": errno or 0, "whole": bytes right}."""
    libc = ctypes.CDLL(None, use_errno=True)
    mine = (ctypes.c_char * _NBYTES)()
    answer: dict[str, int | bool] = {}
    for name, length in (("read", _NBYTES), ("write", 1)):
        call = getattr(libc, f"process_vm_{name}v")
        call.restype = ctypes.c_ssize_t
        local, remote = _IoVec(ctypes.addressof(mine), length), _IoVec(address, length)
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        moved = call(pid, ctypes.byref(local), one, ctypes.byref(remote), one, none)
        answer[name] = 0 if moved == length else ctypes.get_errno()
        if answer[name]:
            break
    answer["whole"] = mine.raw == _PATTERN
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        look(*map(int, sys.argv[1:]))
    else:
        main()
