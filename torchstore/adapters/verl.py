"""verl's checkpoint engine over the store; written against verl 0.9.1, ``verl/checkpoint_engine/base.py``.

verl imports this module on its workers if ``checkpoint_engine.custom_backend_module`` names it; the import registers
the backend ``torchstore``. The process of the first actor rank becomes the root of a job, and the rollout workers join
it: through a file on its host, from other hosts at an address (``serve_at``). Rollout workers that outlive the actor
join the job of the next one.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from skipper import control
from skipper import torchstore as ts
from skipper.torchstore.adapters.registration import BACKEND
from skipper.torchstore.adapters.weights import buckets
from skipper.torchstore.support.blocking import run

GATES = ("*.gate.weight", "*_gate.weight", "*.router.*", "*.e_score_correction_bias")
"""The names of expert gates in the models of transformers: Mixtral, Qwen, DeepSeek, gpt-oss, Llama 4."""


@CheckpointEngineRegistry.register(BACKEND)
class TorchStoreCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl is not there to be typed
    """Sends the actor's weights to rollout workers, bucket by bucket, each as one version of one key.

    Receivers wait until the store announces the bucket that they need, read it one-sidedly from the store's volume, and
    continue with the next. The actor does not wait for them. Only its first rank puts; the others only run the
    collectives of the generator.

    Args:
        bucket_size: Bytes of weights in one bucket, from verl's configuration.
        is_master: Whether this is the first actor rank.
        address: A job (see `control.join`) whose script has initialized the store; None: the first actor rank serves
            its own job, with its own store.
        serve_at: The address where workers on other hosts join the job of the first actor rank, for
            `control.serve_job`: ``tcp://eth0:0`` means any port of that network device, on the rank's host. None: other
            hosts cannot join.
        secret_file: For several hosts, see `control.serve_job` and `control.join`; the next three arguments as well.
        certs: See ``secret_file``.
        insecure: See ``secret_file``.
        data_plane: See ``secret_file``; without certificates, or with this, weights are read one-sidedly between hosts.
        store_name: The name of the store.
        key: Prefix of the keys of the buckets.
        rollout_dtype: The dtype to which floating-point weights are converted before the put; None: no conversion.
        keep_dtype: Names (shell patterns) of weights that are sent without conversion. Rounded expert gates choose
            other experts, so trainers and engines have them in float32.
        device: The device for the tensors of receivers.
        timeout: Timeout of each step, in seconds.

    Raises:
        ValueError: ``rollout_dtype`` names no dtype.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        address: str | None = None,
        serve_at: str | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        certs: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        data_plane: bool | None = None,
        store_name: str = "verl",
        key: str = "policy",
        rollout_dtype: torch.dtype | str | None = torch.bfloat16,
        keep_dtype: Sequence[str] = GATES,
        device: str | torch.device = "cpu",
        timeout: float = 600.0,
    ) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        dtype = getattr(torch, rollout_dtype, rollout_dtype) if isinstance(rollout_dtype, str) else rollout_dtype
        if not isinstance(dtype, torch.dtype | None):
            raise ValueError(f"rollout_dtype is a dtype of torch such as 'bfloat16', not {rollout_dtype!r}")
        self.rollout_dtype = dtype
        self.keep_dtype = tuple(keep_dtype)
        self._address = address
        self._serve_at = serve_at
        self._trust: dict[str, Any] = {"secret_file": secret_file, "certs": certs, "insecure": insecure}
        self._data_plane = data_plane
        self._store_name = store_name
        self._key = key
        self._device = torch.device(device)
        self._timeout = timeout
        self._round = 0
        self._takes_part = False

    def prepare(self) -> dict[str, Any]:
        """Begin a round: the first actor rank starts or joins the store, and returns its address.

        Returns:
            This worker's entry for `build_topology`.
        """
        if not self.is_master:
            return {}
        if self._address is None:
            self._address = self._serve()  # first: other hosts do not reach what was started before
            run(lambda: ts.initialize(store_name=self._store_name, timeout=self._timeout), begins_job=True)
        elif not self._round:
            self._join(self._address)
            self._round = max(run(lambda: ts.versions(self._bucket(0), store_name=self._store_name)), default=0)
        self._round += 1
        return {"address": self._address, "round": self._round}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give the first actor rank and every rollout worker the place of the store and the round's number.

        Returns:
            Arguments of `init_process_group` for the actor's ranks and for the rollout's.
        """
        ranks = [0] + [-1] * (actor_wg_world_size - 1)
        actor: dict[str, list[Any]] = {"rank": ranks, "master_metadata": [metadata[0]] * actor_wg_world_size}
        rollout: dict[str, list[Any]] = {
            "rank": list(range(1, rollout_world_size + 1)),
            "master_metadata": [metadata[0]] * rollout_world_size,
        }
        return actor, rollout

    def init_process_group(self, rank: int, master_metadata: dict[str, Any]) -> None:
        """Join the store's job, if this worker sends or receives.

        Args:
            rank: 0 for the sender, from 1 on for receivers, negative for actor ranks that do not send.
            master_metadata: The result of the first actor rank's `prepare`.
        """
        self._takes_part = rank >= 0
        self._round = master_metadata["round"]
        if self._takes_part and not self.is_master:
            self._join(master_metadata["address"])

    def finalize(self) -> None:
        """End a round. The job and the store stay; the next round is written into the same memory."""
        self._takes_part = False

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Put the weights of the model; on actor ranks that do not send, only consume the generator.

        Args:
            weights: Names and whole tensors.
            global_steps: The trainer's step, which is sent with them.

        Returns:
            Bytes and seconds, for the trainer's metrics; empty if nothing was sent.
        """
        if not self._takes_part:
            for _ in weights:
                pass
            return {}
        began, nbytes = time.perf_counter(), 0
        for number, (bucket, is_last) in enumerate(buckets(self._converted(weights), self.bucket_size)):
            nbytes += sum(tensor.nbytes for tensor in bucket.values())
            await ts.put_state_dict(
                {"weights": bucket, "is_last": is_last, "global_steps": global_steps},
                self._bucket(number),
                self._store_name,
                version=self._round,
                timeout=self._timeout,
            )
        return {"torchstore/sent_nbytes": float(nbytes), "torchstore/send_s": time.perf_counter() - began}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Receive the weights of this round, as they arrive.

        Args:
            global_steps: Not needed: the round identifies the weights.

        Yields:
            Names and whole tensors, in memory of their own.
        """
        number, is_last = 0, False
        while not is_last:
            bucket = await ts.get_state_dict(
                self._bucket(number),
                store_name=self._store_name,
                version=("newer_than", self._round - 1),
                timeout=self._timeout,
            )
            for name, tensor in bucket["weights"].items():
                yield name, tensor.to(self._device)
            number, is_last = number + 1, bucket["is_last"]

    def _converted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as they are sent."""
        for name, tensor in weights:
            is_kept = not tensor.is_floating_point() or any(fnmatchcase(name, each) for each in self.keep_dtype)
            yield name, tensor if is_kept or self.rollout_dtype is None else tensor.to(self.rollout_dtype)

    def _serve(self) -> str:
        """Open the job of this process. Returns the address where others join it."""
        if self._serve_at is None:
            return str(control.serve_job().path)
        served = control.serve_job(address=self._serve_at, data_plane=self._data_plane, **self._trust)
        assert served.address is not None  # it was requested
        return served.address

    def _join(self, address: str) -> None:
        """Join the job of an actor, and leave that of an earlier actor."""
        trust = self._trust if address.startswith("tcp://") else {}
        control.join(address, timeout=self._timeout, replace=True, **trust)

    def _bucket(self, number: int) -> str:
        return f"{self._key}.{number}"
