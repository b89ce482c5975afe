"""The processes of these tests leave nothing behind that is theirs, and touch nothing that is not."""

import subprocess
import sys
from pathlib import Path

from tests.engines.processes import kill, shared_memory_of

PROGRAM = """
import multiprocessing, sys, time
from multiprocessing import shared_memory

if __name__ == "__main__":
    memory = shared_memory.SharedMemory(create=True, size=4096)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    print(memory.name, flush=True)
    time.sleep(600)
"""


def start() -> tuple["subprocess.Popen[bytes]", Path]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    return process, Path("/dev/shm") / process.stdout.readline().decode().strip()


def test_what_a_killed_process_leaves_in_shared_memory_goes_and_that_of_others_stays() -> None:
    (mine, path), (other, foreign) = start(), start()
    with mine, other:
        try:
            left = shared_memory_of(mine.pid)
            assert path in left
            assert any(each.name.startswith("sem.mp-") for each in left)
            assert foreign not in left
            kill(mine)
            assert not any(each.exists() for each in left)
            assert foreign.exists()
        finally:
            kill(mine)
            kill(other)
    assert not foreign.exists()
