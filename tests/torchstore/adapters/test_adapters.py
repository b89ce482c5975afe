"""vLLM's and verl's engines over the store: their protocols, and transfers to processes that control did not start."""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from skipper import control
from skipper import torchstore as ts
from skipper.control import Actor, endpoint, this_host
from skipper.torchstore.adapters import register_vllm
from skipper.torchstore.adapters.weights import WeightOwnership, as_dtensors, buckets, mesh_of
from tests.freezing import freeze
from tests.torchstore import stand_ins
from tests.torchstore.tensors.test_local_tensors import rank_of

stand_ins.install()

REPOSITORY = Path(__file__).parents[3]
WORKERS = 2


class InferenceWorkers:
    """Two worker processes; every request goes to both at once."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.torchstore.inference_worker"]
        self.processes = [
            subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(WORKERS)
        ]

    def ask(self, kind: str, method: str, *arguments: Any) -> list[Any]:
        answers = self.begin(kind, method, *arguments)()
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(answer["error"])
        return [answer["result"] for answer in answers]

    def begin(self, kind: str, method: str, *arguments: Any) -> Callable[[], list[dict[str, Any]]]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([kind, method, arguments]) + "\n")
            process.stdin.flush()

        def answers() -> list[dict[str, Any]]:
            lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
            return [json.loads(line) for line in lines]

        return answers


class Client:
    """vLLM's `VLLMWeightSyncClient`, whose payloads travel as JSON like over its HTTP routes."""

    def __init__(self, workers: InferenceWorkers) -> None:
        self._workers = workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._workers.ask("vllm", "init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._workers.ask("vllm", "start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._workers.ask("vllm", "update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._workers.ask("vllm", "finish_weight_update")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceWorkers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        workers = InferenceWorkers({**os.environ, "OMP_NUM_THREADS": "1"})
        yield workers
        for process in workers.processes:
            with process:  # closes its pipes
                process.kill()


@pytest.fixture
async def store() -> AsyncIterator[None]:
    await ts.initialize()
    yield
    await ts.shutdown()


class Whole(stand_ins.WeightSource):
    """A source that can give whole tensors only."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = stand_ins.ModuleSource(model)

    @property
    def metadata(self) -> Any:
        return self._model.metadata

    def iter_full(self) -> Any:
        return self._model.iter_full()


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(value)


def test_the_engines_have_every_method_of_the_protocols_with_its_parameters() -> None:
    vllm, verl = import_module("skipper.torchstore.adapters.vllm"), import_module("skipper.torchstore.adapters.verl")
    bases = import_module("vllm.distributed.weight_transfer.base")
    for engine, base in (
        (vllm.TorchStoreWeightTransferEngine, bases.WeightTransferEngine),
        (vllm.TorchStoreTrainerWeightTransferEngine, bases.TrainerWeightTransferEngine),
        (verl.TorchStoreCheckpointEngine, import_module("verl.checkpoint_engine.base").CheckpointEngine),
    ):
        assert issubclass(engine, base)
        assert engine.__abstractmethods__ == frozenset()
        assert stand_ins.same_parameters(engine, base) == []


def test_an_engine_without_a_method_would_be_noticed() -> None:
    class Lacking(stand_ins.CheckpointEngine):
        async def send_weights(self, weights: Any) -> None: ...

    assert "finalize" in Lacking.__abstractmethods__
    assert stand_ins.same_parameters(Lacking, stand_ins.CheckpointEngine) == ["send_weights"]


def test_registering_with_vllm_names_both_engines_and_may_be_repeated() -> None:
    factories = import_module("vllm.distributed.weight_transfer.factory")
    register_vllm()
    register_vllm()
    vllm = import_module("skipper.torchstore.adapters.vllm")
    worker, trainer = factories.WeightTransferEngineFactory, factories.WeightTransferTrainerFactory
    assert worker._registry["torchstore"]() is vllm.TorchStoreWeightTransferEngine
    assert trainer._registry["torchstore"]() is vllm.TorchStoreTrainerWeightTransferEngine


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("mode", ["direct", "snapshot"])
def test_vllm_workers_load_what_the_trainer_has(workers: InferenceWorkers, mode: str) -> None:
    vllm = import_module("skipper.torchstore.adapters.vllm")
    model = stand_ins.Model()
    engine = vllm.TorchStoreTrainerWeightTransferEngine.trainer_init(
        vllm.TorchStoreTrainerInitInfo(rank=0, mode=mode),
        client=Client(workers),
        source=stand_ins.ModuleSource(model),
    )
    loads = ["initialize", "finalize config"]
    for value in (1.0, 2.0, 3.0):
        fill(model, value)
        assert engine.send_weights().version == value
        fill(model, -1.0)  # the optimizer's next step
        for values, calls in workers.ask("vllm", "look"):
            assert (values, calls[-2:]) == ([value], loads)
            assert calls[:-2] in ([], ["initialize", "a b c", "finalize config"])  # recorded once in all
    engine.shutdown()
    workers.ask("vllm", "shutdown")


@pytest.mark.usefixtures("store")
def test_whole_tensors_go_to_vllm_in_buckets(workers: InferenceWorkers) -> None:
    vllm = import_module("skipper.torchstore.adapters.vllm")
    model = stand_ins.Model()
    engine = vllm.TorchStoreTrainerWeightTransferEngine.trainer_init(
        vllm.TorchStoreTrainerInitInfo(rank=0, bucket_nbytes=2000), client=Client(workers), source=Whole(model)
    )
    loads = ["initialize", "finalize config"]
    recorded = ["initialize", "a", "finalize config", "initialize", "b c", "finalize config"]
    for value, calls in ((4.0, [*recorded, *loads]), (5.0, loads)):
        fill(model, value)
        engine.send_weights()
        assert workers.ask("vllm", "look") == [[[value], calls]] * WORKERS
    engine.shutdown()
    workers.ask("vllm", "shutdown")


class Looking(Client):
    """Looks at the workers when they have begun to read, and have to answer all the same."""

    def __init__(self, workers: InferenceWorkers) -> None:
        super().__init__(workers)
        self.seen: list[Any] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        super().update_weights(update_info)
        self.seen += [values for values, _ in self._workers.ask("vllm", "look")]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("sharded", [True, False])
def test_vllm_workers_read_in_the_background_and_change_at_the_end(workers: InferenceWorkers, sharded: bool) -> None:
    vllm = import_module("skipper.torchstore.adapters.vllm")
    model = stand_ins.Model()
    client = Looking(workers)
    engine = vllm.TorchStoreTrainerWeightTransferEngine.trainer_init(
        vllm.TorchStoreTrainerInitInfo(rank=0, background=True, bucket_nbytes=2000),
        client=client,
        source=stand_ins.ModuleSource(model) if sharded else Whole(model),
    )
    before = [values for values, _ in workers.ask("vllm", "look")]
    for value in (11.0, 12.0, 13.0):
        fill(model, value)
        record = engine.send_weights()
        fill(model, -1.0)
        assert client.seen == before * (1 if sharded else 2)
        assert [values for values, _ in workers.ask("vllm", "look")] == [[value]] * WORKERS
        for update in workers.ask("vllm", "last_update"):
            assert (update["version"], update["flip"]) == (record.version, "pointers")
            assert update["nbytes"] == sum(weight.nbytes for weight in model.parameters())
        before = [[value]] * WORKERS
        client.seen.clear()
    engine.shutdown()
    workers.ask("vllm", "shutdown")


@pytest.mark.parametrize("background", [False, True])
def test_trl_weights_come_in_buckets_and_change_at_the_end(
    workers: InferenceWorkers, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    trl = import_module("skipper.torchstore.adapters.trl")

    class Served(Looking):
        def __init__(self, url: str, **options: Any) -> None:
            super().__init__(workers)

        def wait_until_ready(self, timeout: float) -> None:
            pass

    monkeypatch.setattr(trl, "PausingHTTPClient", Served)
    model = stand_ins.Model()
    transfer = trl.TorchStoreWeightTransfer("http://nowhere", bucket_nbytes=2000, background=background)
    transfer.init_weight_transfer()
    before = [values for values, _ in workers.ask("vllm", "look")]
    for value in (15.0, 16.0):
        fill(model, value)
        transfer.send_weights(iter(model.named_parameters()))
        assert transfer._client.seen == before * 2
        assert [values for values, _ in workers.ask("vllm", "look")] == [[value]] * WORKERS
        for update in workers.ask("vllm", "last_update"):
            assert (update["version"], update["flip"]) == (transfer.last_send.version, "pointers" if background else "")
        before = [[value]] * WORKERS
        transfer._client.seen.clear()
    error, said = (RuntimeError, "workers could not read .* RecordingError") if background else (Exception, "Recording")
    with pytest.raises(error, match=said):
        transfer.send_weights(iter(torch.nn.Linear(3, 3).named_parameters()))
    assert [values for values, _ in workers.ask("vllm", "look")] == before
    transfer.destroy()
    workers.ask("vllm", "shutdown")


@pytest.mark.usefixtures("store")
def test_a_read_in_the_background_that_fails_leaves_the_old_weights(workers: InferenceWorkers) -> None:
    vllm = import_module("skipper.torchstore.adapters.vllm")

    def trainer(model: torch.nn.Module, **options: Any) -> Any:
        return vllm.TorchStoreTrainerWeightTransferEngine.trainer_init(
            vllm.TorchStoreTrainerInitInfo(rank=0, **{"background": True, **options}),
            client=Client(workers),
            source=stand_ins.ModuleSource(model),
        )

    model = stand_ins.Model()
    fill(model, 21.0)
    trainer(model).send_weights()
    with pytest.raises(RuntimeError, match="workers could not read the weights: RecordingError"):
        trainer(torch.nn.Linear(3, 3)).send_weights()
    assert [values for values, _ in workers.ask("vllm", "look")] == [[21.0]] * WORKERS
    fill(model, 22.0)
    trainer(model).send_weights()
    assert [values for values, _ in workers.ask("vllm", "look")] == [[22.0]] * WORKERS
    workers.ask("vllm", "shutdown")
    workers.ask("vllm", "renew")
    with pytest.raises(RuntimeError, match=r"SecondSetError: .* second_set_nbytes allows 5,000 for both"):
        trainer(model, second_set_nbytes=5000)
    with pytest.raises(ValueError, match="background=True"):
        trainer(model, background=False, second_set_nbytes=5000)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("options", [{"mode": "snapshot"}, {"mode": "direct", "keep_for_late": True}, {}])
def test_an_engine_that_comes_later_loads_what_was_sent_last(
    workers: InferenceWorkers, options: dict[str, Any]
) -> None:
    vllm = import_module("skipper.torchstore.adapters.vllm")
    model = stand_ins.Model()
    served = control.serve_job()
    engine = vllm.TorchStoreTrainerWeightTransferEngine.trainer_init(
        vllm.TorchStoreTrainerInitInfo(rank=0, address=str(served.path), **options),
        client=Client(workers),
        source=stand_ins.ModuleSource(model),
    )
    for value in (31.0, 32.0):
        fill(model, value)
        engine.send_weights()
        fill(model, -1.0)
        expected = value if options else 0.0  # in direct mode that was the trainer's memory
        late = workers.ask("vllm", "start_late", str(served.path))
        assert [values for values, _ in late] == [[expected]] * WORKERS
    fill(model, 33.0)
    engine.send_weights()  # to those that came later, which are connected already
    assert [values for values, _ in workers.ask("vllm", "look")] == [[33.0]] * WORKERS
    engine.shutdown()
    workers.ask("vllm", "shutdown")


def test_an_engine_starts_without_its_trainer(workers: InferenceWorkers) -> None:
    assert [values for values, _ in workers.ask("vllm", "start_late", "nobody")] == [[0.0]] * WORKERS
    workers.ask("vllm", "shutdown")


@pytest.mark.usefixtures("store")
def test_a_vllm_worker_says_what_is_wrong(workers: InferenceWorkers) -> None:
    workers.ask("vllm", "shutdown")
    update = {"key": "k", "version": 1, "names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
    with pytest.raises(RuntimeError, match="call init_transfer_engine before"):
        workers.ask("vllm", "update_weights", update)
    with pytest.raises(RuntimeError, match="ValueError: 1 names, 0 dtypes"):
        workers.ask("vllm", "update_weights", {**update, "dtype_names": []})
    with pytest.raises(RuntimeError, match="ValueError"):
        workers.ask("vllm", "init_weight_transfer_engine", {"master_port": 1})
    with pytest.raises(RuntimeError, match="JobNotFoundError"):
        workers.ask("vllm", "init_weight_transfer_engine", {"address": "nobody", "store_name": "default"})


class StageTrainer(Actor):
    """The second rank of a trainer's pipeline."""

    @endpoint
    async def send(self, source: str, value: float, **options: Any) -> list[str]:
        """What the first rank does with ``send_weights``; returns what the client was asked for."""
        vllm = import_module("skipper.torchstore.adapters.vllm")
        stage, client = getattr(stand_ins, source)(STAGES, 1), MagicMock()
        engine = vllm.TorchStoreTrainerWeightTransferEngine.trainer_init(
            vllm.TorchStoreTrainerInitInfo(rank=1, num_trainer_ranks=2, **options), client=client, source=stage
        )
        fill(stage.stage, value)
        try:
            engine.send_weights()
        except ts.StoreTimeoutError:
            client.timed_out()
        fill(stage.stage, -1.0)
        return [name for name, _, _ in client.method_calls]


STAGES = [[0, 1], [2]]  # the trainer's; those of the workers are cut elsewhere


@pytest.fixture(scope="module")
def second_rank() -> Iterator[Any]:
    procs = this_host().spawn_procs()
    yield procs.spawn("second rank", StageTrainer)
    procs.stop().get(timeout=20)


@pytest.mark.parametrize(
    ("source", "keys"), [("LocalStageSource", ["policy"]), ("StageSource", ["policy.0", "policy.1"])]
)
async def test_a_trainer_goes_on_after_a_put_of_one_rank_has_timed_out(
    second_rank: Any, source: str, keys: list[str]
) -> None:
    """And what is left of the step that failed is no part of the next one."""
    await ts.initialize(1, ts.LocalRankStrategy())
    try:
        vllm = import_module("skipper.torchstore.adapters.vllm")
        (volume,) = (await ts.client()).remote.info.processes.values()
        options: dict[str, Any] = {"mode": "snapshot", "bucket_nbytes": 700}
        stage = getattr(stand_ins, source)(STAGES, 0)

        async def send(value: float, timeout: float = 60.0) -> None:
            engine = vllm.TorchStoreTrainerWeightTransferEngine.trainer_init(
                vllm.TorchStoreTrainerInitInfo(rank=0, num_trainer_ranks=2, timeout=timeout, **options),
                client=MagicMock(),
                source=stage,
            )
            fill(stage.stage, value)
            await asyncio.to_thread(engine.send_weights)

        freeze(volume.pid)
        try:
            assert await second_rank.send.call_one(source, 1.0, **options, timeout=0.5) == ["timed_out"]
        finally:
            os.kill(volume.pid, signal.SIGCONT)
        with pytest.raises(ts.StoreTimeoutError, match="missing: the share of rank 1"):  # the workers are not asked
            await send(1.0, timeout=0.5)
        assert [await ts.versions(key) for key in keys] == [()] * len(keys)
        for value in (2.0, 3.0):
            called, _ = await asyncio.gather(
                second_rank.send.call_one(source, value, **options, timeout=60.0), send(value)
            )
            assert called == []
            for key in keys:
                sent = await ts.get_state_dict(key)
                assert {float(weight.unique()) for weight in sent.values()} == {value}
    finally:
        await ts.shutdown()


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("source", "options", "pieces"),
    [
        ("LocalStageSource", {"mode": "direct"}, [["0", "1 2"]]),
        ("LocalStageSource", {"mode": "snapshot"}, [["0", "1 2"]]),
        ("StageSource", {"bucket_nbytes": 700}, [["0", "2"], ["", "1"]]),
    ],
)
async def test_pipelines_on_both_sides_give_and_get_their_own_layers(
    workers: InferenceWorkers, second_rank: Any, source: str, options: dict[str, Any], pieces: list[list[str]]
) -> None:
    vllm = import_module("skipper.torchstore.adapters.vllm")
    options = {**options, "timeout": 20.0}
    layers = dict(zip([process.pid for process in workers.processes], ([0], [1, 2]), strict=True))
    workers.ask("vllm", "become_stage", layers)
    stage = getattr(stand_ins, source)(STAGES, 0)
    engine = vllm.TorchStoreTrainerWeightTransferEngine.trainer_init(
        vllm.TorchStoreTrainerInitInfo(rank=0, num_trainer_ranks=2, **options), client=Client(workers), source=stage
    )
    for value in (1.0, 2.0):
        fill(stage.stage, value)
        other = second_rank.send.call_one(source, value, **options)
        called, _ = await asyncio.gather(other, asyncio.to_thread(engine.send_weights))
        assert called == []
        fill(stage.stage, -1.0)
        for rank, (values, calls) in enumerate(workers.ask("vllm", "look")):
            assert values == [value]
            loaded = [
                " ".join(f"layers.{layer}.{kind}" for layer in piece[rank].split() for kind in ("weight", "bias"))
                for piece in pieces
            ]
            recorded = [call for names in loaded for call in ("initialize", names, "finalize config")]
            assert calls == [*(recorded if value == 1.0 else ()), "initialize", "finalize config"]
    engine.shutdown()
    workers.ask("vllm", "shutdown")


def test_a_source_whose_order_is_not_that_of_its_metadata_is_refused() -> None:
    trainer = import_module("skipper.torchstore.adapters.vllm.trainer")
    stream = iter([("b", torch.ones(1)), ("a", torch.ones(1))])
    assert list(trainer._take(stream, ["a"])) == ["a"]
    with pytest.raises(ValueError, match="did not give b"):
        trainer._take(stream, ["b"])


def test_every_weight_is_put_whole_by_the_first_rank_that_owns_it() -> None:
    owners = {"a": None, "b": (1, 2), "c": (2,), "d": (1, 2), "e": (1, 2)}
    metadata = [stand_ins.ParamMeta(name, torch.float32, (4, 2), owners=ranks) for name, ranks in owners.items()]
    pieces = WeightOwnership(metadata, 3).pieces(64)
    names = {rank: [[meta.name for meta in piece] for piece in cut] for rank, cut in pieces.items()}
    assert names == {0: [["a"]], 1: [["b", "d"], ["e"]], 2: [["c"]]}
    assert WeightOwnership([], 2).pieces(64) == {0: [[]]}


def test_shards_of_a_stage_are_described_without_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = stand_ins.ParamMeta(
        "w", torch.float32, (5, 2), owners=(1, 3), mesh_shape=(2,), placements=(stand_ins.Shard(0),)
    )
    with rank_of(3, 4):
        shard = as_dtensors([("w", torch.ones(2, 2))], [meta])["w"]
        assert isinstance(shard, DTensor)
        coordinate = shard.device_mesh.get_coordinate() or ()
        assert (tuple(shard.shape), tuple(coordinate)) == ((5, 2), (1,))
        with pytest.raises(RuntimeError):
            shard.device_mesh.get_group()
        monkeypatch.setattr("torch.distributed.device_mesh.DeviceMesh", lambda device_type, mesh: None)
        with pytest.raises(RuntimeError, match="has no DeviceMesh without process groups"):
            mesh_of("cpu", (0, 1), (2,))


def test_torch_still_has_the_private_argument_that_shards_need() -> None:
    parameters = inspect.signature(DeviceMesh).parameters
    assert "_init_backend" in parameters, (
        f"DeviceMesh of torch {torch.__version__} has no argument _init_backend any more: mesh_of in "
        "torchstore/adapters/shards.py needs another way to a mesh without process groups"
    )


def test_a_vllm_trainer_needs_a_source_that_fits() -> None:
    vllm = import_module("skipper.torchstore.adapters.vllm")
    engine, info = vllm.TorchStoreTrainerWeightTransferEngine, vllm.TorchStoreTrainerInitInfo(rank=1)

    class Elsewhere(Whole):
        @property
        def metadata(self) -> Any:
            return [stand_ins.ParamMeta("a", torch.float32, (1,), owners=(1,))]

    for source in (None, Elsewhere(stand_ins.Model())):
        with pytest.raises(ValueError, match=r"WeightSource|owned by ranks \(1,\) of 1"):
            engine.trainer_init(info, client=None, source=source)


def test_verl_rollout_workers_receive_what_the_actor_sends(workers: InferenceWorkers) -> None:
    verl = import_module("skipper.torchstore.adapters.verl").TorchStoreCheckpointEngine
    actors = [verl(bucket_size=2000, is_master=True), verl(bucket_size=2000)]
    model = stand_ins.Model()
    with ThreadPoolExecutor(1) as executor:
        for step in (1, 2):
            fill(model, step)
            metadata = [actor.prepare() for actor in actors] + workers.ask("verl", "execute", "prepare", {})
            for_actors, for_rollout = verl.build_topology(len(actors), WORKERS, metadata)
            assert all(len(values) == len(actors) for values in for_actors.values())
            assert all(len(values) == WORKERS for values in for_rollout.values())
            for rank, actor in enumerate(actors):
                actor.init_process_group(**{name: values[rank] for name, values in for_actors.items()})
            mine = {name: values[0] for name, values in for_rollout.items()}
            workers.ask("verl", "execute", "init_process_group", mine)
            receiving = executor.submit(workers.ask, "verl", "update_weights", step)
            metrics = [send(actor, model, step) for actor in actors]
            expected = [
                ["a", "torch.bfloat16", [33, 20], [float(step)]],
                ["b", "torch.bfloat16", [7], [float(step)]],
                ["c", "torch.bfloat16", [4, 8, 10], [float(step)]],
            ]
            assert receiving.result(timeout=60) == [expected] * WORKERS
            assert metrics[0]["torchstore/sent_nbytes"] == 2 * (660 + 7 + 320)
            assert metrics[1] == {}
            for actor in actors:
                actor.finalize()
            workers.ask("verl", "execute", "finalize", {})


def test_a_dtype_that_torch_does_not_know_is_refused() -> None:
    verl = import_module("skipper.torchstore.adapters.verl").TorchStoreCheckpointEngine
    assert verl(bucket_size=1, rollout_dtype="float16").rollout_dtype is torch.float16
    with pytest.raises(ValueError, match="bf17"):
        verl(bucket_size=1, rollout_dtype="bf17")


def send(actor: Any, model: torch.nn.Module, step: int) -> Any:
    taken = iter(model.named_parameters())
    metrics = asyncio.run(actor.send_weights(taken, global_steps=step))
    assert next(taken, None) is None  # also the ranks that do not send take all: their generator gathers
    return metrics


def test_a_worker_that_dies_is_no_hindrance_to_the_trainer(workers: InferenceWorkers) -> None:
    victim = workers.processes[-1]
    victim.kill()
    victim.wait(timeout=20)
    verl = import_module("skipper.torchstore.adapters.verl").TorchStoreCheckpointEngine
    address = str(control.serve_job().path)
    actor = verl(bucket_size=2000, is_master=True, address=address)
    actor.init_process_group(0, actor.prepare())
    assert send(actor, stand_ins.Model(), 9)["torchstore/sent_nbytes"] > 0


def test_buckets_hold_all_weights_in_order_and_no_more_than_they_may() -> None:
    weights = [(str(number), torch.zeros(size)) for number, size in enumerate((3, 1, 2, 9, 1))]
    pieces = list(buckets(iter(weights), 16))
    assert [list(piece) for piece, _ in pieces] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert [is_last for _, is_last in pieces] == [False, False, False, True]
    assert list(buckets(iter(()), 16)) == [({}, True)]


@pytest.mark.parametrize(("options", "kept"), [({}, {"gate"}), ({"keep_dtype": ("up.*",)}, {"up"})])
def test_verl_sends_gates_of_experts_as_they_are(options: dict[str, Any], kept: set[str]) -> None:
    """The last ones of this file: they end the job that the others share."""
    engine = import_module("skipper.torchstore.adapters.verl").TorchStoreCheckpointEngine(
        1 << 20, is_master=True, store_name="gates", **options
    )
    engine.init_process_group(0, engine.prepare())
    names = {"gate": "layers.0.mlp.gate.weight", "gate_proj": "layers.0.mlp.gate_proj.weight", "up": "up.weight"}
    sent = {name: torch.full((3, 3), 1 + 2**-20) for name in names.values()}

    async def received() -> dict[str, torch.Tensor]:
        await engine.send_weights(iter(sent.items()))
        return {name: tensor async for name, tensor in engine.receive_weights()}

    found = asyncio.run(received())
    ts.sync.shutdown("gates")
    control.shutdown()
    for short, name in names.items():
        wanted = sent[name] if short in kept else sent[name].bfloat16()
        assert found[name].dtype == wanted.dtype
        assert found[name].equal(wanted)
