"""The trainer's side for vLLM: publish on every rank, drive the workers from rank 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from skipper import control
from skipper import torchstore as ts
from skipper.torchstore.adapters.registration import BACKEND
from skipper.torchstore.adapters.vllm.messages import TorchStoreInitInfo, describe
from skipper.torchstore.adapters.weights import WeightOwnership, as_dtensors
from skipper.torchstore.support.blocking import run

Weights = dict[str, torch.Tensor]

_begun: Counter[tuple[str, str, int, int]] = Counter()
"""How often each rank that this process has been has begun to send, by store, key, rank and number of ranks.

The ranks do not talk to each other before they put, and all of them send equally often, whether it comes to an end or
not. So each send is a group of publishers of its own, which is called by its number: one that fails on some ranks
leaves nothing that could be taken for a part of another one, also by engines that are made anew.
"""


@dataclass
class TorchStoreTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is not there to be typed
    """What the trainer's engine needs to know; the same on every trainer rank, but for ``rank``.

    Attributes:
        num_trainer_ranks: How many trainer ranks there are.
        address: The job whose store is used; None: that of rank 0's own process, which is then served.
        store_name: A store that the trainer has initialized (`initialize`, or `initialize_spmd` under torchrun).
        key: Prefix of the keys that are written.
        mode: "direct" has workers read the trainer's own memory, which costs no copy; "snapshot" copies it into a
            volume first. Whole tensors that a source gathers are always copied, bucket by bucket.
        bucket_nbytes: How many bytes of whole tensors a rank gathers at a time.
        timeout: Bound on each step, in seconds.
    """

    backend: ClassVar[str] = BACKEND

    num_trainer_ranks: int = 1
    address: str | None = None
    store_name: str = ts.DEFAULT_STORE_NAME
    key: str = "policy"
    mode: str = "direct"
    bucket_nbytes: int = 1 << 30
    timeout: float = 600.0


class TorchStoreTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side, on every rank.

    Where the source gives local shards (``iter_local``), every rank puts those of its own weights and nothing is
    gathered. Otherwise each weight is put whole (``iter_full``) by the first rank that owns it: by rank 0, or by the
    first rank of each stage of a pipeline. Either way the metadata of every rank are about all weights.
    """

    init_info_cls = TorchStoreTrainerInitInfo

    def __init__(self, init_info: TorchStoreTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        self._info = init_info
        self._ownership = WeightOwnership(source.metadata, init_info.num_trainer_ranks)
        self._sharded = source.implements_iter_local() and self._ownership.is_shared
        self._served: control.ServedJob | None = None

    @classmethod
    def trainer_init(
        cls, init_info: TorchStoreTrainerInitInfo, *, client: Any, source: Any = None
    ) -> TorchStoreTrainerWeightTransferEngine:
        """Make the engine; rank 0 has the workers join.

        Raises:
            ValueError: There is no source, it gives neither shards nor whole tensors, or it names owners of weights
                that are no trainer ranks.
        """
        if source is None:
            raise ValueError("weights come from a WeightSource: pass source=ModuleSource(model), for instance")
        engine = cls(init_info, client=client, source=source)
        if not engine._sharded and not source.implements_iter_full():
            raise ValueError(
                f"{type(source).__name__} gives no shards of weights that trainer ranks share among them, and no others"
            )
        if engine.is_sender:
            address = init_info.address
            if address is None:
                engine._served = control.serve_job()
                address = str(engine._served.path)
            connection = TorchStoreInitInfo(address, init_info.store_name, init_info.timeout)
            client.init_weight_transfer_engine(asdict(connection))
        return engine

    def send_weights(self) -> None:
        """Put the weights and have the workers load them; every trainer rank calls it.

        When it returns the weights may be changed again. On rank 0 the workers have loaded them. Where it fails, on all
        ranks or on some, the next call on every rank sends the weights as they are then.

        Raises:
            StoreError: The store or a volume of it is dead, or rank 0 did not come in time.
            RuntimeError: Rank 0 could not have the workers load them.
            ValueError: The source does not give what its metadata say.
        """
        info = self._info
        _begun[info.store_name, info.key, self.rank, info.num_trainer_ranks] += 1
        if self.is_sender:
            self.client.start_weight_update()
        if self._sharded:
            self._send_shards()
        else:
            self._send_whole()
        if self.is_sender:
            self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Let no more workers join; the script that initialized the store shuts it down."""
        if self._served is not None:
            self._served.close()

    def _send_whole(self) -> None:
        """Whole tensors, some at a time; ranks that put none of them take part in gathering them all the same."""
        pieces = self._ownership.pieces(self._info.bucket_nbytes)
        stream = iter(self.source.iter_full())
        putters = tuple(pieces)
        for number in range(max(map(len, pieces.values())) if self.rank in pieces else 0):
            in_turn = {rank: cut[number] for rank, cut in pieces.items() if number < len(cut)}
            weights = _take(stream, [meta.name for meta in in_turn.get(self.rank, ())])
            key = f"{self._info.key}.{number}"
            version = self._put(weights, key, "snapshot", putters.index(self.rank), len(putters))
            if self.is_sender:
                named = {meta.name: meta for metadata in in_turn.values() for meta in metadata}
                self.client.update_weights(describe(key, version, named | weights))
        for _ in stream:
            pass

    def _send_shards(self) -> None:
        weights = as_dtensors(self.source.iter_local(), self.source.metadata)
        key, info = self._info.key, self._info
        version = self._put(weights, key, info.mode, self.rank, info.num_trainer_ranks)
        failure: Exception | None = None
        if self.is_sender:
            try:
                named = {meta.name: meta for meta in self.source.metadata}
                self.client.update_weights(describe(key, version, named | weights))
            except Exception as error:  # noqa: BLE001  (raised again below, when the other ranks have been told)
                failure = error
        if info.mode == "direct" and info.num_trainer_ranks > 1:
            run(lambda: self._tell_ranks(version, failure) if self.is_sender else self._await_rank_0(version))
        if info.mode == "direct":
            run(lambda: ts.fence(key, store_name=info.store_name, timeout=info.timeout))
        if failure is not None:
            raise failure

    def _put(self, weights: Weights, key: str, mode: Any, index: int, count: int) -> int:
        """Put this rank's part of what ``count`` ranks put together in this send."""
        info = self._info
        number = _begun[info.store_name, info.key, self.rank, info.num_trainer_ranks]
        publisher = ts.Origin(f"send {number}", index, count)
        return run(
            lambda: ts.put_state_dict(
                weights, key, info.store_name, mode=mode, publisher=publisher, timeout=info.timeout
            )
        )

    async def _tell_ranks(self, version: int, failure: Exception | None) -> None:
        """Let the other ranks know that the workers have read the shards, or that it went wrong."""
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
            raise RuntimeError(f"rank 0 could not have the workers load the weights: {outcome['failure']}")


def _take(stream: Iterator[tuple[str, torch.Tensor]], names: list[str]) -> Weights:
    """The next of these weights; others, which other ranks put, are passed over.

    Raises:
        ValueError: The stream has ended before.
    """
    taken: Weights = {}
    missing = set(names)
    while missing:
        name, weight = next(stream, ("", None))
        if weight is None:
            raise ValueError(f"the source has not given {', '.join(sorted(missing))} in the order of its metadata")
        if name in missing:
            missing.remove(name)
            taken[name] = weight
    return taken
