"""`skipper dispatch` on several machines: what a step of training sends to each of them."""

import json
from pathlib import Path

import pytest

from skipper.benchmarks.dispatch.command import main
from tests.hosts.conftest import addresses_of, serve
from tests.hosts.netns import Network


@pytest.mark.timeout(300)
def test_messages_per_step_and_host_are_counted(
    net: Network, secret_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines, listed, report = net.machines[:2], tmp_path / "hosts", tmp_path / "report.json"
    for machine in machines:
        serve(machine, "--insecure", "--secret-file", str(secret_file))
    listed.write_text("\n".join(addresses_of(machines)), encoding="utf-8")
    there = ("--hosts", str(listed), "--secret-file", str(secret_file), "--insecure", "--per-host", "2")
    try:
        assert main(["--quick", *there, "--json", str(report)]) == 0, capsys.readouterr().err
    finally:
        for machine in machines:
            machine.clear()
    found = {row["name"]: row for row in json.loads(report.read_text(encoding="utf-8"))["results"]}
    for name in ("step", "step_delegated", "compiled_step", "compiled_step_delegated"):
        row = found[f"messages_per_{name}_and_host"]
        assert (row["n"], row["hosts"], row["per_host"]) == (2, 2, 2)
        assert row["min"] > 0
    assert found["step_us"]["reference"]["name"] == "ddp_step_us"
