"""TRL's asynchronous trainers over the store: ``WeightTransferProtocol`` of ``trl/experimental/async_grpo``, TRL 1.16.

TRL gathers the weights one by one on all ranks of the trainer and passes them to its main process, the only one with a
`TorchStoreWeightTransfer`. That puts them into a store of its own, in buckets. Each vLLM worker reads its part of a
bucket into memory next to its model; the model changes when all buckets have arrived.
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
"""Numbers of the stores of this process, so that a worker does not confuse one store with the next."""


class TorchStoreWeightTransfer:
    """A weight transfer for ``AsyncGRPOTrainer(weight_transfer=...)``, in the trainer's main process.

    TRL requests a pause before it gathers anything. This class pauses the server later: when the workers have read all
    weights, and only while their models change. If a sync fails, the workers keep their old weights, and the server
    runs.

    Args:
        server_url: The URL of vLLM's server, as in TRL's configuration. It runs with ``VLLM_SERVER_DEV_MODE=1`` and
            ``--weight-transfer-config '{"backend": "torchstore"}'``.
        mode: What happens to requests in progress at the pause; see `PausingHTTPClient`. TRL's own mode is "keep".
        bucket_nbytes: How many bytes of weights are put at a time; they are copied.
        background: The workers read and load into a second set of weights while they generate, and exchange the sets at
            the end; with ``mode="step"`` nothing is paused for that. A worker then needs memory for its weights twice.
        second_set_nbytes: With ``background``: the limit of the second set and one load together, on each worker; None:
            the free memory.
        serve_at: The address where workers on other hosts join, for `control.serve_job`; None: they cannot join.
        secret_file: For several hosts, see `control.serve_job`; the next three arguments as well.
        certs: See ``secret_file``.
        insecure: See ``secret_file``.
        data_plane: See ``secret_file``.
        start_timeout: Timeout of the wait for the server, in seconds.
        timeout: Timeout of each step, in seconds.

    Attributes:
        last_send: The durations of the steps of the last sync; None before the first.
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
        """Start a store, and let the server's workers join its job; TRL calls it when training begins.

        Raises:
            TimeoutError: The server does not answer.
            ValueError: ``secret_file`` or similar without ``serve_at``, or `control.serve_job` refuses them.
            requests.HTTPError: The server runs without the backend, or its workers cannot join.
        """
        self.destroy()
        self._client.wait_until_ready(self._start_timeout)
        self._served = control.serve_job(**self._serve_at)  # first: other hosts do not reach what was started before
        self._store_name = f"trl-{next(_stores)}"
        run(lambda: ts.initialize(store_name=self._store_name, timeout=self._timeout), begins_job=True)
        address = self._served.address or str(self._served.path)
        connection = replace(self._connection, address=address, store_name=self._store_name)
        self._client.init_weight_transfer_engine(asdict(connection))

    def pause(self) -> None:
        """Do nothing yet: `send_weights` pauses the server when its workers have read the weights."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Put the weights and let the workers load them.

        The iterator is always consumed to its end, because the other ranks gather at the same time.

        Args:
            iterator: Names and whole tensors of the model's parameters; TRL merges a LoRA adapter.

        Raises:
            RuntimeError: `init_weight_transfer` was not called; with ``background`` also: the workers could not read or
                load them.
            StoreError: The store or one of its volumes is dead.
            requests.HTTPError: The workers could not read or load them; the server's log says why.
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
        """Do nothing: the server runs again when `send_weights` has ended, even with an error."""

    def destroy(self) -> None:
        """Release the store; the server keeps its weights. This and the other methods may be called again."""
        served, self._served = self._served, None
        if served is not None:
            served.close()
            run(lambda: ts.shutdown(self._store_name, timeout=self._timeout))

    def _put(self, bucket: dict[str, torch.Tensor], key: str) -> None:
        run(
            lambda: ts.put_state_dict(bucket, key, self._store_name, version=self._version, timeout=self._timeout),
        )
