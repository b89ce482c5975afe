"""The RL example over machines, with one command."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from skipper.control.cluster.hosts import certs
from tests.hosts.conftest import addresses_of, start_agent, wait_for_agent
from tests.hosts.netns import Machine, Network
from tests.integration.example_process import ExampleProcess, run, running, wait_until

RL = ("-m", "examples.rl_weight_sync")
RUN_S = 120.0
TENSORS = 41


@pytest.fixture
def machines(net: Network) -> Iterator[list[Machine]]:
    """Four of them, which are cleared in the end."""
    yield net.machines
    for machine in net.machines:
        machine.plug()
        machine.clear()


def serve_all(machines: list[Machine], *given: Sequence[str]) -> None:
    """Start their agents, each with options of its own."""
    agents = [start_agent(machine, *options) for machine, options in zip(machines, given, strict=True)]
    for agent in agents:
        wait_for_agent(agent)


def command(machines: list[Machine], folder: Path, *more: str) -> tuple[str, ...]:
    """The one command."""
    listed = folder / "hosts"
    listed.write_text("\n".join(addresses_of(machines)))
    there = ("--hosts", str(listed), *more)
    return (*RL, *there, "--verify", "--json", str(folder / "report.json"), "--png", str(folder / "curves.png"))


def test_trainers_and_generators_on_four_machines_agree_bit_for_bit_and_survive_a_kill(
    machines: list[Machine], secret_file: Path, tmp_path: Path
) -> None:
    without_tls = ("--insecure", "--secret-file", str(secret_file))
    serve_all(machines, *[without_tls] * 4)
    example = run(*command(machines, tmp_path, *without_tls, "--steps", "3", "--kill-at", "2"), timeout=RUN_S)
    assert example.process.returncode == 0, example.stdout + example.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["hosts"] == 4
    assert report["mismatched_tensors"] == 0
    assert report["compared_tensors"] >= TENSORS * 2 * (2 + 3)  # both replicas first and one of them always
    assert report["killed_processes"] == report["replaced_replicas"] == 1, example.stdout + example.stderr
    assert report["lost_hosts"] == 0


def test_a_generators_host_that_is_cut_off_is_replaced_and_used_again_when_it_is_back(
    net: Network, machines: list[Machine], tmp_path: Path
) -> None:
    authority, lost = certs.make_authority(tmp_path / "authority"), machines[3]
    folders = [certs.issue(authority, tmp_path / machine.name, [machine.address], role="host") for machine in machines]
    serve_all(machines, *[("--certs", str(folder)) for folder in folders])
    own = certs.issue(authority, tmp_path / "script", [net.address], role="script")
    options = ("--certs", str(own), "--data-plane", "--steps", "14", "--generators", "1")
    with running(*command(machines, tmp_path, *options)) as example:
        wait_for(example, lambda: "step 1/" in example.stdout)
        lost.pull()
        wait_for(example, lambda: f"lost: {lost.address}" in example.stdout)
        lost.plug()
        wait_for(example, lambda: f"back: {lost.address}" in example.stdout)
        assert example.wait(RUN_S) == 0, example.stdout + example.stderr
        example.assert_nobody_left()
    assert "generators-1 is being replaced" in example.stderr
    assert "no sign of life" in example.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lost_hosts"] == report["returned_hosts"] == 1
    assert report["mismatched_tensors"] == 0
    assert report["compared_tensors"] >= TENSORS * (1 + 14)


def wait_for(example: ExampleProcess, condition: Callable[[], object]) -> None:
    def there_or_over() -> object:
        return condition() or example.process.poll() is not None

    wait_until(there_or_over, RUN_S, lambda: example.stdout + example.stderr)
    assert condition(), example.stdout + example.stderr
