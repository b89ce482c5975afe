"""Lines of a record: bounded, whole, and there at once; files of others are not read."""

import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skipper.control import UnsafeFileError
from skipper.control.observe.record_file import BoundedLines, read_lines
from tests.strangers import STRANGER, needs_root


def numbers(folder: Path) -> list[int]:
    return [line["n"] for line in read_lines(folder, "kind")]


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@contextmanager
def full(nbytes: int) -> Iterator[None]:
    """As on a full disk: no file grows beyond that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_is_there_before_anything_is_closed(tmp_path: Path) -> None:
    lines = BoundedLines(tmp_path, "kind", 1 << 20)
    assert lines.append({"n": 1})
    assert numbers(tmp_path) == [1]
    assert [oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()] == ["0o600"]
    lines.close()
    lines.close()


def test_the_newest_lines_are_kept_whole(tmp_path: Path) -> None:
    lines = BoundedLines(tmp_path, "kind", 4096)
    for n in range(2000):
        lines.append({"n": n})
        assert nbytes(tmp_path) <= 4096 + 16
    kept = numbers(tmp_path)
    assert kept == list(range(kept[0], 2000))
    assert len(kept) > 150


def test_of_all_times_some_lines_are_kept_the_fewer_the_older_they_are(tmp_path: Path) -> None:
    lines = BoundedLines(tmp_path, "kind", 4096, keeps_all_times=True)
    for n in range(5000):
        lines.append({"n": n})
        assert nbytes(tmp_path) <= 4096 + 32
    kept = numbers(tmp_path)
    assert kept == sorted(kept)
    assert kept[0] == 0
    assert kept[-1] == 4999
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert gaps[0] > gaps[-1] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"kind.jsonl", "kind.older.jsonl"}


def test_what_a_full_disk_does_not_take_is_counted_and_no_line_is_cut(tmp_path: Path) -> None:
    lines = BoundedLines(tmp_path, "kind", 1 << 20)
    lines.append({"n": 1})
    with full(16):
        assert not lines.append({"n": 2, "text": "x" * 100})
        assert not lines.append({"n": 3, "text": "x" * 100})
    assert (lines.lost, "File too large" in lines.problem) == (2, True)
    assert lines.append({"n": 4})
    assert numbers(tmp_path) == [1, 4]


def test_without_room_for_a_third_file_the_bound_still_holds(tmp_path: Path) -> None:
    lines = BoundedLines(tmp_path, "kind", 4096, keeps_all_times=True)
    for n in range(400):
        lines.append({"n": n})
    draft = tmp_path / ".kind.older.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _no_room)
        for n in range(400, 2000):
            lines.append({"n": n})
            assert nbytes(tmp_path) <= 4096 + 32
    assert not draft.exists()
    assert numbers(tmp_path)[-1] == 1999


def _no_room(_: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("rest", [b'{"n": 3', b"\xff\xfe\n", b"[1]\n", b'{"n": ' + b"[" * 100_000 + b"\n", b"\n"])
def test_what_is_no_line_is_passed_over(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "kind.older.jsonl").write_bytes(b'{"n": 1}\n' + rest)
    (tmp_path / "kind.jsonl").write_bytes(b'{"n": 2}\n')
    assert numbers(tmp_path) == [1, 2]


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"n": 1}\n')
    (tmp_path / "kind.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeFileError, match="is a link"):
        numbers(tmp_path)
    assert not BoundedLines(tmp_path, "kind", 4096).append({"n": 2})
    assert (tmp_path / "secret").read_text() == '{"n": 1}\n'
    (tmp_path / "kind.jsonl").unlink()
    os.mkfifo(tmp_path / "kind.jsonl")
    with pytest.raises(UnsafeFileError, match="not a file of"):
        numbers(tmp_path)


@needs_root
def test_files_of_another_user_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "kind.jsonl"
    path.write_text('{"n": 1}\n')
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(UnsafeFileError, match="not a file of"):
        numbers(tmp_path)
    assert not BoundedLines(tmp_path, "kind", 4096).append({"n": 2})
