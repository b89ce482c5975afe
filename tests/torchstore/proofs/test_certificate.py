"""Certificates of versions: whatever puts them, in stores and in files."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.algebra.manifest import Mode
from skipper.torchstore.proofs.certificate import Certificate
from tests.torchstore.oracle import random_tensor

MODES: list[Mode] = ["snapshot", "direct"]


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "q": random_tensor(torch.bfloat16, (40, 300), seed),
        "norm": random_tensor(torch.float32, (300,), seed + 1),
        "step": torch.tensor(seed),
        "empty": torch.empty(0, 3),
    }


async def certified(state_dict: dict[str, torch.Tensor], key: str = "policy") -> ts.Certificate:
    await ts.put_state_dict(state_dict, key, certify=True)
    return await ts.certificate(key)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("mode", MODES)
async def test_a_version_is_certified_as_it_was_put_and_its_readers_prove_it(mode: Mode) -> None:
    state = weights()
    number = await ts.put_state_dict({"model": state, "lr": 0.1}, "policy", mode=mode, certify=True)
    certificate = await ts.certificate("policy", version=number)
    assert (certificate.key, certificate.version) == ("policy", number)
    assert {name for name, _ in certificate.tensors} == {f"model.{name}" for name in state}
    assert certificate.nbytes == sum(tensor.nbytes for tensor in state.values())
    proof = ts.prove(await ts.get_state_dict("policy"), certificate)
    assert (proof.covered, proof.root) == (1.0, certificate.root)
    assert proof.is_right
    assert proof.is_whole


@pytest.mark.usefixtures("store")
async def test_the_root_says_what_the_tensors_are_and_not_how_they_were_put() -> None:
    base = (await certified(weights())).root
    for mode in MODES:
        await ts.put_state_dict(weights(), "other", mode=mode, checksum=True, certify=True)
        assert (await ts.certificate("other")).root == base
    for index in (0, 1):
        part = {name: tensor for at, (name, tensor) in enumerate(weights().items()) if at % 2 == index}
        await ts.put_state_dict(part, "parts", publisher=(index, 2), certify=True)
    assert (await ts.certificate("parts")).root == base
    names = {f"{name}2": tensor for name, tensor in weights().items()}
    shape = weights() | {"q": weights()["q"].reshape(20, 600)}
    dtype = weights() | {"q": weights()["q"].view(torch.float16)}
    assert len({base, *[(await certified(other)).root for other in (names, shape, dtype, weights(1))]}) == 5


@pytest.mark.usefixtures("store")
async def test_tied_tensors_and_views_are_certified_by_their_elements() -> None:
    whole = random_tensor(torch.bfloat16, (64, 512), 2)
    tied = {"a": whole, "b": whole, "t": whole.t(), "row": whole[3]}
    certificate = await certified(tied)
    separate = await certified({name: tensor.clone() for name, tensor in tied.items()})
    assert certificate.root == separate.root
    assert certificate.tensors["a", ""].digests == certificate.tensors["b", ""].digests


@pytest.mark.usefixtures("store")
async def test_what_is_not_certified_has_no_certificate() -> None:
    with pytest.raises(ts.KeyNotFoundError):
        await ts.certificate("policy")
    await ts.put_state_dict(weights(), "policy")
    with pytest.raises(ts.NotCertifiedError, match=r"version 1 of 'policy'.*without certify=True"):
        await ts.certificate("policy")
    await ts.put_state_dict({"a": torch.ones(30)}, "parts", publisher=(0, 2), certify=True)
    with pytest.raises(ts.PartiallyPublishedError):
        await ts.certificate("parts")
    await ts.put_state_dict({"b": torch.ones(30)}, "parts", publisher=(1, 2))
    with pytest.raises(ts.NotCertifiedError, match="by rank 1 of 2"):
        await ts.certificate("parts")
    await ts.put("value", torch.ones(5000))
    with pytest.raises(ts.NotCertifiedError):
        await ts.certificate("value")


@pytest.mark.usefixtures("store")
async def test_the_last_four_certificates_outlive_the_bytes() -> None:
    roots = []
    for number in range(1, 7):
        roots.append((await certified(weights(number))).root)
    assert await ts.versions("policy") == (6,)
    for number in (3, 4, 5, 6):
        assert (await ts.certificate("policy", version=number)).root == roots[number - 1]
    with pytest.raises(ts.VersionNotFoundError, match="3, 4, 5, 6"):
        await ts.certificate("policy", version=2)
    await ts.delete("policy")
    with pytest.raises(ts.KeyNotFoundError):
        await ts.certificate("policy", version=6)


async def test_a_store_certifies_all_state_dicts_if_it_was_initialized_so() -> None:
    await ts.initialize(certify=(torch.bfloat16,), keep_versions=2)
    await ts.put_state_dict({"w": torch.ones(30)}, "policy")
    assert ("w", "torch.bfloat16") in (await ts.certificate("policy")).tensors
    await ts.put_state_dict({"w": torch.ones(30)}, "policy", certify=False)
    with pytest.raises(ts.NotCertifiedError):
        await ts.certificate("policy")
    await ts.rollback("policy", 1)
    assert (await ts.certificate("policy")).version == 1
    await ts.shutdown()


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("wrong", [1, "yes", [torch.bfloat16], (3,), torch.bfloat16])
async def test_what_certify_cannot_mean_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="certify is True, False, or a tuple"):
        await ts.put_state_dict(weights(), "policy", certify=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="certify"):
        await ts.initialize(store_name="other", certify=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int8"):
        await ts.put_state_dict(weights(), "policy", certify=(torch.int8,))
    assert await ts.keys() == []


@pytest.mark.usefixtures("store")
async def test_replicas_with_other_bytes_are_found_when_the_certificate_is_made() -> None:
    for rank in (0, 1):
        await ts.put_state_dict({"w": torch.full((5000,), float(rank))}, "w", publisher=(rank, 2), certify=True)
    with pytest.raises(ts.ReplicaMismatchError, match="ranks 0 and 1 hold different bytes of w"):
        await ts.certificate("w")
    for rank in (0, 1):
        forms = (torch.bfloat16,) if rank else ()
        part = {"w": torch.ones(5000)} if rank == 0 else {"v": torch.ones(5000)}
        await ts.put_state_dict(part, "v", publisher=(rank, 2), certify=forms)
    assert ("v", "torch.bfloat16") in (await ts.certificate("v")).tensors  # each of them says it of its own


@pytest.mark.usefixtures("store")
async def test_a_certificate_survives_its_file(tmp_path: Path) -> None:
    await ts.put_state_dict(weights() | {"ö\n\u2028": torch.ones(3)}, "policy", certify=(torch.float16,))
    certificate = await ts.certificate("policy")
    path = tmp_path / "policy.certificate"
    certificate.save(path)
    loaded = ts.Certificate.load(path)
    assert loaded == certificate
    assert loaded.root == certificate.root
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


LINE = '{"tensor": "w", "dtype": "float32", "shape": [3], "tiles": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}\n'
HEAD = '{"format": "skipper.certificate", "version": 1}\n'
SECOND = '{"key": "k", "number": 1, "root": "%s"}\n'


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("", 1, "Expecting value"),
        ('{"format": "skipper.certificate", "version": 2}\n', 1, "does not begin with"),
        (HEAD, 2, "a key, a number and a root"),
        (HEAD + '{"key": "k", "number": true, "root": ""}\n', 2, "a key, a number and a root"),
        (HEAD + SECOND % "00" + LINE + LINE, 4, "'w' comes twice"),
        (HEAD + SECOND % "00" + LINE.replace("[3]", "[-3]"), 3, "a shape"),
        (HEAD + SECOND % "00" + LINE.replace("[3]", "[5000]"), 3, "32 bytes of digests"),
        (HEAD + SECOND % "00" + LINE.replace("[3]", f"[{1 << 61}, {1 << 61}]"), 3, "32 bytes of digests"),
        (HEAD + SECOND % "00" + LINE.replace("float32", "floaty"), 3, "knows no dtype"),
        (HEAD + SECOND % "00" + LINE.replace("AAAA=", "AA!A="), 3, "base64"),
        (HEAD + SECOND % "00" + "[]\n", 3, "not a line of a certificate"),
        (HEAD + SECOND % "00" + LINE, 2, "its tensors have the root"),
        (HEAD + SECOND % "00" + "[" * 100_000, 3, "recursion|Stack overflow"),  # the latter from Python 3.14 on
    ],
)
def test_what_is_no_certificate_is_refused_with_its_line(text: str, line: int, why: str) -> None:
    with pytest.raises(ts.CertificateFormatError, match=why) as caught:
        Certificate.decode(text.encode(), "file")
    assert caught.value.line == line


@pytest.mark.usefixtures("store")
async def test_a_digest_that_somebody_has_changed_in_the_file_does_not_fit_its_root(tmp_path: Path) -> None:
    certificate = await certified(weights())
    path = tmp_path / "certificate"
    certificate.save(path)
    text = path.read_text()
    at = text.index('"tiles": "', text.index('"q"')) + 12
    path.write_text(text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :])
    with pytest.raises(ts.CertificateFormatError, match="its tensors have the root"):
        ts.Certificate.load(path)


async def test_certificates_are_there_when_another_controller_has_taken_over() -> None:
    await ts.initialize(journal=True)
    certificate = await certified(weights())
    process = (await ts.client()).remote.info.controller
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        assert await ts.certificate("policy") == certificate
    await ts.shutdown()
