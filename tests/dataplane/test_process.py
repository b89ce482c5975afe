"""Start-up, fork and end: what a process holds, and when."""

import os
import re

import pytest

from tests.dataplane.scripts import run


def test_importing_has_no_side_effects() -> None:
    """Beyond those of numpy, which imports ctypes: with libffi 3.5 that keeps a descriptor of libffi itself."""
    run(
        "import os, sys, threading; before = dict(os.environ); import numpy; fds = len(os.listdir('/proc/self/fd'))\n"
        "from skipper import dataplane\n"
        "assert 'torch' not in sys.modules and 'skipper.dataplane.backends.ucx._ucp' not in sys.modules\n"
        "assert threading.active_count() == 1 and dict(os.environ) == before\n"
        "assert len(os.listdir('/proc/self/fd')) == fds\n"
    )


def test_shared_memory_alone_never_starts_ucx() -> None:
    run(
        "import sys, threading, numpy as np; from skipper import dataplane\n"
        "array = dataplane.empty_array(10, np.uint8)\n"
        "buffer = dataplane.RDMABuffer(array); buffer.serialize()\n"
        "buffer.read_into(bytearray(10)).get()\n"
        "dataplane.RDMABuffer(np.zeros(10)).read_into(np.zeros(10)).get()\n"
        "assert 'skipper.dataplane.backends.ucx._ucp' not in sys.modules and threading.active_count() == 1\n"
    )


def test_ucx_listens_on_no_port_unless_a_network_device_is_named() -> None:
    """A port of UCX asks for no proof."""
    assert _listening("") == set()
    assert _listening("dataplane.configure(ucx={'NET_DEVICES': 'lo'})\n") == {"0100007F"}  # 127.0.0.1, low byte first


def _listening(prepare: str) -> set[str]:
    """Addresses of every TCP socket that a process listens on once UCX serves, from the kernel's own table."""
    listening = run(
        "import os, numpy as np; from skipper import dataplane\n"
        + prepare
        + "buffer = dataplane.RDMABuffer(np.zeros(10)); buffer.serialize()\n"
        "mine = {os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if n.isdigit()\n"
        "        and os.path.exists(f'/proc/self/fd/{n}')}\n"
        "for table in ('tcp', 'tcp6'):\n"
        "    for line in open(f'/proc/net/{table}').readlines()[1:]:\n"
        "        field = line.split()\n"
        "        if field[3] == '0A' and f'socket:[{field[9]}]' in mine: print(field[1].split(':')[0])\n"
    ).split()
    return set(listening)


def test_a_process_that_used_ucx_ends_cleanly() -> None:
    assert (
        run(
            "import numpy; from skipper import dataplane\n"
            "b = dataplane.RDMABuffer(numpy.zeros(9)); b.serialize(); print('end')"
        )
        == "end\n"
    )


def test_a_forked_child_starts_afresh_and_harms_nothing() -> None:
    out = run(
        "import os, gc, sys, numpy as np; from skipper import dataplane\n"
        "array = dataplane.empty_array(1 << 16, np.uint8); array[:] = 7\n"
        "buffer = dataplane.RDMABuffer(array); raw = buffer.serialize()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    into = np.zeros(1 << 16, np.uint8)\n"
        "    theirs = dataplane.RDMABuffer.deserialize(raw)\n"
        "    assert theirs.backend == 'shm'\n"
        "    theirs.read_into(into).get(); assert (into == 7).all()\n"
        "    try: buffer.drop()\n"
        "    except dataplane.DataplaneError as error: assert 'only its owner' in str(error)\n"
        "    else: raise SystemExit(2)\n"
        "    own = dataplane.empty_array(1 << 16, np.uint8); own[:] = 9\n"
        "    del buffer, array; gc.collect()\n"
        "    dataplane.RDMABuffer(own).serialize()\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "again = dataplane.empty_array(1 << 16, np.uint8); again[:] = 1\n"
        "into = np.zeros(1 << 16, np.uint8); buffer.read_into(into).get()\n"
        "assert (into == 7).all() and (array == 7).all()\n"
        "print('unharmed')\n"
    )
    assert out == "unharmed\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_way_that_fails_is_followed_by_the_next_and_the_error_names_each() -> None:
    out = run(
        "import os, sys, numpy as np; from skipper import dataplane\n"
        "dataplane.configure(secret=b'of two users of a host')\n"
        "buffer = dataplane.RDMABuffer(dataplane.empty_array(1 << 16, np.uint8)); raw = buffer.serialize()\n"
        "if os.fork() == 0:\n"
        "    os.setgid(65534); os.setuid(65534)\n"
        "    theirs = dataplane.RDMABuffer.deserialize(raw)\n"
        "    assert theirs.backend == 'shm'\n"
        "    try: theirs.read_into(np.zeros(1 << 16, np.uint8)).get()\n"
        "    except dataplane.BackendUnavailableError as error: print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    ways = "shm: cannot map memory of .*; cuda_ipc: .*; ucx: its owner did not export it"
    assert re.match(f"no backend can reach .*: {ways}", out)


def test_ucx_in_a_forked_child_is_a_typed_error_and_the_parent_goes_on() -> None:
    out = run(
        "import os, sys, warnings, subprocess, numpy as np; from skipper import dataplane\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "array = np.arange(1000); buffer = dataplane.RDMABuffer(array); raw = buffer.serialize()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for attempt in (lambda: dataplane.RDMABuffer.deserialize(raw).read_into(np.zeros(1000)).get(),\n"
        "                    lambda: dataplane.RDMABuffer(np.zeros(9)).serialize()):\n"
        "        try: attempt()\n"
        "        except dataplane.BackendUnavailableError as error: assert 'fork' in str(error), error\n"
        "        else: os._exit(2)\n"
        "    ucx = next(s for s in dataplane.backends() if s.name == 'ucx')\n"
        "    assert not ucx.usable and 'fork' in ucx.reason\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "reader = ('import sys, numpy as np; from skipper import dataplane; into = np.zeros(1000, np.int64);'\n"
        "          'dataplane.RDMABuffer.deserialize(sys.stdin.buffer.read()).read_into(into, timeout=10).get();'\n"
        "          'assert (into == np.arange(1000)).all()')\n"
        "subprocess.run([sys.executable, '-c', reader], input=raw, check=True, timeout=30)\n"
        "print('serving')\n"
    )
    assert out == "serving\n"
