"""The trainer's side for vLLM: publish on every rank, control the workers from rank 0."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from skipper import control
from skipper import torchstore as ts
from skipper.torchstore.adapters.board import tell
from skipper.torchstore.adapters.registration import BACKEND
from skipper.torchstore.adapters.vllm.messages import TorchStoreInitInfo, describe
from skipper.torchstore.adapters.vllm.readers import ReadersWatch
from skipper.torchstore.adapters.vllm.sources import ShardSource, described, gives_shards, gives_whole, whole_tensors
from skipper.torchstore.adapters.vllm.update import WorkersUpdate, timed
from skipper.torchstore.adapters.weights import WeightOwnership, as_dtensors
from skipper.torchstore.support.blocking import run

Weights = dict[str, torch.Tensor]

_begun: Counter[tuple[str, str, int, int]] = Counter()
"""How many sends this process has begun, by store, key, rank and number of ranks.

The ranks do not communicate before they put, and all of them send equally often, even if sends fail. So each send is a
publisher group of its own, named by its number: the parts of a send that fails on some ranks cannot be mistaken for
parts of another send, also if the engine is created again.
"""


@dataclass(frozen=True)
class SendRecord:
    """The durations of the steps of one `send_weights`, in seconds; rank 0 knows all, other ranks only their own put.

    Generation stops for ``stopped_s`` if the client can pause it. The workers read before that, and keep the old
    weights until they have all of the new ones. A worker that reads does not compute, so requests also wait for
    ``transfer_s``; with ``background`` they do not.

    Attributes:
        version: The version of the weights, which the workers report as ``weight_version``. 0 on ranks other than 0.
        put_s: To publish, including the wait for the other ranks; with whole tensors also to gather them.
        transfer_s: The workers read; in the background they also load.
        pause_s: The client pauses generation; 0 if it cannot.
        load_s: The workers give the weights to the model.
        resume_s: The client resumes generation.
    """

    version: int = 0
    put_s: float = 0.0
    transfer_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0
    resume_s: float = 0.0

    @property
    def stopped_s(self) -> float:
        """How long generation was stopped."""
        return self.pause_s + self.load_s + self.resume_s


@dataclass
class TorchStoreTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is not there to be typed
    """The arguments of the trainer's engine; the same on every trainer rank, except ``rank``.

    Attributes:
        num_trainer_ranks: The number of trainer ranks.
        address: The job whose store is used; None: the job of rank 0's own process, which is then served.
        store_name: A store that the trainer has initialized (`initialize`, or `initialize_spmd` under torchrun).
        key: Prefix of the keys that are written.
        mode: With "direct" the workers read the trainer's own memory, without a copy; "snapshot" copies it into a
            volume first. Whole tensors that a source gathers are always copied, bucket by bucket.
        bucket_nbytes: How many bytes of whole tensors a rank gathers at a time.
        timeout: Timeout of each step, in seconds.
        staging_nbytes: The memory that a worker may use in addition to its model: at most this much, or one layer.
            None: as much as its rank reads. The model then changes when everything has arrived, and a failed transfer
            changes nothing. Whole tensors that a source gathers wait until all have arrived, except with
            ``background``.
    """

    backend: ClassVar[str] = BACKEND

    num_trainer_ranks: int = 1
    address: str | None = None
    store_name: str = ts.DEFAULT_STORE_NAME
    key: str = "policy"
    mode: str = "direct"
    bucket_nbytes: int = 1 << 30
    timeout: float = 600.0
    staging_nbytes: int | None = None
    background: bool = False
    second_set_nbytes: int | None = None
    keep_for_late: bool = False


class TorchStoreTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side, on every rank.

    If the source gives shards (`ShardSource`, or ``iter_local``), every rank puts those of its own weights, and nothing
    is gathered. Otherwise the first rank that owns a weight puts it whole: rank 0, or the first rank of each pipeline
    stage. In both cases the metadata of every rank describe all weights.

    Attributes:
        last_send: The record of the last complete `send_weights`; None before the first.
    """

    init_info_cls = TorchStoreTrainerInitInfo

    def __init__(self, init_info: TorchStoreTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        self.last_send: SendRecord | None = None
        self._info = init_info
        self._metadata = described(source)
        self._ownership = WeightOwnership(self._metadata, init_info.num_trainer_ranks)
        self._sharded = isinstance(source, ShardSource) or (gives_shards(source) and self._ownership.is_shared)
        self._served: control.ServedJob | None = None
        self._connection: dict[str, Any] = {}  # the connection for the workers, on rank 0
        self._seconds: Counter[str] = Counter()

    @classmethod
    def trainer_init(
        cls, init_info: TorchStoreTrainerInitInfo, *, client: Any, source: Any = None
    ) -> TorchStoreTrainerWeightTransferEngine:
        """Create the engine; rank 0 lets the workers join.

        Raises:
            ValueError: There is no source, it gives neither shards nor whole tensors, or it names owners of weights
                that are not trainer ranks.
        """
        if source is None:
            raise ValueError("weights come from a WeightSource: pass source=ShardSource(model), for instance")
        engine = cls(init_info, client=client, source=source)
        if not engine._sharded and not gives_whole(source):
            raise ValueError(f"{type(source).__name__} gives neither shards of weights nor whole weights")
        if engine.is_sender:
            address = init_info.address
            if address is None:
                engine._served = control.serve_job()
                address = str(engine._served.path)
            engine._connection = asdict(engine._connection_at(address))
            client.init_weight_transfer_engine(engine._connection)
        return engine

    def send_weights(self) -> SendRecord:
        """Put the weights and let the workers load them; every trainer rank calls it.

        When it returns, the weights may be changed again. On rank 0 the workers have then loaded them. If it fails, on
        all ranks or on some, the workers keep their old weights (see ``staging_nbytes``), and the next call on every
        rank sends the weights as they are then.

        If the client has methods ``pause`` and ``resume``, they are called before and after the workers change their
        models; otherwise the caller makes sure that nothing is generated meanwhile.

        Returns:
            The durations of the steps.

        Raises:
            StoreError: The store or a volume of it is dead, or a rank did not come in time.
            RuntimeError: The workers of rank 0 could not load them.
            ValueError: The source gives other weights than its metadata describe.
        """
        info = self._info
        _begun[info.store_name, info.key, self.rank, info.num_trainer_ranks] += 1
        self._seconds.clear()
        readers = ReadersWatch(secrets.token_hex(8), info.timeout) if info.background else None
        update = WorkersUpdate(self.client, self._seconds, readers) if self.is_sender else None
        with update or nullcontext():
            version = self._send_shards(update) if self._sharded else self._send_whole(update)
            if update is not None:
                update.finish(str(version))
        if self._sharded and info.mode == "direct" and info.keep_for_late:
            self._keep_shards()
        elif update is not None:
            gone = self._sharded and info.mode == "direct"
            why_gone = f"version {version} was in the memory of the trainer (keep_for_late=False)" if gone else ""
            tell("sent", self._connection, update.pieces, why_gone)
        self.last_send = SendRecord(version if self.is_sender else 0, **self._seconds)
        return self.last_send

    def shutdown(self) -> None:
        """Let no more workers join; the script that initialized the store shuts it down."""
        if self._served is not None:
            self._served.close()

    def _connection_at(self, address: str) -> TorchStoreInitInfo:
        info = self._info
        return TorchStoreInitInfo(
            address, info.store_name, info.timeout, info.staging_nbytes, info.background, info.second_set_nbytes
        )

    def _send_whole(self, update: WorkersUpdate | None) -> int:
        """Put whole tensors, some at a time; ranks that put none of them still take part in gathering them."""
        pieces = self._ownership.pieces(self._info.bucket_nbytes)
        stream = whole_tensors(self.source)
        putters = tuple(pieces)
        rounds = max(map(len, pieces.values()))
        version = 0
        try:
            for number in range(rounds if self.rank in pieces else 0):
                in_turn = {rank: cut[number] for rank, cut in pieces.items() if number < len(cut)}
                key = f"{self._info.key}.{number}"
                with timed(self._seconds, "put_s"):
                    weights = _take(stream, [meta.name for meta in in_turn.get(self.rank, ())])
                    version = self._put(weights, key, "snapshot", putters.index(self.rank), len(putters))
                    if update is not None:
                        self._await_version(key, version)
                if update is not None:
                    named = {meta.name: meta for metadata in in_turn.values() for meta in metadata}
                    update.transfer(describe(key, version, named | weights, is_last=number == rounds - 1))
        finally:
            for _ in stream:  # also after a failure: the other ranks continue to gather
                pass
        return version

    def _send_shards(self, update: WorkersUpdate | None) -> int:
        key, info = self._info.key, self._info
        weights = self._shards()
        failure: Exception | None = None
        with timed(self._seconds, "put_s"):
            version = self._put(weights, key, info.mode, self.rank, info.num_trainer_ranks)
            if update is not None:
                try:
                    self._await_version(key, version)
                except Exception as error:  # noqa: BLE001  (raised below, when the other ranks have been told)
                    failure = error
        if update is not None and failure is None:
            try:
                named = {meta.name: meta for meta in self._metadata}
                update.transfer(describe(key, version, named | weights, is_last=True))
            except Exception as error:  # noqa: BLE001  (raised below, when the other ranks have been told)
                failure = error
        if info.mode == "direct" and info.num_trainer_ranks > 1:
            run(lambda: self._tell_ranks(version, failure) if self.is_sender else self._await_rank_0(version))
        if info.mode == "direct":
            run(lambda: ts.fence(key, store_name=info.store_name, timeout=info.timeout))
        if failure is not None:
            raise failure
        return version

    def _keep_shards(self) -> None:
        """Copy this rank's shards into its volume; rank 0 announces them for engines that start later."""
        key, named = f"{self._info.key}.late", {meta.name: meta for meta in self._metadata}
        weights = self._shards()
        version = self._put(weights, key, "snapshot", self.rank, self._info.num_trainer_ranks)
        if self.is_sender:
            self._await_version(key, version)
            tell("sent", self._connection, [describe(key, version, named | weights, is_last=True)], "")

    def _shards(self) -> Weights:
        if isinstance(self.source, ShardSource):
            return self.source.weights()
        return as_dtensors(self.source.iter_local(), self._metadata)

    def _put(self, weights: Weights, key: str, mode: Any, index: int, count: int) -> int:
        """Put this rank's part of a version that ``count`` ranks put together in this send."""
        info = self._info
        number = _begun[info.store_name, info.key, self.rank, info.num_trainer_ranks]
        publisher = ts.Origin(f"send {number}", index, count)
        return run(
            lambda: ts.put_state_dict(
                weights, key, info.store_name, mode=mode, publisher=publisher, timeout=info.timeout
            )
        )

    def _await_version(self, key: str, version: int) -> None:
        """Wait until all ranks have put their parts; the workers continue to generate."""
        info = self._info
        nothing = ts.LoadPlan({}, {}, (), (), (), ())
        run(
            lambda: ts.load_by_plan(
                key,
                nothing,
                torch.nn.Module(),
                info.store_name,
                version=("newer_than", version - 1),
                timeout=info.timeout,
            )
        )

    async def _tell_ranks(self, version: int, failure: Exception | None) -> None:
        """Tell the other ranks that the workers have read the shards, or that the read has failed."""
        outcome = {"failure": "" if failure is None else f"{type(failure).__name__}: {failure}"}
        store_name, timeout = self._info.store_name, self._info.timeout
        key = f"{self._info.key}.read"
        await ts.put_state_dict(outcome, key, store_name, version=version, publisher=(0, 1), timeout=timeout)

    async def _await_rank_0(self, version: int) -> None:
        """Keep this rank's shards readable until the workers have read them."""
        outcome = await ts.get_state_dict(
            f"{self._info.key}.read",
            store_name=self._info.store_name,
            version=("newer_than", version - 1),
            timeout=self._info.timeout,
        )
        if outcome["failure"]:
            raise RuntimeError(f"the workers did not load the weights: {outcome['failure']}")


def _take(stream: Iterator[tuple[str, torch.Tensor]], names: list[str]) -> Weights:
    """The next of these weights; weights that other ranks put are skipped.

    Raises:
        ValueError: The stream has ended too early.
    """
    taken: Weights = {}
    missing = set(names)
    while missing:
        name, weight = next(stream, ("", None))
        if weight is None:
            raise ValueError(f"the source did not give {', '.join(sorted(missing))} in the order of its metadata")
        if name in missing:
            missing.remove(name)
            taken[name] = weight
    return taken
