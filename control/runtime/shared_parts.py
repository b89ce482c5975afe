"""`SharedParts`: what several runtimes in one process of the operating system share, in place of one each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skipper.control.runtime.executor import ExecutorChoice
    from skipper.control.runtime.procs.launcher import ChildLauncher
    from skipper.control.wire.network import Network
    from skipper.control.wire.process_ref import ProcessRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """What one of these runtimes gets.

    Attributes:
        network_for: makes the network of a process, given the process and its job's secret.
        executor_for: makes what runs its actors.
        launcher: starts its children.
        end: the last step of its end, which must not end the others.
    """

    network_for: Callable[[ProcessRef, bytes], Network]
    executor_for: ExecutorChoice
    launcher: ChildLauncher
    end: Callable[[], object]
