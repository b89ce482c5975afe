from collections.abc import Callable
from pathlib import Path

import pytest

from skipper.control.support import cgroup
from skipper.control.support.cgroup import OomWatch
from tests.control.cgroups import V1, group_of_its_own
from tests.control.conftest import Script

MEMORY_NBYTES = 192 << 20
LIMIT = {"memory__limit_in_bytes" if (V1 / "memory").is_dir() else "memory__max": MEMORY_NBYTES}

EATER = Path(__file__).with_name("eater_script.py")

IN_GROUP = """
import os
open("{group}/cgroup.procs", "w").write(str(os.getpid()))
from skipper.control.support import cgroup
print({what})
"""


def test_a_process_that_the_kernel_killed_for_want_of_memory_is_told_apart_from_one_that_was_killed(
    script: Callable[..., Script],
) -> None:
    with group_of_its_own("memory", **LIMIT) as group:
        code, out, err = script(EATER, str(group)).finish()
        assert code == 0, err
        eaten, killed = out.splitlines()
        assert "was killed by signal 9 (SIGKILL), probably by the kernel's out-of-memory killer" in eaten
        assert f"the limit of {MEMORY_NBYTES} bytes" in eaten
        assert "was killed by signal 9 (SIGKILL)" in killed
        assert "out-of-memory" not in killed


def test_each_kill_for_want_of_memory_explains_one_death(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [3, 7]
    monkeypatch.setattr(OomWatch, "mark", staticmethod(lambda: tuple(counts)))
    monkeypatch.setattr(cgroup, "memory_limit", lambda: 1024)
    watch, mark = OomWatch(), (3, 7)
    assert watch.explain(mark) == ""
    counts[:] = [4, 8]
    assert "limit of 1024 bytes" in watch.explain(mark)
    assert watch.explain(mark) == ""
    counts[:] = [4, 9]
    assert "the machine ran out of memory" in watch.explain(mark)
    assert watch.explain(mark) == ""


def test_the_limits_of_a_group_are_read(script: Callable[..., Script]) -> None:
    with group_of_its_own("pids", pids__max=321) as group:
        code, out, err = script(
            IN_GROUP.format(group=group, what="cgroup.process_limit(), cgroup.process_count()")
        ).finish()
        assert (code, out) == (0, "321 1\n"), err


def test_a_process_may_take_what_its_group_leaves_it(script: Callable[..., Script]) -> None:
    with group_of_its_own("memory", **LIMIT) as group:
        code, out, err = script(IN_GROUP.format(group=group, what="cgroup.free_memory()")).finish()
        assert code == 0, err
        assert 0 < int(out) < MEMORY_NBYTES
