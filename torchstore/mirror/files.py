"""The files of one mirror, by fsspec: a folder, S3, GCS, Azure or any other file system of fsspec.

A file appears complete or not at all. Object stores do that by themselves; in a folder, a file is first written under
another name. All methods block; `MirrorFiles.run` runs them in threads, with a deadline.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote

import fsspec
from fsspec.implementations.local import LocalFileSystem

from skipper.control.support.daemon_threads import DaemonThreads
from skipper.torchstore.errors import MirrorUnreachableError, StoreTimeoutError
from skipper.torchstore.mirror.waiting import together
from skipper.torchstore.support.deadlines import within

P = ParamSpec("P")
T = TypeVar("T")
P1 = TypeVar("P1")

_CHUNK = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"([0-9]{20})\.json")
MOST_VERSION = 10**18


class MirrorFiles:
    """The files of one key.

    Args:
        url: The URL for fsspec: "s3://bucket/path", "/folder", "file:///folder".
        key: The name of the folder there, as far as file systems allow it.
        workers: How many files are read or written concurrently.
        options: Options of the file system, such as ``{"endpoint_url": ...}``.

    Raises:
        ValueError: The key is empty, or fsspec has no such file system.
        ImportError: The package of that file system is not installed.
    """

    def __init__(self, url: str, key: str, *, workers: int, options: Mapping[str, Any] | None) -> None:
        if not key.strip("."):
            raise ValueError(f"{key!r} is not a key of a mirror")
        self._system, root = fsspec.core.url_to_fs(
            url, **{"use_listings_cache": False, "skip_instance_cache": True, **(options or {})}
        )
        self.root = f"{root.rstrip('/')}/{quote(key, safe='')}"
        self._is_local = isinstance(self._system, LocalFileSystem)
        self._workers = workers
        self._threads = DaemonThreads(workers, name="torchstore-mirror")

    @property
    def latest(self) -> str:
        """The path of the file that says which version is the newest."""
        return f"{self.root}/latest.json"

    def version(self, number: int) -> str:
        """The path of a version's manifest."""
        return f"{self.root}/versions/{number:020d}.json"

    def chunk(self, digest: str) -> str:
        """The path of the chunk with this SHA-256."""
        return f"{self.root}/chunks/{digest[:2]}/{digest}"

    async def run(self, end: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread.

        ``end`` is a time of the event loop's clock.

        Raises:
            StoreTimeoutError: It takes longer; the thread continues by itself until the file system answers.
        """
        future = self._threads.submit(work, *args, **kwargs)
        try:
            return await within(max(end - asyncio.get_running_loop().time(), 0.01), asyncio.wrap_future(future))
        except TimeoutError as error:
            if isinstance(error, StoreTimeoutError):
                raise
            raise StoreTimeoutError(f"{self.root} did not answer in time") from error

    async def finish(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread that is never abandoned: a cancelled caller still waits for it."""
        future = asyncio.wrap_future(self._threads.submit(work, *args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    async def run_all(self, end: float, work: Callable[[P1], T], each: Iterable[P1]) -> list[T]:
        """Run a function for many items, as many at once as there are workers; the first error ends the rest.

        Raises:
            StoreTimeoutError: It takes longer.
        """
        return await together((self.run(end, work, one) for one in each), most=self._workers)

    def read(self, path: str, most_nbytes: int) -> bytes | None:
        """The content of a file; None if there is none. A longer file is cut to one byte more than the limit.

        Raises:
            MirrorUnreachableError: The file system fails.
        """
        try:
            data: bytes = self._system.cat_file(path, start=0, end=most_nbytes + 1)
        except FileNotFoundError:
            return None
        except Exception as error:  # any exception of the file system's library
            raise _unreachable(path, error) from error
        return data

    def size(self, path: str) -> int | None:
        """The size of a file, in bytes; None if there is none.

        Raises:
            MirrorUnreachableError: The file system fails.
        """
        try:
            return int(self._system.info(path)["size"])
        except FileNotFoundError:
            return None
        except Exception as error:  # as above
            raise _unreachable(path, error) from error

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Write a file, and replace an existing one.

        Raises:
            MirrorUnreachableError: The file system fails.
        """
        try:
            if self._is_local:
                self._write_local(path, data, os.replace)
            else:
                self._system.pipe_file(path, bytes(data))
        except Exception as error:  # as above
            raise _unreachable(path, error) from error

    def create(self, path: str, data: bytes) -> bool:
        """Write a new file. Returns False if it exists already.

        Raises:
            MirrorUnreachableError: The file system fails.
        """
        try:
            if self._is_local:
                self._write_local(path, data, _link)
            else:
                self._system.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except Exception as error:  # as above
            raise _unreachable(path, error) from error
        return True

    def remove(self, path: str) -> None:
        """Remove a file if it exists.

        Raises:
            MirrorUnreachableError: The file system fails.
        """
        try:
            self._system.rm_file(path)
        except FileNotFoundError:
            return
        except Exception as error:  # as above
            raise _unreachable(path, error) from error

    def versions(self) -> list[int]:
        """The numbers of the versions that have a manifest, the oldest first.

        Raises:
            MirrorUnreachableError: The file system fails.
        """
        found = (_VERSION.fullmatch(name) for name in self._names(f"{self.root}/versions"))
        return sorted(int(match[1]) for match in found if match)

    def chunks(self) -> set[str]:
        """The SHA-256 of all chunks.

        Raises:
            MirrorUnreachableError: The file system fails.
        """
        found: set[str] = set()
        for folder in self._names(f"{self.root}/chunks"):
            found.update(name for name in self._names(f"{self.root}/chunks/{folder}") if _CHUNK.fullmatch(name))
        return found

    def unfinished(self) -> list[str]:
        """The paths of incomplete files that killed writers have left; object stores have none.

        Raises:
            MirrorUnreachableError: The file system fails.
        """
        if not self._is_local:
            return []
        chunks = (f"{self.root}/chunks/{folder}" for folder in self._names(f"{self.root}/chunks"))
        folders = (self.root, f"{self.root}/versions", *chunks)
        return [f"{folder}/{name}" for folder in folders for name in self._names(folder) if name.startswith(".")]

    def close(self) -> None:
        """End the threads; idempotent."""
        self._threads.shutdown()

    def _names(self, folder: str) -> list[str]:
        try:
            self._system.invalidate_cache()
            return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._system.ls(folder, detail=False)]
        except FileNotFoundError:
            return []
        except Exception as error:  # as above
            raise _unreachable(folder, error) from error

    def _write_local(self, path: str, data: bytes | memoryview, place: Callable[[str, str], None]) -> None:
        folder, name = os.path.split(path)
        os.makedirs(folder, exist_ok=True)
        beside = f"{folder}/.{name}.{secrets.token_hex(8)}"
        try:
            with open(beside, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            place(beside, path)
        finally:
            if os.path.lexists(beside):
                os.unlink(beside)


def _link(beside: str, path: str) -> None:
    """Give a file its name, unless another file has it."""
    os.link(beside, path)


def _unreachable(path: str, error: Exception) -> MirrorUnreachableError:
    return MirrorUnreachableError(path, f"{type(error).__name__}: {error}")
