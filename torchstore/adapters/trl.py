"""TRL's asynchronous trainers over the store: ``WeightTransferProtocol`` of ``trl/experimental/async_grpo``, TRL 1.16.

TRL gathers the weights one by one on all ranks of the trainer, and hands them to its main process, which alone has one
of these. It puts them into a store of its own, in buckets; each worker of vLLM reads its part of a bucket beside its
model, which changes when all of them are there.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import torch

from skipper import control
from skipper import torchstore as ts
from skipper.torchstore.adapters.vllm.clients import PauseMode, PausingHTTPClient
from skipper.torchstore.adapters.vllm.messages import TorchStoreInitInfo, describe
from skipper.torchstore.adapters.vllm.readers import ReadersWatch
from skipper.torchstore.adapters.vllm.trainer import SendRecord
from skipper.torchstore.adapters.vllm.update import WorkersUpdate, timed
from skipper.torchstore.adapters.weights import buckets
from skipper.torchstore.support.blocking import run

_stores = count()
"""Numbers of the stores of this process: a worker that has read one takes the next for another."""


class TorchStoreWeightTransfer:
    """What ``AsyncGRPOTrainer(weight_transfer=...)`` takes, in the trainer's main process.

    TRL asks for a pause before it gathers anything. This one pauses the server later, when the workers have read all
    weights, for as long as their models change. A sync that fails leaves them the weights that they had, and the server
    running.

    Args:
        server_url: Of vLLM's server, as in TRL's configuration; it runs with ``VLLM_SERVER_DEV_MODE=1`` and
            ``--weight-transfer-config '{"backend": "torchstore"}'``.
        mode: What becomes of requests that are under way at the pause, see `PausingHTTPClient`. TRL's own is "keep".
        bucket_nbytes: How many bytes of weights are put at a time; they are copied.
        background: The workers read and load into a second set of weights while they generate, and exchange the sets at
            the end; with ``mode="step"`` nothing is paused for that. A worker then has the memory of its weights once
            more.
        second_set_nbytes: With ``background``: limit of the second set and one load together, on each worker; None:
            what is free there.
        serve_at: Where workers on other hosts join, as `control.serve_job` takes it; None: on this host alone.
        secret_file: Of several hosts, as `control.serve_job` takes it; so the next three.
        certs: See ``secret_file``.
        insecure: See ``secret_file``.
        data_plane: See ``secret_file``.
        start_timeout: Bound on the wait for the server, in seconds.
        timeout: Bound on each step, in seconds.

    Attributes:
        last_send: Where the time of the last sync went; None before the first.
    """

    def __init__(
        self,
        server_url: str,
        *,
        mode: PauseMode = "keep",
        bucket_nbytes: int = 1 << 30,
        background: bool = False,
        second_set_nbytes: int | None = None,
        serve_at: str | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        certs: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        data_plane: bool | None = None,
        start_timeout: float = 240.0,
        timeout: float = 600.0,
    ) -> None:
        self.last_send: SendRecord | None = None
        self._client = PausingHTTPClient(server_url, mode=mode, timeout=timeout)
        self._bucket_nbytes = bucket_nbytes
        self._background = background
        options: dict[str, Any] = {"timeout": timeout, "background": background, "second_set_nbytes": second_set_nbytes}
        self._connection = TorchStoreInitInfo("", "", **options)
        self._serve_at: dict[str, Any] = {"address": serve_at, "secret_file": secret_file, "certs": certs}
        self._serve_at |= {"insecure": insecure, "data_plane": data_plane}
        self._start_timeout = start_timeout
        self._timeout = timeout
        self._store_name = ""
        self._served: control.ServedJob | None = None
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Begin a store, and have the server's workers join its job; TRL calls it when training begins.

        Raises:
            TimeoutError: The server does not answer.
            ValueError: ``secret_file`` and the like without ``serve_at``, or what `control.serve_job` says of them.
            requests.HTTPError: It runs without the backend, or its workers cannot join.
        """
        self.destroy()
        self._client.wait_until_ready(self._start_timeout)
        self._served = control.serve_job(**self._serve_at)  # first: what begins before is not reached from other hosts
        self._store_name = f"trl-{next(_stores)}"
        run(lambda: ts.initialize(store_name=self._store_name, timeout=self._timeout), begins_job=True)
        address = self._served.address or str(self._served.path)
        connection = replace(self._connection, address=address, store_name=self._store_name)
        self._client.init_weight_transfer_engine(asdict(connection))

    def pause(self) -> None:
        """Nothing yet: `send_weights` pauses the server, when its workers have read the weights."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Put the weights and have the workers load them.

        The iterator is taken to its end in any case, since the other ranks gather along.

        Args:
            iterator: Names and whole tensors of the model's parameters; an adapter of LoRA is merged by TRL.

        Raises:
            RuntimeError: `init_weight_transfer` was not called; with ``background`` also: the workers could not read or
                load them.
            StoreError: The store is dead, or a volume of it.
            requests.HTTPError: The workers could not read or load them: the server's log says why.
        """
        self._version += 1
        seconds: Counter[str] = Counter()
        readers = ReadersWatch(secrets.token_hex(8), self._timeout) if self._background else None
        try:
            if self._served is None:
                raise RuntimeError("call init_weight_transfer before the first send_weights")
            with WorkersUpdate(self._client, seconds, readers) as update:
                for number, (bucket, is_last) in enumerate(buckets(iterator, self._bucket_nbytes)):
                    key = f"policy.{number}"
                    with timed(seconds, "put_s"):
                        self._put(bucket, key)
                    update.transfer(describe(key, self._version, bucket, is_last=is_last))
                update.finish(str(self._version))
        finally:
            for _ in iterator:
                pass
        self.last_send = SendRecord(self._version, **seconds)

    def resume(self) -> None:
        """Nothing any more: the server runs again when `send_weights` has ended, whichever way."""

    def destroy(self) -> None:
        """Let go of the store; the server keeps its weights. It may be called again, and so may the rest after it."""
        served, self._served = self._served, None
        if served is not None:
            served.close()
            run(lambda: ts.shutdown(self._store_name, timeout=self._timeout))

    def _put(self, bucket: dict[str, torch.Tensor], key: str) -> None:
        run(
            lambda: ts.put_state_dict(bucket, key, self._store_name, version=self._version, timeout=self._timeout),
        )
