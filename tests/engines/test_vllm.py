"""A real trainer and a real vLLM: each version generates what transformers generates with the same weights."""

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.engines.environment import needs_vllm
from tests.engines.processes import EngineProcess, Processes, ServerProcess, TrainerProcesses, kill
from tests.engines.sockets import CallFailedError, call

pytestmark = [needs_vllm(), pytest.mark.timeout(900)]

LARGEST_LAYER = 2 * 320 * 128 * 4  # gate and up, which are one matrix


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as started:
        yield started


@pytest.fixture(scope="module")
def started(processes: Processes) -> dict[str, Any]:
    """All that most tests need, begun at once: importing vLLM takes its time."""
    return {
        "one": processes.engine(1),
        "two": processes.engine(2),
        "trainer": processes.trainer(),
        "server": processes.server(),
    }


@pytest.fixture(scope="module", params=["one process", "two ranks"])
def engine(started: dict[str, Any], request: pytest.FixtureRequest) -> EngineProcess:
    found: EngineProcess = started[request.param.split()[0]]
    return found.wait()


@pytest.fixture
def trainer(started: dict[str, Any]) -> TrainerProcesses:
    found: TrainerProcesses = started["trainer"]
    return found.wait()


def sync(trainer: TrainerProcesses, engine: EngineProcess) -> dict[str, Any]:
    """A step and a sync, whose version says what transformers does; rank 0's times."""
    before = engine.call("generate")
    trainer.call("step")
    expected = trainer.call("expected")[0]
    assert expected != before
    record: dict[str, Any] = trainer.call("send")[0]
    assert engine.call("generate") == expected
    assert engine.call("weight_version") == str(record["version"])
    return record


@pytest.mark.parametrize("mode", ["direct", "snapshot"])
def test_every_version_generates_what_transformers_does(
    trainer: TrainerProcesses, engine: EngineProcess, mode: str
) -> None:
    trainer.call("connect", paths=[engine.path], mode=mode)
    for _ in range(2):
        record = sync(trainer, engine)
        updates = engine.call("look")
        for update in updates:
            assert update["version"] == record["version"]
            assert update["whole"] == 0
            assert update["nbytes"] <= 1.02 * update["parameter_nbytes"]
        assert sum(update["nbytes"] for update in updates) <= 1.02 * trainer.call("nbytes")[0]
        parts = [record[f"{part}_s"] for part in ("put", "transfer", "pause", "load", "resume")]
        assert all(part > 0 for part in parts)


def test_memory_beside_the_model_is_bounded_where_that_is_asked_for(
    trainer: TrainerProcesses, engine: EngineProcess
) -> None:
    trainer.call("connect", paths=[engine.path], staging_nbytes=1 << 16)
    sync(trainer, engine)
    for update in engine.call("look"):
        assert update["staged_nbytes"] <= LARGEST_LAYER < update["parameter_nbytes"]


def test_whole_tensors_come_in_buckets(trainer: TrainerProcesses, engine: EngineProcess) -> None:
    trainer.call("connect", paths=[engine.path], source="whole", bucket_nbytes=300_000)
    sync(trainer, engine)
    for update in engine.call("look"):
        assert update["nbytes"] <= 1.02 * update["parameter_nbytes"]


def test_whole_tensors_that_come_in_the_background_are_loaded_as_they_come(
    trainer: TrainerProcesses, engine: EngineProcess
) -> None:
    options = {"source": "whole", "bucket_nbytes": 300_000, "background": True, "staging_nbytes": 1 << 16}
    trainer.call("connect", paths=[engine.path], **options)
    for _ in range(2):
        sync(trainer, engine)
        for update in engine.call("look"):
            assert update["flip"] == "pointers"
            assert update["nbytes"] <= 1.02 * update["parameter_nbytes"]
            assert update["staged_nbytes"] < update["parameter_nbytes"] / 2


def keeps_its_weights(trainer: TrainerProcesses, engine: EngineProcess, error: str) -> None:
    """A sync fails, and the engine goes on as before."""
    before, version = engine.call("generate"), engine.call("weight_version")
    trainer.call("step")
    assert trainer.call("expected")[0] != before
    sending, *others = trainer.begin("send")
    with pytest.raises(CallFailedError, match=error):
        sending()
    for other in others:
        with suppress(CallFailedError, EOFError, ConnectionError):  # it was told, or it is the one that was killed
            other()
    assert engine.call("generate") == before
    assert engine.call("weight_version") == version


def stream_a_sync(trainer: TrainerProcesses, engine: EngineProcess) -> dict[str, Any]:
    """A sync while the engine generates; what came out meanwhile, and before and after."""
    trainer.call("step")
    trainer.call("expected")
    engine.call("stream", requests=3, max_tokens=40)
    await_answers(engine, 3)
    begin = engine.call("clock")
    trainer.call("send")
    end = engine.call("clock")
    await_answers(engine, engine.call("streamed") + 6)
    stream: dict[str, Any] = engine.call("end_stream")
    stream["during"] = sum(tokens for at, tokens in stream["steps"] if begin < at < end)
    return stream


def await_answers(engine: EngineProcess, count: int) -> None:
    end = time.monotonic() + 120
    while engine.call("streamed") < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_engine_generates_while_it_reads_and_each_step_is_of_one_version(
    trainer: TrainerProcesses, engine: EngineProcess
) -> None:
    trainer.call("connect", paths=[engine.path], background=True, staging_nbytes=1 << 16)
    sync(trainer, engine)
    stream = stream_a_sync(trainer, engine)
    for update in engine.call("look"):
        assert (update["flip"], update["whole"]) == ("pointers", 0)
        assert update["nbytes"] <= 1.02 * update["parameter_nbytes"]
        assert update["staged_nbytes"] <= LARGEST_LAYER < update["parameter_nbytes"]
    assert stream["during"] > 0
    switches = trainer.call("explain", answers=stream["answers"])[0]
    assert [] not in switches
    assert any(numbers[0] == 0 for numbers in switches)
    assert any(numbers[-1] == 40 for numbers in switches)
    assert any(numbers[0] > 0 and numbers[-1] < 40 for numbers in switches)  # of both, as those that were under way
    sync(trainer, engine)

    engine.call("stream", requests=3, max_tokens=40)
    await_answers(engine, 3)
    engine.call("tear")
    await_answers(engine, engine.call("streamed") + 6)
    torn = trainer.call("explain", answers=engine.call("end_stream")["answers"])[0]
    assert [] in torn  # a mixture would have been noticed
    sync(trainer, engine)


def test_an_engine_that_starts_after_a_sync_has_its_weights_by_itself(
    processes: Processes, trainer: TrainerProcesses, engine: EngineProcess
) -> None:
    trainer.call("connect", paths=[engine.path], keep_for_late=True)
    sync(trainer, engine)
    expected = engine.call("generate")
    late = processes.engine(2, job=call(trainer.paths[0], "job"))
    assert late.wait().call("generate") == expected
    for update in late.call("look"):
        assert update["nbytes"] <= 1.02 * update["parameter_nbytes"]
    kill(late.process)


@pytest.mark.parametrize("options", [{}, {"staging_nbytes": 1 << 16}, {"background": True}])
def test_a_weight_that_the_trainer_forgets_changes_nothing(
    trainer: TrainerProcesses, engine: EngineProcess, options: dict[str, Any]
) -> None:
    trainer.call("connect", paths=[engine.path])
    sync(trainer, engine)
    trainer.call("connect", paths=[engine.path], without="model.norm.weight", **options)
    for _ in range(2):
        keeps_its_weights(trainer, engine, "sends nothing for model.norm.weight|500 Server")
    trainer.call("connect", paths=[engine.path])
    sync(trainer, engine)


@pytest.mark.parametrize("options", [{}, {"background": True}])
def test_volumes_and_trainers_that_die_change_nothing_and_a_successor_goes_on(
    processes: Processes, trainer: TrainerProcesses, engine: EngineProcess, options: dict[str, Any]
) -> None:
    """A volume dies when all have put and nobody has read; then a rank; then, of the next trainer, that which leads."""
    first, second = processes.trainer(), processes.trainer()
    first.wait().call("connect", paths=[engine.path])
    sync(first, engine)
    victims = first.call("volumes")[0]
    first.call("connect", paths=[engine.path], mode="snapshot", kill_before_reading=victims, **options)
    keeps_its_weights(first, engine, "storage volume .* is lost")
    first.call("connect", paths=[engine.path], timeout=10.0, **options)
    sync(first, engine)
    first.call("connect", paths=[engine.path], timeout=10.0, kill_before_reading=[first.processes[1].pid], **options)
    keeps_its_weights(first, engine, "its publisher's memory")
    before = engine.call("generate")
    with pytest.raises(CallFailedError, match="StoreTimeoutError"):
        call(first.paths[0], "send")
    assert engine.call("generate") == before
    first.end()

    second.wait().call("connect", paths=[engine.path])
    sync(second, engine)
    second.call("connect", paths=[engine.path], kill_before_reading=[second.processes[0].pid], **options)
    before = engine.call("generate")
    with pytest.raises((EOFError, ConnectionError)):
        second.call("send")
    assert engine.call("generate") == before
    second.end()

    trainer.call("connect", paths=[engine.path])
    sync(trainer, engine)


def test_a_head_that_shares_the_embedding_follows_it(processes: Processes) -> None:
    """On CPUs vLLM packs the head's matrix for itself."""
    changes = {"tie_word_embeddings": True}
    engine, trainer = processes.engine(**changes), processes.trainer(ranks=1, **changes)
    engine.wait()
    trainer.wait().call("connect", paths=[engine.path])
    for _ in range(2):
        sync(trainer, engine)


def test_a_server_is_paused_for_the_load_alone(trainer: TrainerProcesses, started: dict[str, Any]) -> None:
    server: ServerProcess = started["server"].wait()
    trainer.call("connect", paths=[server.path])
    for _ in range(2):
        trainer.call("step")
        record = trainer.call("send")[0]
        assert server.generate() == trainer.call("expected")[0]
        assert server.ask("/weight_info") == {"weight_version": str(record["version"])}
        assert server.ask("/is_paused") == {"is_paused": False}
        assert all(record[f"{part}_s"] > 0 for part in ("pause", "load", "resume"))


def test_a_server_reads_in_the_background_and_goes_on(trainer: TrainerProcesses, started: dict[str, Any]) -> None:
    server: ServerProcess = started["server"].wait()
    trainer.call("connect", paths=[server.path], background=True, pause="step")
    for _ in range(2):
        trainer.call("step")
        with ThreadPoolExecutor(1) as threads:
            answers = threads.submit(server.generate)
            record = trainer.call("send")[0]
            assert len(answers.result()) == 3
        assert server.generate() == trainer.call("expected")[0]
        assert server.ask("/weight_info") == {"weight_version": str(record["version"])}
