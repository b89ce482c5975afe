"""`skipper weights`: files and a running store, against a certificate."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from skipper import control
from skipper import torchstore as ts
from skipper.cli.main import main
from skipper.torchstore.proofs.certificate import certify
from skipper.torchstore.tensors.certifying import certifiable_tiles
from skipper.torchstore.tensors.packing import pack

JOB = "weights-under-test"


def weights() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    return {name: torch.randn(40, 300, generator=chance).bfloat16() for name in ("a", "b")}


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """The file of what is certified of `weights`, without a store."""
    tiles = certifiable_tiles(pack("policy", "state_dict", "snapshot", weights()), ())
    path = tmp_path / "certificate"
    certify("policy", 7, {0: tiles}).save(path)
    return path


def test_files_that_hold_the_version_together_are_it(
    certificate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.pt"
    save_file({"a": weights()["a"]}, one)
    torch.save({"b": weights()["b"], "step": 7}, other)
    assert main(["weights", "verify", str(certificate), str(one), str(other)]) == 0
    assert "this is version 7 of 'policy': 48,000 bytes, root " in capsys.readouterr().out

    assert main(["weights", "verify", str(certificate), str(one)]) == 1
    assert "the tensors given are correct, but the certificate also has 'b'" in capsys.readouterr().err
    assert main(["weights", "verify", str(certificate), str(one), str(one)]) == 1
    assert "'a' is also in another file" in capsys.readouterr().err


def test_the_first_wrong_tensor_and_the_place_in_it_are_named(
    certificate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = weights()
    changed["b"].view(torch.int16)[20, 270] ^= 1
    path = tmp_path / "model.safetensors"
    save_file(changed, path)
    assert main(["weights", "verify", str(certificate), str(path)]) == 1
    assert "this is not version 7 of 'policy': b[16:32, 256:300] differ" in capsys.readouterr().err


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('it was run')",)


@pytest.mark.parametrize("content", ["text", "pickle", "number", "absent", "no safetensors"])
def test_what_is_no_file_of_tensors_is_refused_and_not_run(
    content: str, certificate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("model.safetensors" if content == "no safetensors" else "model.pt")
    if content in ("text", "no safetensors"):
        path.write_text("weights")
    elif content != "absent":
        torch.save(Harmful() if content == "pickle" else 3, path)
    assert main(["weights", "verify", str(certificate), str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_bad_arguments_and_files_that_are_no_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights"]) == 2
    assert main(["weights", "verify"]) == 2
    path = tmp_path / "text"
    path.write_text("text")
    assert main(["weights", "verify", str(path)]) == 1
    assert f"{path}, line 1" in capsys.readouterr().err


async def skipper(*words: str) -> tuple[int, str]:
    """Run the command in a process of its own. Returns its exit code and what it has said."""
    ran = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "skipper.cli.main", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await ran.communicate()
    assert ran.returncode is not None
    return ran.returncode, said.decode()


@pytest.mark.usefixtures("store")
@pytest.mark.timeout(120)
async def test_the_store_of_a_running_job_gives_certificates_and_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    held = weights()
    await ts.put_state_dict(held, "policy", mode="direct", certify=True)
    path = str(tmp_path / "saved")
    save, verify = ["weights", "certificate", "policy", path, "--job", JOB], ["weights", "verify", path, "--job", JOB]

    assert await asyncio.to_thread(main, save) == 3
    assert JOB in capsys.readouterr().err
    with control.serve_job(JOB):
        root = (await ts.certificate("policy")).root
        assert await skipper(*save) == (0, f"version 1 of 'policy': root {root}\n")
        assert await skipper(*verify) == (0, f"this is version 1 of 'policy': 48,000 bytes, root {root}\n")
        # As a process of the job, too:
        held["a"][3, 3] += 1  # without a fence
        assert await asyncio.to_thread(main, verify) == 1
        assert "a[0:16, 0:256] differ" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["weights", "certificate", "nothing", *save[3:]]) == 1
        assert "no value under the key 'nothing'" in capsys.readouterr().err
