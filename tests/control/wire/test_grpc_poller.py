"""gRPC runs on the engine that control chooses, and the choice leaves no trace.

gRPC complains about experiments that it does not know: that shows what it has read.
"""

from collections.abc import Callable

import pytest

from tests.control.conftest import Script

START = """
import os
from skipper.control.wire import grpc_poller
{before}
from skipper.control.runtime import current_runtime as job

job.current().listen_beyond("127.0.0.1", None, data_plane_is_open=False)
print({{name: os.environ.get(name) for name in grpc_poller._CHOICE}})
"""
NOTHING_LEFT = (
    "{'GRPC_EXPERIMENTS': None, 'GRPC_POLL_STRATEGY': None, 'GRPC_ENABLE_FORK_SUPPORT': None, 'GRPC_VERBOSITY': None}\n"
)
PRETEND = "grpc_poller._CHOICE['GRPC_EXPERIMENTS'] = 'made_up'"


def test_the_choice_is_one_that_grpc_knows_and_leaves_no_trace_in_the_environment(
    script: Callable[[str], Script],
) -> None:
    assert script(START.format(before="")).finish() == (0, NOTHING_LEFT, "")


def test_grpc_reads_the_choice_while_it_is_imported(script: Callable[[str], Script]) -> None:
    code, out, err = script(START.format(before=PRETEND)).finish()
    assert (code, out) == (0, NOTHING_LEFT)
    assert "Unknown experiment: made_up" in err


@pytest.mark.parametrize(
    "before", ["import grpc", "os.environ['GRPC_EXPERIMENTS'] = ''", "grpc_poller._KNOWN_UNTIL = (1, 0)"]
)
def test_what_was_decided_before_stands(script: Callable[[str], Script], before: str) -> None:
    code, _, err = script(START.format(before=f"{PRETEND}\n{before}")).finish()
    assert (code, err) == (0, "")


def test_a_variable_of_the_users_stands_beside_the_others(script: Callable[[str], Script]) -> None:
    before = f"{PRETEND}\nos.environ['GRPC_POLL_STRATEGY'] = 'epoll1'"
    code, out, err = script(START.format(before=before)).finish()
    assert (code, out) == (0, NOTHING_LEFT.replace("'GRPC_POLL_STRATEGY': None", "'GRPC_POLL_STRATEGY': 'epoll1'"))
    assert "Unknown experiment: made_up" in err


def test_a_fork_is_silent_and_leaves_both_processes_sound(script: Callable[[str], Script]) -> None:
    running = script(
        """
import os
import sys
import warnings

from skipper.control import Actor, endpoint, this_host
from skipper.control.runtime import current_runtime as runtime


class Worker(Actor):
    @endpoint
    def begin_grpc(self) -> bool:
        runtime.current().listen_beyond("127.0.0.1", None, data_plane_is_open=False)
        return "grpc" in sys.modules

    @endpoint
    def fork(self) -> int:
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and newer say so of every fork beside threads
        if (pid := os.fork()) == 0:
            os._exit(5)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


worker = this_host().spawn_procs().spawn("worker", Worker)
print(worker.begin_grpc.call_one().get(20))
print(worker.fork.call_one().get(20), worker.fork.call_one().get(20))
"""
    )
    assert running.finish() == (0, "True\n5 5\n", "")
