"""The program that contains hollow hosts: ``python -m skipper.control.cluster.hollow PARENT_PID``.

The first line of its standard input says how many hosts to make; it answers with their addresses. It answers each later
line, too, all in JSON. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from skipper.control.cluster.hollow.agents import HollowAgents, HollowHost
from skipper.control.cluster.hollow.ground import Ground
from skipper.control.runtime.procs.guard import die_with

_TICK_S = 0.25
"""How often it checks that the script still shows signs of life."""


def main() -> None:
    """Run as hollow hosts until the standard input ends."""
    die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the script
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what actors print must not be taken for answers
    given = json.loads(sys.stdin.readline())
    ground = Ground()
    agents = HollowAgents(ground, given["ips"], bytes.fromhex(given["secret"]))
    _say(answers, {"addresses": [host.address for host in agents.hosts]})
    _serve(agents, answers)
    agents.close()
    ground.close()


def _serve(agents: HollowAgents, answers: TextIO) -> None:
    """Run commands, and check the script's signs of life between them."""
    commands = os.fdopen(0, "rb", buffering=0, closefd=False)
    left = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            if selector.select(_TICK_S):
                if not (chunk := commands.read(4096)):
                    return
                *lines, left = (left + chunk).split(b"\n")
                for line in lines:
                    _say(answers, _do(agents, json.loads(line)))
            agents.look_for_life()


def _do(agents: HollowAgents, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "usage":
        return usage()
    if command["do"] == "cpu":
        return {"cpu_s": time.process_time()}
    host: HollowHost = agents.hosts[command["host"]]
    at_s = time.monotonic()
    if command["do"] == "kill":
        agents.kill(host)
    elif host.member is not None:
        if command["do"] == "freeze":
            host.member.stand_still()
        else:
            host.member.children[command["rank"]].kill()
    return {"at_s": at_s}


def usage() -> dict[str, Any]:
    """The resources of this process, as in `HostsUsage`."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    descriptors = os.listdir("/proc/self/fd")
    return {
        "cpu_s": time.process_time(),
        "memory_nbytes": resident,
        "descriptors": len(descriptors) - 1,  # without the one of this listing
        "threads": len(os.listdir("/proc/self/task")),
    }


def _say(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
