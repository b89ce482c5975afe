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

    The store keeps the certificates of the last four certified versions of each key, also after their bytes are gone.
    So a reader can ask for that of the version that it has read, even if newer ones were put since.

    Args:
        key: The key of the state dict.
        store_name: Name of the store.
        version: The number that the put or the read has returned, or the newest.
        timeout: In seconds.

    Raises:
        NotCertifiedError: A rank has put it without ``certify=True``.
        KeyNotFoundError: There is no such key or version; `PartiallyPublishedError`: it is not complete yet.
        ReplicaMismatchError: Two ranks hold different bytes of one tile, of which they should be replicas.
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
