"""The doctor on this very machine, and its judgement of machines that this one is not."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skipper.dataplane.backends.base import BackendStatus
from skipper.dataplane.backends.ucx.wheels import UcxWheels
from skipper.dataplane.backends.verbs.port import Gid
from skipper.dataplane.doctor import devices, limits, probes
from skipper.dataplane.doctor.checks import Check, Examination, Verdict
from skipper.dataplane.doctor.command import main
from skipper.dataplane.doctor.examine import TrialError, trial
from skipper.dataplane.doctor.probes import ProbeError, ask
from skipper.dataplane.doctor.sysfs import Interface, RdmaPort
from skipper.dataplane.doctor.ucx import of_bells, of_version, of_wheels, ucx

ROOT = Path(__file__).resolve().parents[3]
ROCE = RdmaPort("mlx5_0", 1, "ACTIVE", "Ethernet", 100.0, False, (Gid(1, "10.0.0.7", "RoCE v2", "eth0"),))
H200 = {"index": 0, "name": "NVIDIA H200", "memory_nbytes": 150 << 30, "compute_capability": "9.0", "dmabuf": True}


def doctor(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skipper.dataplane.doctor", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_embedded_default_works_on_this_machine_and_the_json_says_so() -> None:
    done = doctor("--trial", "--json", "-")
    report = json.loads(done.stdout)
    told = {check["name"]: check for check in report["checks"]}
    for default in ("local", "shm", "ucx", "ucx version", "ucx, tried", "shared memory"):
        assert told[default]["verdict"] == "ok", told[default]
    assert told["cuda_ipc"]["verdict"] in ("ok", "absent")
    # Other parts of this machine may be in any state: the exit code says of the worst.
    assert done.returncode == (report["verdict"] == "problem"), done.stderr
    assert (report["schema_version"], report["tool"]) == (1, "doctor")
    assert set(report["facts"]) == {"system", "limits", "network", "rdma", "ucx", "gpu"}
    for check in report["checks"]:
        assert set(check) == {"area", "name", "verdict", "found", "advice"}
        assert check["found"]
    assert "is right" in told["shm"]["found"]
    assert "is right" in told["ucx, tried"]["found"]
    assert {"tcp", "posix", "self"} <= set(report["facts"]["ucx"]["transports"])
    assert report["facts"]["limits"]["nofile"]["soft"] > 0
    assert "problems: " in done.stderr, "the table goes to standard error"


def test_a_library_that_is_not_there_is_a_problem_with_an_advice(capsys: pytest.CaptureFixture[str]) -> None:
    done = doctor("--ucx-library", "/no/such/libucp.so.0")
    assert done.returncode == 1
    assert "PROBLEM" in done.stdout
    assert "name a libucp.so.0 that is there" in done.stdout


@pytest.mark.parametrize(
    ("installed", "cuda", "fitting"),
    [
        ([], None, "libucx-cu12"),
        ([], "12.8", "libucx-cu12"),
        ([], "13.0", "libucx-cu13"),
        (["libucx-cu13"], None, "libucx-cu13"),
        (["libucx-cu13"], "11.8", "libucx-cu13"),
        (["libucx-cu13"], "12.8", "libucx-cu12"),
        (["libucx-cu12", "libucx-cu13"], "13.0", "libucx-cu13"),
    ],
)
def test_the_wheel_of_ucx_that_fits_is_that_of_torchs_cuda_or_the_one_that_is_there(
    installed: list[str], cuda: str | None, fitting: str
) -> None:
    wheels = UcxWheels(dict.fromkeys(installed, "1.22.0"), cuda)
    assert wheels.fitting == fitting
    first, _, then = wheels.command.rpartition(" && ")
    assert then == f"{sys.executable} -m pip install '{fitting}==1.22.*'"
    assert first == (f"{sys.executable} -m pip uninstall -y {' '.join(installed)}" if installed else "")


@pytest.mark.parametrize(
    ("installed", "cuda", "verdict", "says"),
    [
        (["libucx-cu12"], None, Verdict.OK, "without CUDA, where each will do"),
        (["libucx-cu13"], "13.0", Verdict.OK, "for the CUDA 13.0 of torch"),
        (["libucx-cu12"], "13.0", Verdict.WARNING, "with a torch for CUDA 13.0"),
        (["libucx-cu12"], "11.8", Verdict.WARNING, "there is none for the CUDA 11.8 of torch"),
        (["libucx-cu12", "libucx-cu13"], None, Verdict.WARNING, "the later has overwritten the other"),
    ],
)
def test_a_wheel_of_ucx_that_is_not_alone_or_not_for_torchs_cuda_is_a_warning(
    installed: list[str], cuda: str | None, verdict: Verdict, says: str
) -> None:
    wheels = UcxWheels(dict.fromkeys(installed, "1.22.0"), cuda)
    check = of_wheels(wheels)
    assert check.verdict is verdict
    assert says in check.found
    fits_none = cuda == "11.8"
    assert check.advice == ("" if verdict is Verdict.OK or fits_none else wheels.command)


def test_no_ucx_is_a_warning_and_one_that_does_not_load_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    status = BackendStatus("ucx", False, "UCX cannot be loaded: no such file")

    def judged(wheels: UcxWheels, library: str | None) -> Check:
        monkeypatch.setattr("skipper.dataplane.doctor.ucx.installed_wheels", lambda: wheels)
        (check,), _ = ucx(status, library, cma=True, ports=[], networks=[], gpus=0)
        return check

    without, broken = UcxWheels({}, "13.0"), UcxWheels({"libucx-cu13": "1.22.0"}, "13.0")
    assert judged(without, None).verdict is Verdict.WARNING
    assert judged(without, None).advice.startswith(without.command)
    assert judged(broken, None).verdict is Verdict.PROBLEM
    assert judged(broken, None).advice == broken.command
    assert judged(without, "/no/such/libucp.so.0").verdict is Verdict.PROBLEM


def test_what_torch_is_built_for_is_known_without_importing_it() -> None:
    program = (
        "import sys; from skipper.dataplane.tensors import built_for_cuda as f; print(f(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    import torch

    assert done.stdout.split() == [str(torch.version.cuda), "False"], done.stderr


def test_bad_arguments_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "no/such/folder/x.json"]) == 2
    assert main(["--bogus"]) == 2
    assert main(["--help"]) == 0
    assert "exit codes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("raise OSError('no such thing')", "OSError: no such thing"),
    ],
)
def test_a_probe_that_hangs_or_crashes_costs_its_deadline_and_no_more(
    program: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.py").write_text(program)
    monkeypatch.setattr(probes, "_PROGRAM", str(tmp_path / "bad.py"))
    with pytest.raises(ProbeError, match=says):
        ask("bad", timeout=0.5 if "sleep" in program else 30)


def test_an_owner_that_cannot_start_fails_the_trial() -> None:
    with pytest.raises(TrialError, match="backend must be one of"):
        trial("pigeon")


def test_the_worst_check_decides() -> None:
    def of(*verdicts: Verdict) -> Verdict:
        return Examination([Check("a", "b", verdict, "c") for verdict in verdicts], {}).verdict

    assert of(Verdict.OK, Verdict.ABSENT) is Verdict.OK
    assert of(Verdict.WARNING, Verdict.OK) is Verdict.WARNING
    assert of(Verdict.WARNING, Verdict.PROBLEM) is Verdict.PROBLEM


def test_a_small_memlock_matters_only_where_there_is_an_rdma_device() -> None:
    # As a shell's user would run it: without the capability to lock any amount.
    program = """if True:
        import ctypes, resource
        from skipper.dataplane.doctor import limits
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
        limits.capable = lambda which: False
        for needed in (False, True):
            check, facts = limits.memlock(needed=needed)
            print(check.verdict, facts["memlock"], check.advice)
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    without, with_device = done.stdout.splitlines()
    assert without.startswith("ok {'soft': 65536, 'hard': 65536}")
    assert with_device.startswith("problem")
    assert "limits.conf" in with_device


def test_memory_that_may_not_be_read_gives_the_kernels_own_reason() -> None:
    answer = ask("cma", str(os.getpid()), "0")
    assert (answer["read"], answer["whole"]) == (errno.EFAULT, False)


@pytest.mark.parametrize(
    ("scope", "answer", "says"),
    [
        ("2", {"read": 1}, "kernel.yama.ptrace_scope=1"),
        (None, {"read": 1}, "--cap-add=SYS_PTRACE"),
        (None, {"read": 0, "write": 0, "whole": False}, "the bytes are not right"),
        ("1", {"error": "killed by signal 31"}, "killed by signal 31"),
    ],
)
def test_without_cma_there_is_a_warning_that_says_what_to_change(
    scope: str | None, answer: dict[str, Any], says: str
) -> None:
    check = limits.cma_check(False, scope, answer)
    assert check.verdict is Verdict.WARNING
    assert says in check.found + check.advice


@pytest.mark.parametrize(
    ("port", "asked", "verdict", "says"),
    [
        (ROCE, {"active_mtu": 4096, "register": ""}, Verdict.OK, "100 Gb/s, MTU 4096; GIDs 1: 10.0.0.7"),
        (ROCE, {"active_mtu": 4096, "register": "Cannot allocate memory"}, Verdict.PROBLEM, "ulimit -l unlimited"),
        (ROCE, {"error": "libibverbs has no provider for it"}, Verdict.PROBLEM, "apt-get install ibverbs-providers"),
        (
            RdmaPort("mlx5_0", 1, "DOWN", "InfiniBand", None, False, ()),
            {},
            Verdict.WARNING,
            "cable and the subnet manager",
        ),
        (RdmaPort("mlx5_0", 1, "ACTIVE", "Ethernet", 25.0, False, ()), {}, Verdict.WARNING, "an address"),
    ],
)
def test_a_port_is_judged_by_what_it_can_do(port: RdmaPort, asked: dict[str, Any], verdict: Verdict, says: str) -> None:
    check = devices.port_check(port, asked)
    assert check.verdict is verdict
    assert says in f"{check.found} {check.advice}"


@pytest.mark.parametrize(
    ("found", "error", "debian", "needed", "verdict", "says"),
    [
        (True, None, None, True, Verdict.OK, "rdma-core 44.0"),
        (True, "undefined symbol", None, True, Verdict.PROBLEM, "of the same rdma-core"),
        (False, None, "device.cpython-311-x86_64-linux-gnu.so", True, Verdict.PROBLEM, "site-packages"),
        (False, None, None, False, Verdict.WARNING, "apt-get install python3-pyverbs"),
    ],
)
def test_pyverbs_is_missed_where_a_port_is_active(
    found: bool, error: str | None, debian: str | None, needed: bool, verdict: Verdict, says: str
) -> None:
    facts = {"found": found, "rdma_core": "44.0", "debian_module": debian, "error": error}
    check = devices.pyverbs_check(facts, needed=needed)
    assert check.verdict is verdict
    assert says in f"{check.found} {check.advice}"


@pytest.mark.parametrize(
    ("answer", "module", "verdicts", "says"),
    [
        ({"cuda": "12.8", "gpus": [H200]}, True, [Verdict.OK, Verdict.OK], "NVIDIA H200 (150 GiB)"),
        (
            {"cuda": "12.8", "gpus": [{**H200, "dmabuf": False}]},
            True,
            [Verdict.OK, Verdict.WARNING],
            "modprobe nvidia-peermem",
        ),
        ({"cuda": "12.8", "gpus": []}, True, [Verdict.ABSENT], "sees none"),
        ({"error": "no such library", "missing": True}, False, [Verdict.ABSENT], "no NVIDIA driver"),
        ({"error": "no such library", "missing": True}, True, [Verdict.PROBLEM], "--gpus all"),
        ({"error": "cuInit: system not yet initialized", "missing": False}, True, [Verdict.PROBLEM], "nvidia-smi"),
    ],
)
def test_a_gpu_whose_memory_no_card_reaches_is_a_warning(
    answer: dict[str, Any], module: bool, verdicts: list[Verdict], says: str
) -> None:
    checks = devices.gpu_checks(answer, None, rdma=True, module=module)
    assert [check.verdict for check in checks] == verdicts
    assert any(says in f"{check.found} {check.advice}" for check in checks)


def test_a_device_that_ucx_does_not_see_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    status = BackendStatus("ucx", True, "UCX 1.22.0")
    lo = [Interface("lo", "unknown", None, 65536, software=True)]
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_7:1")
    checks, facts = ucx(status, None, cma=True, ports=[ROCE], networks=lo, gpus=1)
    told = {check.name: check for check in checks}
    assert told["ucx devices"].verdict is Verdict.PROBLEM
    assert facts["net_devices"] == ["mlx5_7:1"]
    assert told["ucx transports"].verdict is Verdict.WARNING, "the driver sees a GPU, and this UCX does not"


@pytest.mark.parametrize(
    ("version", "guarded", "verdict", "says"),
    [
        ((1, 22, 0), True, Verdict.OK, "guard against its known fault"),
        ((1, 22, 1), False, Verdict.WARNING, "may crash an owner"),
        ((1, 13, 1), None, Verdict.OK, "tried with Skipper"),
        ((1, 21, 0), None, Verdict.WARNING, "not tried"),
    ],
)
def test_a_version_of_ucx_that_was_not_tried_is_said(
    version: tuple[int, int, int], guarded: bool | None, verdict: Verdict, says: str
) -> None:
    check = of_version(version, guarded=guarded)
    assert check.verdict is verdict
    assert says in check.found
    assert ".".join(map(str, version)) in check.found


@pytest.mark.parametrize(("guarded", "verdict"), [(True, Verdict.OK), (False, Verdict.WARNING)])
def test_the_guard_of_the_bells_is_told(guarded: bool, verdict: Verdict) -> None:
    assert of_bells(guarded=guarded).verdict is verdict
