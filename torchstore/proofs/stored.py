"""The certificate of a version in a store."""

from __future__ import annotations

import asyncio
from typing import Literal

from skipper.torchstore.algebra.key_names import check_key
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME, run
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S
from skipper.torchstore.clients.requests import check_version
from skipper.torchstore.proofs.certificate import Certificate, certify
from skipper.torchstore.support.coroutines import public


@public
async def certificate(
    key: str,
    store_name: str = DEFAULT_STORE_NAME,
    *,
    version: int | Literal["latest"] = "latest",
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Certificate:
    """The certificate of a version that was put with ``certify=True``; reads none of its tensors.

    The store has those of the last four certified versions of each key, also when their bytes are gone: a reader asks
    for the version that it has read, whatever was put meanwhile.

    Args:
        key: As the state dict was put.
        store_name: Which store.
        version: The number that the put or the read has returned, or the newest.
        timeout: In seconds.

    Raises:
        NotCertifiedError: Some rank has put it without ``certify=True``.
        KeyNotFoundError: There is no such key or version; `PartiallyPublishedError`: it is not whole yet.
        ReplicaMismatchError: Two ranks hold other bytes of one tile, which must be replicas.
        ShareMismatchError: The ranks have not certified the same dtypes.
        StoreTimeoutError: The controller did not answer in time.
    """
    check_key(key)
    if version != "latest":
        check_version(version)
    number, shares = await run(
        store_name, timeout, LocalClient.certified, key, None if version == "latest" else version, timeout=timeout
    )
    return await asyncio.to_thread(certify, key, number, shares)
