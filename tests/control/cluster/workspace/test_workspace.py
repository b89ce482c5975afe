"""A folder that is brought to other hosts: what arrives, how little is sent for it, and what is refused."""

import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipper.control import Actor, ActorError, ActorMesh, ProcMesh, Progress, WorkspaceError, endpoint, on_progress
from skipper.control.cluster.workspace import api, sync_workspace
from skipper.control.cluster.workspace.chunks import LARGEST, SMALLEST, cut, digest
from skipper.control.cluster.workspace.folder import open_source
from skipper.control.cluster.workspace.folder_sync import MARKER
from skipper.control.cluster.workspace.manifest import OURS, FolderManifest
from skipper.control.cluster.workspace.manifest import scan as scan_folder
from skipper.control.cluster.workspace.receiver import WorkspaceReceiver


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def scan(root: Path) -> FolderManifest:
    with open_source(str(root)) as folder:
        return scan_folder(folder, api.EXCLUDE)


def tree(root: Path) -> dict[str, Any]:
    """All that is in a folder: contents, links, permissions."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = stat.S_IMODE(path.stat().st_mode)
        elif name != MARKER:
            found[name] = (digest(path.read_bytes()), stat.S_IMODE(path.stat().st_mode))
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "package" / "inner").mkdir(parents=True)
    (root / "package" / "__init__.py").write_text("VALUE = 1\n")
    (root / "package" / "inner" / "weights.bin").write_bytes(noise(1 << 20))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "empty").touch()
    (root / "link").symlink_to("package/inner")
    (root / ".git").mkdir()
    (root / ".git" / "secret").write_text("not for others")
    return root


@pytest.mark.parametrize("nbytes", [0, 1, SMALLEST, LARGEST + 1, 5 << 20])
def test_chunks_are_the_whole_and_within_their_bounds(nbytes: int) -> None:
    for data in (noise(nbytes), bytes(nbytes)):
        chunks = [bytes(chunk) for chunk in cut(data)]
        assert b"".join(chunks) == data
        assert all(SMALLEST <= len(chunk) <= LARGEST for chunk in chunks[:-1])


@given(at=st.integers(0, 1 << 20), inserted=st.binary(min_size=1, max_size=40))
def test_an_insertion_changes_few_chunks_wherever_it_is(at: int, inserted: bytes) -> None:
    data = noise(1 << 20)
    known = {digest(chunk) for chunk in cut(data)}
    new = sum(len(chunk) for chunk in cut(data[:at] + inserted + data[at:]) if digest(chunk) not in known)
    assert 0 < new <= 4 * LARGEST


def test_everything_arrives_and_the_second_time_nothing_is_sent(source: Path, tmp_path: Path, procs: ProcMesh) -> None:
    target = tmp_path / "there" / "target"
    first = sync_workspace(procs, source, target)
    wanted = tree(source)
    del wanted[".git"], wanted[".git/secret"]
    assert tree(target) == wanted
    assert first.moved == first.nbytes > 1 << 20  # one host, though there are two processes
    assert first.changed == ("empty", "package/__init__.py", "package/inner/weights.bin", "run.sh")
    again = sync_workspace(procs, source, target)
    assert (again.moved, again.changed, again.nbytes) == (0, (), first.nbytes)
    assert len(again.hosts) == 1


def test_who_follows_is_told_of_the_bytes_that_are_sent(source: Path, tmp_path: Path, procs: ProcMesh) -> None:
    told: list[Progress] = []
    with on_progress(told.append):
        report = sync_workspace(procs, source, tmp_path / "target")
    ended = {each.description: each for each in told if each.state == "finished"}
    sent = ended["send workspace"]
    assert (sent.completed, sent.total, sent.unit) == (report.moved, report.moved, "bytes")
    assert (ended["compare workspace"].completed, ended["compare workspace"].unit) == (1, "hosts")


def test_what_changed_here_or_there_is_put_right(source: Path, tmp_path: Path, procs: ProcMesh) -> None:
    target = tmp_path / "target"
    sync_workspace(procs, source, target)
    (source / "package" / "inner" / "moved.bin").write_bytes((source / "package/inner/weights.bin").read_bytes()[1000:])
    (source / "package" / "inner" / "weights.bin").unlink()
    (source / "link").unlink()
    (source / "link").mkdir()
    (source / "empty").unlink()
    (source / "empty").symlink_to("run.sh")
    (source / "run.sh").chmod(0o644)
    (target / "package" / "__init__.py").write_text("tampered")
    (target / "stray").mkdir()
    (target / "stray" / "file").touch()
    report = sync_workspace(procs, source, target, exclude=(".git",))
    wanted = tree(source)
    del wanted[".git"], wanted[".git/secret"]
    assert tree(target) == wanted
    assert report.moved < 2 * LARGEST  # the moved file is made of chunks that were there under another name
    assert report.changed == ("package/__init__.py", "package/inner/moved.bin")


def test_a_change_of_a_hundredth_moves_two_hundredths_at_most(tmp_path: Path, procs: ProcMesh) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for number in range(16):
        (source / f"{number}.bin").write_bytes(noise(1 << 20, number))
    sync_workspace(procs, source, target)
    content = bytearray((source / "7.bin").read_bytes())
    content[300_000:467_772] = noise(167_772, 99)  # a hundredth of 16 MiB
    (source / "7.bin").write_bytes(content)
    report = sync_workspace(procs, source, target)
    assert tree(target) == tree(source)
    assert 167_772 <= report.moved <= report.nbytes / 50


def test_a_folder_that_no_sync_has_made_is_left_alone(source: Path, tmp_path: Path, procs: ProcMesh) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(ActorError, match="was not made by sync_workspace") as caught:
        sync_workspace(procs, source, target)
    assert isinstance(caught.value.cause, WorkspaceError)
    assert list(tree(target)) == ["thesis.tex"]


def test_bad_arguments_are_refused_before_anything_is_sent(source: Path, tmp_path: Path, procs: ProcMesh) -> None:
    with pytest.raises(NotADirectoryError):
        sync_workspace(procs, source / "run.sh")
    with pytest.raises(ValueError, match="absolute"):
        sync_workspace(procs, source, "relative")
    for target in (source / "inside", tmp_path):
        with pytest.raises(ValueError, match="overlap"):
            sync_workspace(procs, source, target)


def test_the_scripts_own_folder_is_left_alone(source: Path, procs: ProcMesh) -> None:
    before = tree(source)
    report = sync_workspace(procs, source)
    assert (report.hosts, report.moved, report.changed) == ((), 0, ())
    assert tree(source) == before


class Importer(Actor):
    def __init__(self, folder: str) -> None:
        import sys

        sys.path.insert(0, folder)
        sys.dont_write_bytecode = True

    @endpoint
    def value(self) -> int:
        import synced_package.constants  # type: ignore[import-not-found]
        import synced_package.user  # type: ignore[import-not-found]

        return int(synced_package.user.twice())


def test_changed_modules_are_imported_anew_in_every_process(tmp_path: Path, procs: ProcMesh) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    package = source / "synced_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "constants.py").write_text("VALUE = 1\n")
    (package / "user.py").write_text(
        "from synced_package.constants import VALUE\ndef twice():\n    return 2 * VALUE  # 1\n"
    )
    sync_workspace(procs, source, target)
    importers = procs.spawn("importers", Importer, str(target))
    assert list(importers.value.call().get(20)) == [2, 2]
    (package / "constants.py").write_text("VALUE = 21\n")
    (package / "user.py").write_text("from .constants import VALUE\ndef twice():\n    return 2 * VALUE\n")
    report = sync_workspace(procs, source, target, reload=True)
    assert report.reloaded == ("synced_package.constants", "synced_package.user")
    assert list(importers.value.call().get(20)) == [42, 42]


@pytest.fixture
def receivers(procs: ProcMesh) -> Iterator[list[ActorMesh[WorkspaceReceiver]]]:
    """Six, as of as many hosts."""
    meshes = [procs.slice(gpus=number % 2).spawn(f"receiver{number}", WorkspaceReceiver) for number in range(6)]
    yield meshes
    for mesh in meshes:
        mesh.stop().get(20)


def test_couriers_pass_on_down_a_tree_what_any_of_them_misses(
    source: Path, tmp_path: Path, receivers: list[ActorMesh[WorkspaceReceiver]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_BATCH_NBYTES", 200_000)
    manifest = scan(source)
    missing = set()
    for number, receiver in enumerate(receivers):
        missing |= receiver.begin.call_one(str(tmp_path / str(number)), "token", manifest).get(20)
    branches = api._tree(receivers)
    assert [len(branch.below) for branch in branches] == [1, 1, 0, 0]
    with open_source(str(source)) as folder:
        batches = list(api._batches(folder, manifest, missing))
    assert len(batches) > 3
    for batch in batches:
        moved = sum(branch.receiver.take.call_one(batch, branch.below).get(20) for branch in branches)
        assert moved == 6 * sum(batch.sizes)
    wanted = tree(source)
    del wanted[".git"], wanted[".git/secret"]
    for number, receiver in enumerate(receivers):
        assert all(name.startswith(OURS) for name in tree(tmp_path / str(number)))  # nothing is in its place yet
        receiver.commit.call_one().get(20)
        assert tree(tmp_path / str(number)) == wanted


def test_one_sync_at_a_time_and_what_a_killed_one_left_is_cleared(
    source: Path, tmp_path: Path, receivers: list[ActorMesh[WorkspaceReceiver]]
) -> None:
    manifest = scan(source)
    target = tmp_path / "target"
    assert receivers[0].begin.call_one(str(target), "one", manifest).get(20)
    assert receivers[1].begin.call_one(str(target), "one", manifest).get(20) is None  # a file system that is shared
    with pytest.raises(ActorError, match="another sync is running"):
        receivers[2].begin.call_one(str(target), "two", manifest).get(20)
    receivers[0].stop().get(20)
    assert list(tree(target)) == []
    (target / ".skipper-staging-old").mkdir()
    assert receivers[2].begin.call_one(str(target), "two", manifest).get(20)
    assert not (target / ".skipper-staging-old").exists()
    with pytest.raises(ActorError, match="chunks of the workspace have not arrived"):
        receivers[2].commit.call_one().get(20)
    assert list(tree(target)) == []


def test_a_file_that_changes_meanwhile_is_noticed(source: Path) -> None:
    manifest = scan(source)
    (source / "package" / "__init__.py").write_text("VALUE = 2\n")
    with open_source(str(source)) as folder, pytest.raises(WorkspaceError, match="changed while"):
        list(api._batches(folder, manifest, set(manifest.places())))
