"""Targets that another user has prepared, manifests that reach beyond a folder, parts that are replaced meanwhile."""

import dataclasses
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper.control import ActorError, ProcMesh, WorkspaceError
from skipper.control.cluster.workspace import sync_workspace
from skipper.control.cluster.workspace.chunks import HASH_NBYTES, LARGEST, FileChunk, digest
from skipper.control.cluster.workspace.folder import open_source
from skipper.control.cluster.workspace.folder_sync import MARKER, FolderSync, open_sync
from skipper.control.cluster.workspace.manifest import Entry, FolderManifest, check, scan
from skipper.control.cluster.workspace.receiver import token_is_in, token_name
from tests.strangers import STRANGER, as_stranger, meeting_place, needs_root

FILE, FOLDER, LINK = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755, stat.S_IFLNK | 0o777
CONTENT = b"new content"
CHUNKS = (FileChunk(digest(CONTENT), len(CONTENT)),)


@pytest.fixture
def place() -> Iterator[Path]:
    with meeting_place() as path:
        yield path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "package").mkdir(parents=True)
    (root / "package" / "task.py").write_bytes(CONTENT)
    return root


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of this user that no sync has to touch."""
    root = tmp_path / "victim"
    root.mkdir(mode=0o700)
    (root / "task.py").write_text("precious")
    return root


def manifest_of(*entries: Entry) -> FolderManifest:
    return FolderManifest(entries, ())


def sync_of(target: Path, manifest: FolderManifest) -> FolderSync:
    sync = open_sync(str(target), manifest, "token")
    assert sync is not None
    return sync


def refused(procs: ProcMesh, source: Path, target: Path, why: str) -> None:
    with pytest.raises(ActorError, match=why) as caught:
        sync_workspace(procs, source, target)
    assert isinstance(caught.value.cause, WorkspaceError)


@needs_root
def test_a_target_that_another_user_has_made_is_refused(
    source: Path, place: Path, victim: Path, procs: ProcMesh
) -> None:
    as_stranger(
        f"""
        os.mkdir({str(place / "target")!r})
        open({str(place / "target" / MARKER)!r}, "w").close()
        os.symlink({str(victim)!r}, {str(place / "target" / "package")!r})
        """
    )
    refused(procs, source, place / "target", f"belongs to the user {STRANGER}")
    assert (victim / "task.py").read_text() == "precious"


@needs_root
def test_a_link_of_another_user_is_not_followed_to_a_folder_of_ours(
    source: Path, place: Path, victim: Path, procs: ProcMesh
) -> None:
    (victim / MARKER).touch()
    as_stranger(f"os.symlink({str(victim)!r}, {str(place / 'target')!r})")
    refused(procs, source, place / "target", f"belongs to the user {STRANGER}, who may point it anywhere")
    refused(procs, source, place / "target" / "below", "who may point it anywhere")
    assert sorted(os.listdir(victim)) == [MARKER, "task.py"]


@needs_root
def test_a_target_below_a_folder_of_another_user_is_refused(source: Path, place: Path, procs: ProcMesh) -> None:
    as_stranger(f"os.mkdir({str(place / 'home')!r}, 0o777)")
    refused(procs, source, place / "home" / "target", "who may replace it")
    assert not os.listdir(place / "home")


def test_what_others_may_write_to_is_refused(source: Path, place: Path, procs: ProcMesh) -> None:
    (place / "open").mkdir()
    for mode in (0o777, 0o775, 0o1777):
        (place / "open").chmod(mode)
        refused(procs, source, place / "open", "others may write to it")
    (place / "open").chmod(0o777)
    refused(procs, source, place / "open" / "target", "others may replace it")
    assert not os.listdir(place / "open")


def test_links_and_folders_of_our_own_lead_to_a_target(source: Path, place: Path, procs: ProcMesh) -> None:
    (place / "disk").mkdir(mode=0o755)
    (place / "home").symlink_to("disk/../disk")
    sync_workspace(procs, source, place / "home" / "new" / "target")
    target = place / "disk" / "new" / "target"
    assert (target / "package" / "task.py").read_bytes() == CONTENT
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(target.parent.stat().st_mode) == 0o700
    (place / "loop").symlink_to("loop")
    refused(procs, source, place / "loop", "more than 40 links")


@needs_root
def test_what_another_user_owns_in_a_target_is_refused(source: Path, tmp_path: Path, procs: ProcMesh) -> None:
    sync_workspace(procs, source, tmp_path / "target")
    os.chown(tmp_path / "target" / "package" / "task.py", STRANGER, STRANGER)
    refused(procs, source, tmp_path / "target", f"'package/task.py' in .* belongs to the user {STRANGER}")


def test_permissions_that_others_would_gain_from_do_not_travel(source: Path, tmp_path: Path, procs: ProcMesh) -> None:
    (source / "package").chmod(0o3777)
    (source / "package" / "task.py").chmod(0o6777)
    target = tmp_path / "target"
    before = os.umask(0)
    try:
        sync_workspace(procs, source, target)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in [target, *target.rglob("*")]}
    assert modes == {"target": 0o700, MARKER: 0o600, "package": 0o755, "task.py": 0o755}


def test_the_name_of_a_token_is_not_enough_to_be_the_scripts_folder(tmp_path: Path) -> None:
    """Another user sees the name in the script's folder, and makes such a file where the target is to be."""
    (tmp_path / token_name("secret")).write_text(token_name("secret"))
    assert not token_is_in(str(tmp_path), "secret")
    (tmp_path / token_name("secret")).write_text("secret")
    assert token_is_in(str(tmp_path), "secret")
    os.unlink(tmp_path / token_name("secret"))
    os.mkfifo(tmp_path / token_name("secret"))
    assert not token_is_in(str(tmp_path), "secret")


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([Entry("/etc/cron.d/x", FILE)], "absolute"),
        ([Entry("../x", FILE)], "'..'"),
        ([Entry("a", FOLDER), Entry("a/../../x", FILE)], "'..'"),
        ([Entry("a", FOLDER), Entry("a//x", FILE)], "empty component"),
        ([Entry(".", FOLDER)], "'.'"),
        ([Entry("", FILE)], "a path is not valid"),
        ([Entry("a\0b", FILE)], "a path is not valid"),
        ([Entry("\ud800", FILE)], "a path is not valid"),
        ([Entry("x" * 256, FILE)], "too long"),
        ([Entry("x/" * 2048 + "x", FILE)], "a path is not valid"),
        ([Entry(MARKER, FILE)], "belongs to the sync itself"),
        ([Entry("a", FILE), Entry("a", FOLDER)], "there twice"),
        ([Entry("a/b", FILE)], "inside something that is not a folder"),
        ([Entry("a", LINK, link="/etc"), Entry("a/passwd", FILE)], "inside something that is not a folder"),
        ([Entry("a", stat.S_IFIFO | 0o644)], "not a file, folder or link"),
        ([Entry("a", stat.S_IFCHR | 0o666)], "not a file, folder or link"),
        ([Entry("a", -1)], "no mode"),
        ([Entry("a", 1 << 64)], "no mode"),
        ([Entry("a", FOLDER, CHUNKS)], "has content"),
        ([Entry("a", FILE, link="b")], "link to nowhere"),
        ([Entry("a", LINK)], "link to nowhere"),
        ([Entry("a", FILE, (FileChunk(b"", 1),))], "no name"),
        ([Entry("a", FILE, (FileChunk(bytes(HASH_NBYTES), LARGEST + 1),))], "no size"),
        ([Entry("a", FILE, (FileChunk(bytes(HASH_NBYTES), -1),))], "no size"),
        ([Entry("a", FILE, (FileChunk(bytes(HASH_NBYTES), 1), FileChunk(bytes(HASH_NBYTES), 2)))], "two sizes"),
        ([Entry("a", LINK, link="/etc/passwd")], "leads out"),
        ([Entry("a", LINK, link="../x")], "leads out"),
        ([Entry("d", FOLDER), Entry("d/a", LINK, link="../../x")], "leads out"),
        ([Entry("d", FOLDER), Entry("d/up", LINK, link=".."), Entry("a", LINK, link="d/up/../x")], "leads out"),
        ([Entry("a", LINK, link="b\0")], "something that is not a path"),
    ],
)
def test_manifests_that_reach_beyond_their_folder_are_refused(
    entries: list[Entry], why: str, tmp_path: Path, victim: Path
) -> None:
    with pytest.raises(WorkspaceError, match=why):
        open_sync(str(tmp_path / "target"), manifest_of(*entries), "token")
    assert not (tmp_path / "target").exists()


def test_links_within_a_folder_are_taken() -> None:
    check(
        manifest_of(
            Entry("d", FOLDER),
            Entry("d/up", LINK, link="../d/./up"),
            Entry("a", LINK, link="d//nothing"),
            Entry("d/b", LINK, link="../a"),
        )
    )


def test_a_link_that_leads_out_is_refused_before_anything_is_sent(
    source: Path, tmp_path: Path, procs: ProcMesh
) -> None:
    (source / "data").symlink_to("/mnt/data")
    with pytest.raises(WorkspaceError, match="'data' leads out of the workspace"):
        sync_workspace(procs, source, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    sync_workspace(procs, source, tmp_path / "target", exclude=("data",))


@pytest.mark.parametrize("moment", ["before content", "before commit"])
def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(moment: str, tmp_path: Path, victim: Path) -> None:
    target = tmp_path / "target"
    (target / "package").mkdir(parents=True)
    (target / MARKER).touch()
    sync = sync_of(target, manifest_of(Entry("package", FOLDER), Entry("package/task.py", FILE, CHUNKS)))
    try:
        if moment == "before commit":
            sync.add([CONTENT])
        (target / "package").rmdir()
        (target / "package").symlink_to(victim)
        if moment == "before content":
            sync.add([CONTENT])
        sync.commit()
    finally:
        sync.close()
    # It was no folder any more, and made way for one.
    assert not (target / "package").is_symlink()
    assert (target / "package" / "task.py").read_bytes() == CONTENT
    assert (victim / "task.py").read_text() == "precious"


def test_a_staging_folder_that_becomes_a_link_is_neither_written_to_nor_cleared(tmp_path: Path, victim: Path) -> None:
    target = tmp_path / "target"
    sync = sync_of(target, manifest_of(Entry("task.py", FILE, CHUNKS)))
    (staging,) = (name for name in os.listdir(target) if name != MARKER)
    os.rename(target / staging, tmp_path / "elsewhere")
    (victim / "chunks").touch()
    (target / staging).symlink_to(victim)
    with pytest.raises(WorkspaceError, match="was replaced"):
        sync.add([CONTENT])
    sync.close()
    assert sorted(os.listdir(victim)) == ["chunks", "task.py"]
    assert (victim / "chunks").read_bytes() == b""
    (target / ".skipper-staging-old").symlink_to(victim)  # of one that was killed, it seems
    sync_of(target, manifest_of()).close()
    assert os.listdir(target) == [MARKER]
    assert sorted(os.listdir(victim)) == ["chunks", "task.py"]


def test_pipes_and_sockets_in_a_target_make_way(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / MARKER).touch()
    os.mkfifo(target / "package")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(target / "task.py"))
        sync = sync_of(target, manifest_of(Entry("package", FOLDER), Entry("task.py", FILE, CHUNKS)))
        sync.add([CONTENT])
        sync.commit()
        sync.close()
    assert (target / "package").is_dir()
    assert (target / "task.py").read_bytes() == CONTENT


def test_a_marker_that_is_no_file_of_ours_is_refused(tmp_path: Path, victim: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / MARKER).symlink_to(victim / "task.py")
    with pytest.raises(OSError, match="symbolic links"):
        open_sync(str(target), manifest_of(), "token")
    (target / MARKER).unlink()
    (target / MARKER).hardlink_to(victim / "task.py")
    with pytest.raises(WorkspaceError, match="not written by a sync"):
        open_sync(str(target), manifest_of(), "token")
    assert (victim / "task.py").read_text() == "precious"


def test_content_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    sync = sync_of(tmp_path / "target", manifest_of(Entry("task.py", FILE, CHUNKS)))
    with pytest.raises(WorkspaceError, match="belongs to no file of the workspace"):
        sync.add([b"something else"])
    sync.close()


@needs_root
def test_a_workspace_that_the_disk_cannot_hold_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    chunks = tuple(FileChunk(number.to_bytes(HASH_NBYTES, "little"), LARGEST) for number in range(32))
    small = tmp_path / "small"
    small.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(small)]).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        with pytest.raises(WorkspaceError, match="bytes free"):
            open_sync(str(small / "target"), manifest_of(Entry("big", FILE, chunks)), "token")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_here_that_others_may_write_to_can_be_read(source: Path) -> None:
    source.chmod(0o777)
    with open_source(str(source)) as folder:
        manifest = scan(folder, ())
    check(dataclasses.replace(manifest))
    assert [entry.path for entry in manifest.entries] == ["package", "package/task.py"]
