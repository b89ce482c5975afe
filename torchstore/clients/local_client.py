"""The client of one process for one store, which the functions of `torchstore.api` use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, Unpack

import torch

from skipper.control.model.bounds import check_flag
from skipper.control.runtime import tracing
from skipper.torchstore.algebra.copies import check_copies, check_room
from skipper.torchstore.algebra.key_names import check_key, check_keys
from skipper.torchstore.algebra.slices import TensorSlice
from skipper.torchstore.clients.explanation import Explanation
from skipper.torchstore.clients.fetch import Fetcher
from skipper.torchstore.clients.last_put import LastPuts
from skipper.torchstore.clients.pinning import PinnedVersion
from skipper.torchstore.clients.publish import Publisher
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S, RemoteStore
from skipper.torchstore.clients.requests import (
    GetOptions,
    PutOptions,
    StateDictGet,
    StateDictPut,
    ValueRequest,
    VersionSelector,
    check_version,
    selector_of,
)
from skipper.torchstore.errors import KindMismatchError
from skipper.torchstore.protocol.messages import StaleClientError
from skipper.torchstore.protocol.meta import ValueMeta
from skipper.torchstore.protocol.origin import Origin, read_publisher
from skipper.torchstore.support.metrics import log_of
from skipper.torchstore.support.records import SyncRecord
from skipper.torchstore.tensors.local_tensors import check_writable
from skipper.torchstore.tensors.stream_order import gpus_of, in_stream_order
from skipper.torchstore.tensors.tiles import TensorsTiles

T = TypeVar("T")


class LocalClient:
    """Puts and gets for the calling process; `torchstore.client()` makes one for each store.

    Its methods are those of `torchstore`, and are described there.

    Example:
        ```python
        import asyncio

        from skipper import torchstore as ts

        async def main() -> None:
            await ts.initialize()
            client: ts.LocalClient = await ts.client()
            await client.put("step", 1)
            print(await client.get("step"))  # 1
            await ts.shutdown()

        asyncio.run(main())
        ```
    """

    def __init__(self, remote: RemoteStore) -> None:
        self.remote = remote
        self.publisher = Publisher(remote)
        self._fetcher = Fetcher(remote)
        self._last_puts = LastPuts()
        self._log = log_of(remote.store_name)
        self.last_sync: SyncRecord | None = None

    async def put(
        self,
        key: str,
        value: Any,
        *,
        checksum: bool | None = None,
        version: int | None = None,
        publisher: Origin | tuple[int, int] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """See `torchstore.put`."""
        check_key(key)
        if version is not None:
            check_version(version)
        if publisher is not None and not isinstance(value, torch.Tensor):
            raise TypeError(f"only a tensor is put in parts (publisher=...), not {type(value).__name__}")
        summed, origin = self._summed(checksum), read_publisher(publisher)
        work = self.publisher.put_values({key: value}, timeout, checksum=summed, version=version, publisher=origin)
        await self._observed("put", work, value, timeout)

    async def put_batch(
        self,
        entries: Mapping[str, Any],
        *,
        checksum: bool | None = None,
        version: int | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """See `torchstore.put_batch`."""
        if not isinstance(entries, Mapping):
            raise TypeError(f"entries is a dict of values by key, not {type(entries).__name__}")
        check_keys(entries)
        if version is not None:
            check_version(version)
        work = self.publisher.put_values(entries, timeout, checksum=self._summed(checksum), version=version)
        await self._observed("put", work, entries, timeout)

    async def get(
        self,
        key: str,
        inplace_tensor: torch.Tensor | None = None,
        tensor_slice_spec: TensorSlice | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> Any:
        """See `torchstore.get`."""
        request = _request(key, inplace_tensor, tensor_slice_spec)
        work = self._fetcher.get_values({key: request}, timeout)
        values = await self._observed("get", work, inplace_tensor, timeout)
        return values[key]

    async def get_batch(
        self,
        keys: Iterable[str] | Mapping[str, torch.Tensor | TensorSlice | None],
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> dict[str, Any]:
        """See `torchstore.get_batch`."""
        wanted = keys if isinstance(keys, Mapping) else dict.fromkeys(check_keys(keys))
        requests = {
            key: _request(key, None, want) if isinstance(want, TensorSlice) else _request(key, want, None)
            for key, want in wanted.items()
        }
        return await self._observed("get", self._fetcher.get_values(requests, timeout), wanted, timeout)

    async def put_state_dict(
        self, state_dict: Mapping[Any, Any] | None, key: str, **options: Unpack[PutOptions]
    ) -> int:
        """See `torchstore.put_state_dict`."""
        return await self.put_version(StateDictPut(state_dict, key, **options))

    async def put_version(self, put: StateDictPut) -> int:
        """Run a request of `torchstore.put_state_dict`."""
        put.check()
        put = self._last_puts.resolve(put)
        certify = self.remote.info.certify if put.certify is None else put.certify
        put = replace(put, copies=self._copies(put), checksum=self._summed(put.checksum), certify=certify)
        number = await self._observed("put", self.publisher.put_state_dict(put), put.state_dict, put.timeout)
        self._last_puts.keep(put)
        return number

    async def get_state_dict(
        self, key: str, user_state_dict: Mapping[Any, Any] | None = None, **options: Unpack[GetOptions]
    ) -> dict[Any, Any]:
        """See `torchstore.get_state_dict`."""
        return await self.get_version(StateDictGet(key, user_state_dict, **options))

    async def get_version(self, get: StateDictGet) -> dict[Any, Any]:
        """Run a request of `torchstore.get_state_dict`."""
        get.check()
        return await self._observed("get", self._fetcher.get_state_dict(get), get.into, get.timeout)

    async def pin(
        self,
        key: str,
        *,
        version: VersionSelector = "latest",
        beside: int | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> PinnedVersion:
        """Hold a version of a state dict, to read blocks of its tensors one after another.

        Args:
            key: The key of the state dict.
            version: The version to hold.
            beside: The lease of another reader that holds this version; ``version`` is then a number. The version can
                be read until the other reader has released it, also if newer ones have replaced it.
            timeout: In seconds.
        """
        check_key(key)
        return await self._fetcher.pin(key, replace(selector_of(version), beside=beside), timeout)

    async def with_pinned(
        self,
        key: str,
        use: Callable[[PinnedVersion], Awaitable[None]],
        into: object,
        *,
        version: VersionSelector = "latest",
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """Hold a version of a state dict while it is read block by block; the reads count as one get.

        Args:
            key: The key of the state dict.
            use: A function that reads from the pinned version.
            into: The tensors that it fills, in dicts or lists: they may be on GPUs that are busy.
            version: The version to hold.
            timeout: In seconds, to get the version.

        Returns:
            The version's number.
        """
        check_key(key)
        work = self._fetcher.with_pinned(key, selector_of(version), use, timeout)
        return await self._observed("get", work, into, timeout)

    async def reserve(self, key: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        """The number of a new version, for publishers that agree on it among themselves."""
        check_key(key)
        return await self.remote.ask_once(
            lambda to, request: to.reserve.call_one(self.remote.info.client, key, request), timeout
        )

    async def explain(
        self, key: str, user_state_dict: Mapping[Any, Any] | None = None, **options: Unpack[GetOptions]
    ) -> Explanation:
        """See `torchstore.explain`."""
        return await self.explain_get(StateDictGet(key, user_state_dict, **options))

    async def explain_get(self, get: StateDictGet) -> Explanation:
        """Run a request of `torchstore.explain`."""
        get.check()
        return await self._fetcher.explain(get)

    async def get_meta(self, key: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> ValueMeta:
        """See `torchstore.get_meta`."""
        check_key(key)
        return await self.remote.ask(lambda to: to.meta.call_one(key), timeout)

    async def certified(
        self, key: str, version: int | None, *, timeout: float = DEFAULT_TIMEOUT_S
    ) -> tuple[int, Mapping[int, TensorsTiles]]:
        """The tiles that the publishers of a version (None: the newest) have certified, and the version's number."""
        found: tuple[int, Mapping[int, TensorsTiles]] = await self.remote.ask(
            lambda to: to.certified.call_one(key, version), timeout
        )
        return found

    async def wait_for_readers(self, key: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """See `torchstore.wait_for_readers`."""
        check_key(key)
        await self.remote.fence(key, close=False, timeout=timeout)

    async def fence(self, key: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """See `torchstore.fence`."""
        check_key(key)
        await self.remote.fence(key, close=True, timeout=timeout)
        self.publisher.withdraw(key)
        self._fetcher.withdraw(key)

    async def rollback(self, key: str, version: int, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """See `torchstore.rollback`."""
        check_key(key)
        check_version(version)
        await self.remote.ask_once(
            lambda to, request: to.rollback.call_one(self.remote.info.client, key, version, request), timeout
        )

    async def delete(self, key: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """See `torchstore.delete`."""
        check_key(key)
        await self.remote.delete((key,), missing_ok=False, timeout=timeout)
        self.forget((key,))

    async def delete_batch(self, keys: Iterable[str], *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """See `torchstore.delete_batch`."""
        gone = check_keys(keys)
        await self.remote.delete(gone, missing_ok=True, timeout=timeout)
        self.forget(gone)

    async def keys(self, prefix: str | None = None, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """See `torchstore.keys`."""
        if prefix is not None:
            check_key(prefix, "a prefix")
        return await self.remote.ask(lambda to: to.keys.call_one(prefix), timeout)

    async def exists(self, key: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> bool:
        """See `torchstore.exists`."""
        check_key(key)
        return await self.remote.ask(lambda to: to.exists.call_one(key), timeout)

    async def exists_batch(self, keys: Iterable[str], *, timeout: float = DEFAULT_TIMEOUT_S) -> dict[str, bool]:
        """See `torchstore.exists_batch`."""
        asked = tuple(dict.fromkeys(check_keys(keys)))
        answers: tuple[bool, ...] = await self.remote.ask(lambda to: to.exist.call_one(asked), timeout)
        return dict(zip(asked, answers, strict=True))

    async def versions(self, key: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> tuple[int, ...]:
        """See `torchstore.versions`."""
        check_key(key)
        return await self.remote.ask(lambda to: to.versions.call_one(key), timeout)

    def close(self) -> None:
        """Release registrations and plans. Versions that this process published in direct mode end here."""
        self.publisher.close()
        self._fetcher.close()
        self._last_puts.forget_all()

    async def _observed(
        self, op: str, work: Coroutine[Any, Any, tuple[T, SyncRecord | None]], values: object, timeout: float
    ) -> T:
        """The result of an operation on tensors among ``values``, whose record is kept; one that fails is counted."""
        try:
            work = work if tracing.tracer is None else self._traced(op, work)
            gpus = gpus_of(values)
            result, record = await (in_stream_order(work, gpus, timeout) if gpus else work)
        except StaleClientError:  # another client does it again
            raise
        except Exception as error:
            self._log.failed(op, error)
            raise
        if record is not None:
            self.last_sync = record
            self._log.add(record)
        return result

    async def _traced(self, op: str, work: Awaitable[tuple[T, SyncRecord | None]]) -> tuple[T, SyncRecord | None]:
        """The same within a span."""
        with tracing.span(f"torchstore.{op}", **{"torchstore.store": self.remote.store_name}) as span:
            result, record = await work
            if record is not None:
                span.set(**record.attributes())
            return result, record

    def _summed(self, checksum: bool | None) -> bool:
        """Whether a put computes checksums: as it says itself, or as the store was initialized."""
        return self.remote.info.checksum if checksum is None else check_flag("checksum", checksum)

    def _copies(self, put: StateDictPut) -> int:
        """In how many volumes a put stores each part: as it says itself, or as the store was initialized."""
        has_no_copies = put.delta or put.mode == "direct"
        if put.copies is None:
            return 1 if has_no_copies else self.remote.info.copies
        check_copies(put.copies)
        if put.copies > 1 and has_no_copies:
            raise ValueError("copies are made of snapshots: they need mode='snapshot', without delta=True")
        check_room(put.copies, len(self.remote.info.volumes))
        return put.copies

    def forget(self, keys: tuple[str, ...]) -> None:
        """Keys were deleted: release what this process holds for them."""
        self.publisher.forget(keys)
        self._fetcher.forget(keys)
        self._last_puts.forget(keys)


def _request(key: str, into: object, part: object) -> ValueRequest:
    check_key(key)
    if into is not None and not isinstance(into, torch.Tensor):
        raise KindMismatchError(key, f"inplace_tensor is a tensor or a DTensor, not {type(into).__name__}")
    if part is not None and not isinstance(part, TensorSlice):
        raise TypeError(f"tensor_slice_spec is a TensorSlice, not {type(part).__name__}")
    if into is not None:
        check_writable(into, key)
    return ValueRequest(into, part)
