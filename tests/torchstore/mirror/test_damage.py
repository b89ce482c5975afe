"""Files that are cut, altered, exchanged or put back, and processes that are killed: a typed error, or nothing."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.mirror import MirrorReader, SharedSecret
from tests.torchstore.mirror.places import SECRET, chunks_of, files_of, mirror_at, reader_at

pytestmark = pytest.mark.usefixtures("store")


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(96, 64, generator=generator), "b": torch.randn(64, generator=generator)}


async def publish(folder: Path, *seeds: int, keep: int = 9) -> None:
    with mirror_at(folder, keep=keep) as mirror:
        for seed in seeds:
            await ts.put_state_dict(weights(seed), "policy", version=seed)
            await mirror.publish()


def damages(data: bytes) -> Iterator[bytes]:
    """Each of a few bits, bytes that are missing at both ends, nothing, and more than there was."""
    for at in sorted({0, 1, len(data) // 3, len(data) // 2, len(data) - 1}):
        yield data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    yield from (data[:-1], data[1:], b"", data + b"x", bytes(len(data)))


async def test_no_damaged_file_is_used_and_none_is_silent(tmp_path: Path) -> None:
    await publish(tmp_path, 1)
    intact = files_of(tmp_path)
    mine = {"w": torch.zeros(96, 64), "b": torch.zeros(64)}
    for name, data in intact.items():
        kind = ts.MirrorDamagedError if "/chunks/" in name else ts.MirrorSignatureError
        for damaged in damages(data):
            (tmp_path / name).write_bytes(damaged)
            with reader_at(tmp_path) as reader, pytest.raises(kind, match=re.escape(name)):
                await reader.get_state_dict(mine)
        (tmp_path / name).unlink()
        with reader_at(tmp_path) as reader, pytest.raises((ts.MirrorError, ts.KeyNotFoundError)):
            await reader.get_state_dict(mine)
        (tmp_path / name).write_bytes(data)
    assert not mine["w"].any()
    assert not mine["b"].any()
    with reader_at(tmp_path) as reader:
        await reader.get_state_dict(mine)
        assert torch.equal(mine["w"], weights(1)["w"])


async def test_older_files_that_are_put_back_are_told(tmp_path: Path) -> None:
    await publish(tmp_path, 1)
    old = files_of(tmp_path)
    await publish(tmp_path, 2)
    with reader_at(tmp_path, cache=tmp_path.with_name("cache")) as reader:
        assert await reader.latest() == 2
        (tmp_path / "policy/latest.json").write_bytes(old["policy/latest.json"])
        with pytest.raises(ts.MirrorRolledBackError) as caught:
            await reader.get_state_dict()
        assert (caught.value.version, caught.value.seen) == (1, 2)
        (tmp_path / "policy/latest.json").unlink()
        with pytest.raises(ts.MirrorRolledBackError):
            await reader.latest()
    (tmp_path / "policy/latest.json").write_bytes(old["policy/latest.json"])
    with reader_at(tmp_path, cache=tmp_path.with_name("cache")) as again, pytest.raises(ts.MirrorRolledBackError):
        await again.latest()  # by its folder
    with reader_at(tmp_path, at_least=2) as told, pytest.raises(ts.MirrorRolledBackError):
        await told.latest()
    with reader_at(tmp_path) as new:  # nothing tells this one
        assert await new.latest() == 1


async def test_a_manifest_under_another_number_or_key_is_not_taken(tmp_path: Path) -> None:
    await publish(tmp_path, 1, 2)
    versions = tmp_path / "policy/versions"
    shutil.copy(versions / f"{1:020d}.json", versions / f"{2:020d}.json")
    with reader_at(tmp_path) as reader, pytest.raises(ts.MirrorRolledBackError):
        await reader.get_state_dict()
    shutil.copytree(tmp_path / "policy", tmp_path / "other")
    with (
        MirrorReader(str(tmp_path), "other", verifier=SECRET) as other,
        pytest.raises(ts.MirrorFormatError, match="'policy'"),
    ):
        await other.get_state_dict()
    # A file of one kind is none of another, though the same key has signed both.
    shutil.copy(versions / f"{1:020d}.json", tmp_path / "policy/latest.json")
    with reader_at(tmp_path) as reader, pytest.raises(ts.MirrorSignatureError):
        await reader.get_state_dict()


async def test_a_second_publisher_and_a_store_that_began_anew_are_told(tmp_path: Path) -> None:
    await publish(tmp_path, 5)
    await ts.delete("policy")
    with mirror_at(tmp_path) as mirror:
        await ts.put_state_dict(weights(9), "policy", version=5)
        with pytest.raises(ts.VersionExistsError):
            await mirror.publish()  # other bytes under that number
        await ts.delete("policy")
        await ts.put_state_dict(weights(9), "policy", version=4)
        with pytest.raises(ts.VersionExistsError):
            await mirror.publish()
        await ts.delete("policy")
        await ts.put_state_dict(weights(5), "policy", version=5)
        assert await mirror.publish() == 5  # the same bytes: it is there
    with mirror_at(tmp_path, signer=SharedSecret(bytes(32))) as stranger, pytest.raises(ts.MirrorSignatureError):
        await stranger.publish()


async def test_a_reader_goes_on_where_one_before_it_was_stopped(tmp_path: Path) -> None:
    mirrored, cache = tmp_path / "mirror", tmp_path / "cache"
    await publish(mirrored, 1)
    lost = chunks_of(mirrored)[3]
    data = lost.read_bytes()
    lost.unlink()
    with reader_at(mirrored, cache=cache, workers=1) as reader, pytest.raises(ts.MirrorDamagedError):
        await reader.get_state_dict()
    there = [path for path in cache.iterdir() if len(path.name) == 64]
    assert 0 < len(there) < len(chunks_of(mirrored)) + 1
    lost.write_bytes(data)
    there[0].write_bytes(b"damaged since")
    with reader_at(mirrored, cache=cache) as reader:
        found = await reader.get_state_dict()
        assert torch.equal(found["w"], weights(1)["w"])
        assert reader.last_read is not None
        assert reader.last_read.chunks == len(chunks_of(mirrored)) - len(there) + 1
    await publish(mirrored, 2)
    with reader_at(mirrored, cache=cache) as reader:
        await reader.get_state_dict()
    assert {path.name for path in cache.iterdir()} - {"newest-seen"} <= {path.name for path in chunks_of(mirrored)}


SCRIPT = """
import asyncio, sys, torch
from skipper import torchstore as ts
from tests.torchstore.mirror.places import mirror_at
from tests.torchstore.mirror.test_damage import weights
from skipper.torchstore.mirror import files

async def main():
    await ts.initialize()
    await ts.put_state_dict(weights(2), "policy", version=2)
    left = int(sys.argv[2])
    place = files._link, files.os.replace

    def stop(beside, path, then):
        nonlocal left
        then(beside, path) if left else None
        if not left:
            print("here", flush=True)
            sys.stdin.read()  # to be killed
        left -= 1

    files._link = lambda beside, path: stop(beside, path, place[0])
    files.os = type("os", (), {**vars(files.os), "replace": staticmethod(lambda b, p: stop(b, p, place[1]))})
    with mirror_at(sys.argv[1], workers=1, keep=1) as mirror:
        await mirror.publish()
    print("done", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("writes", [0, 3, 7, 8, 9])
async def test_a_publisher_that_is_killed_leaves_a_version_whole_or_unseen(tmp_path: Path, writes: int) -> None:
    await publish(tmp_path, 1)
    word = await asyncio.to_thread(publish_and_be_killed, tmp_path, writes)
    with reader_at(tmp_path) as reader:
        seen = await reader.latest()
        assert seen == (2 if word == "done" else 1)
        assert torch.equal((await reader.get_state_dict())["w"], weights(seen)["w"])
        await publish(tmp_path, 2, keep=1)
        assert await reader.latest() == 2
        assert torch.equal((await reader.get_state_dict())["w"], weights(2)["w"])
    with mirror_at(tmp_path, keep=1) as mirror:
        await mirror.sweep()
    assert len(chunks_of(tmp_path)) == 9  # of the second version: eight of the matrix, and the bias
    assert not [name for name in files_of(tmp_path) if "/." in name]


def publish_and_be_killed(folder: Path, writes: int) -> str:
    """Kill a publisher before it finishes one file more than so many; what it has said before."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(writes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    with process, process.stdout, process.stdin:
        word = process.stdout.readline().strip()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    return word
