"""Spans of calls across real processes, each of which exports its own: who is whose child, and what went wrong."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from skipper import control
from skipper.control import ActorError, ActorMesh, BackpressureError, ProcMesh, SupervisionError, this_host
from skipper.control.observe import enable_tracing, span
from skipper.control.runtime import current_runtime, tracing
from skipper.control.wire.messages import Call
from skipper.control.wire.payload import pack
from tests.control.conftest import PATIENCE_S, Failures, Script, wait_until
from tests.control.observe.spans import AsyncLink, Link, Made, bootstrap, provider, read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spans")


@pytest.fixture(scope="module")
def own(folder: Path) -> TracerProvider:
    """The provider of the script."""
    return provider(folder)


@pytest.fixture(scope="module", autouse=True)
def traced(folder: Path, own: TracerProvider, runtime_folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "tracer", None)
        enable_tracing(own)
        yield
    own.shutdown()


@pytest.fixture(scope="module")
def procs(folder: Path) -> ProcMesh:
    return this_host().spawn_procs({"gpus": 3}, name="traced", bootstrap=bootstrap(folder))


@pytest.fixture(scope="module")
def chain(procs: ProcMesh) -> ActorMesh[Link]:
    """The first of three, each in a process of its own."""
    last = procs.slice(gpus=2).spawn("last", Link)
    middle = procs.slice(gpus=1).spawn("middle", Link, last)
    return procs.slice(gpus=0).spawn("first", Link, middle)


Spans = Callable[[int], dict[str, Made]]


@pytest.fixture
def spans(folder: Path, own: TracerProvider) -> Iterator[Spans]:
    """A trace of this test's own; once it has so many spans, they are told by name and kind."""
    with trace.get_tracer("test", tracer_provider=own).start_as_current_span("test") as root:
        context = root.get_span_context()

        def found(count: int) -> dict[str, Made]:
            def of_trace() -> list[Made]:
                return [made for made in read(folder) if made.trace == hex(context.trace_id)]

            wait_until(lambda: len(of_trace()) >= count, f"{count} spans: {of_trace()}")
            made = of_trace()
            assert len(made) == count
            return {f"{one.name} {one.kind}": one for one in made}

        yield found


def chained(spans: dict[str, Made], *names: str) -> None:
    """Each is the child of the one before."""
    for parent, child in pairwise(names):
        assert spans[child].parent == spans[parent].id, f"{child} is no child of {parent}"


def test_a_chain_of_calls_is_one_trace_over_all_its_processes(chain: ActorMesh[Link], spans: Spans) -> None:
    assert chain.descend.call_one(1).get(PATIENCE_S) == 3
    found = spans(8)
    chained(
        found,
        *("first.descend CLIENT", "first.descend SERVER", "thinking 1 INTERNAL"),
        *("middle.descend CLIENT", "middle.descend SERVER", "thinking 2 INTERNAL"),
        *("last.descend CLIENT", "last.descend SERVER"),
    )
    assert len({made.pid for made in found.values()}) == 4
    assert {made.status for made in found.values()} == {"UNSET"}
    served = found["middle.descend SERVER"].attributes
    assert (served["rpc.system"], served["rpc.service"], served["rpc.method"]) == ("skipper", "middle", "descend")
    assert served["skipper.class"] == "Link"


def test_a_failing_call_is_an_error_all_the_way(chain: ActorMesh[Link], spans: Spans) -> None:
    with pytest.raises(ActorError):
        chain.fail.call_one().get(PATIENCE_S)
    found = spans(6)
    assert {made.status for made in found.values()} == {"ERROR"}
    chained(found, "first.fail CLIENT", "first.fail SERVER", "middle.fail CLIENT", "middle.fail SERVER")
    chained(found, "last.fail CLIENT", "last.fail SERVER")
    last = found["last.fail SERVER"]
    assert (last.events, last.attributes["error.type"]) == (["exception"], "ValueError")


def test_an_exception_that_cannot_be_described_is_recorded_and_the_actor_lives(procs: ProcMesh, spans: Spans) -> None:
    link = procs.slice(gpus=0).spawn("link", Link)
    with pytest.raises(ActorError, match="WordlessError"):
        link.fail_badly.call_one().get(PATIENCE_S)
    served = spans(2)["link.fail_badly SERVER"]
    assert (served.events, served.attributes["error.type"]) == (["exception"], "WordlessError")
    assert link.descend.call_one(3).get(PATIENCE_S) == 3


def test_a_call_of_a_mesh_has_a_child_in_each_of_its_processes(procs: ProcMesh, spans: Spans, folder: Path) -> None:
    mesh = procs.spawn("ranks", Link)
    pids = mesh.pid.call().get(PATIENCE_S)
    spans_of_ranks = _after(folder, 3, "ranks.pid", "SERVER")
    (client,) = _after(folder, 1, "ranks.pid", "CLIENT")
    assert {made.parent for made in spans_of_ranks} == {client.id}
    assert sorted(made.pid for made in spans_of_ranks) == sorted(pids)
    assert {made.attributes["skipper.rank"] for made in spans_of_ranks} == {"gpus=0", "gpus=1", "gpus=2"}
    assert client.attributes["skipper.mesh.size"] == 3


def test_a_cast_down_a_tree_is_traced_like_any_other(
    procs: ProcMesh, folder: Path, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = control.configure()
    control.configure(tree_threshold=1, tree_fanout=2)
    try:
        procs.spawn("leaves", Link).pid.call().get(PATIENCE_S)
    finally:
        control.configure(tree_threshold=before.tree_threshold, tree_fanout=before.tree_fanout)
    (client,) = _after(folder, 1, "leaves.pid", "CLIENT")
    assert [made.parent for made in _after(folder, 3, "leaves.pid", "SERVER")] == [client.id] * 3


def test_broadcasts_and_streams_and_ports_have_spans_of_their_kinds(
    chain: ActorMesh[Link], folder: Path, spans: Spans
) -> None:
    chain.note.broadcast()
    (produced,) = _after(folder, 1, "first.note", "PRODUCER")
    (consumed,) = _after(folder, 1, "first.note", "CONSUMER")
    assert consumed.parent == produced.id
    assert [future.get(PATIENCE_S) for future in chain.pid.stream()]
    (streamed,) = _after(folder, 1, "first.pid", "CLIENT")
    assert [made.parent for made in _after(folder, 1, "first.pid", "SERVER")] == [streamed.id]
    assert chain.answer.call_one().get(PATIENCE_S) == 1
    (asked,) = _after(folder, 1, "first.answer", "CLIENT")
    assert [made.parent for made in _after(folder, 1, "first.answer", "SERVER")] == [asked.id]


def test_concurrent_endpoints_do_not_mix_up_their_spans(procs: ProcMesh, chain: ActorMesh[Link], folder: Path) -> None:
    below = procs.slice(gpus=2).spawn("below", Link)
    beside = procs.slice(gpus=1).spawn("beside", AsyncLink, below)
    futures = [beside.descend.call_one(number) for number in range(20)]
    assert [future.get(PATIENCE_S) for future in futures] == list(range(20))
    served = {made.id: made for made in _after(folder, 20, "beside.descend", "SERVER")}
    called = _after(folder, 20, "below.descend", "CLIENT")
    assert {made.parent for made in called} == set(served)
    assert all(made.trace == served[made.parent or ""].trace for made in called)


def test_a_call_that_nobody_will_answer_ends_its_span(folder: Path, spans: Spans, failures: Failures) -> None:
    mortal = this_host().spawn_procs(name="mortal", bootstrap=bootstrap(folder)).spawn("mortal", Link)
    with pytest.raises(SupervisionError):
        mortal.die.call_one().get(PATIENCE_S)
    failures.wait()
    (client,) = _after(folder, 1, "mortal.die", "CLIENT")
    assert (client.status, client.attributes["error.type"]) == ("ERROR", "SupervisionError")


def test_an_answer_that_is_entrusted_to_another_actor_comes_from_there(
    procs: ProcMesh, folder: Path, failures: Failures
) -> None:
    heir = procs.slice(gpus=0).spawn("heir", Link)
    mortal = this_host().spawn_procs(name="testator", bootstrap=bootstrap(folder)).spawn("testator", Link, heir)
    answer = mortal.entrust.call_one()
    failures.wait()
    heir.give.call_one().get(PATIENCE_S)
    assert answer.get(PATIENCE_S) == 7
    (client,) = _after(folder, 1, "testator.entrust", "CLIENT")
    assert client.status == "UNSET"


def test_a_call_that_is_not_sent_ends_its_span(
    chain: ActorMesh[Link], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def admit(*_: object) -> None:
        raise BackpressureError("full")

    monkeypatch.setattr(current_runtime.current().flow, "admit", admit)
    with pytest.raises(BackpressureError):
        chain.descend.call_one(1)
    (client,) = [made for made in _after(folder, 1, "first.descend", "CLIENT") if made.status == "ERROR"][-1:]
    assert client.attributes["error.type"] == "BackpressureError"


def test_spans_of_other_parts_are_children_of_what_is_current(folder: Path, spans: Spans) -> None:
    with span("torchstore.put", key="w") as put:
        put.set(nbytes=8)
        with span("dataplane.transfer"):
            pass
    found = spans(2)
    chained(found, "torchstore.put INTERNAL", "dataplane.transfer INTERNAL")
    assert found["torchstore.put INTERNAL"].attributes == {"key": "w", "nbytes": 8}


def test_without_tracing_nothing_is_made(chain: ActorMesh[Link], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "tracer", None)
    before = sum(made.kind == "CLIENT" for made in read(folder))
    with span("torchstore.put") as put:
        put.set(nbytes=8)
    chain.note.call_one().get(PATIENCE_S)
    assert sum(made.kind == "CLIENT" for made in read(folder)) == before
    assert not any(made.name == "torchstore.put" and made.attributes == {"nbytes": 8} for made in read(folder))
    assert tracing.environment() == {}


def test_processes_that_run_already_record_spans_from_then_on_and_export_what_is_left_at_their_end(
    script: Callable[[str], Script], tmp_path: Path
) -> None:
    running = script(
        f"""
        from pathlib import Path
        from skipper.control import shutdown, this_host
        from skipper.control.observe import enable_tracing
        from tests.control.observe.spans import Link, bootstrap, provider

        folder = Path({str(tmp_path)!r})
        boot = bootstrap(folder, is_batched=True)
        early = this_host().spawn_procs(name="early", bootstrap=boot).spawn("early", Link)
        early.pid.call_one().get()
        enable_tracing(provider(folder, is_batched=True))
        late = this_host().spawn_procs(name="late", bootstrap=boot).spawn("late", Link, early)
        print(late.descend.call_one(1).get())
        shutdown(grace_s=10)
        """
    )
    assert running.finish() == (0, "2\n", "")
    found = {f"{made.name} {made.kind}": made for made in read(tmp_path)}
    assert len(found) == 5
    chained(found, "late.descend CLIENT", "late.descend SERVER", "thinking 1 INTERNAL", "early.descend CLIENT")
    chained(found, "early.descend CLIENT", "early.descend SERVER")


def test_the_environment_turns_it_on_and_names_the_exporter(script: Callable[[str], Script]) -> None:
    running = script(
        """
        import os
        os.environ.update(SKIPPER_TRACING="1", OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="trainer")
        os.environ["SKIPPER_LOGS"] = "raw"
        from skipper.control import shutdown, this_host
        from tests.control.observe.spans import Link

        link = this_host().spawn_procs(name="worker").spawn("link", Link)
        link.pid.call_one().get()
        shutdown(grace_s=10)
        """
    )
    code, out, error = running.finish()
    assert (code, error) == (0, "")
    decoder, spans = json.JSONDecoder(), []
    while out := out.strip():
        made, end = decoder.raw_decode(out)
        spans.append(made)
        out = out[end:]
    assert sorted(made["kind"] for made in spans) == ["SpanKind.CLIENT", "SpanKind.SERVER"]
    assert {made["resource"]["attributes"]["service.name"] for made in spans} == {"trainer"}
    names = {made["resource"]["attributes"]["service.instance.id"] for made in spans}
    assert names == {"script", "worker"}


def test_what_a_sender_says_of_its_trace_is_taken_or_left(chain: ActorMesh[Link], folder: Path) -> None:
    for junk in (b"\xff\xfe", b"00-zz-zz-01", b"x" * 200):
        call = Call(chain.uid, method="note", payload=pack(((), {})), trace=junk)
        current_runtime.current().send(chain.members[0], call)
    assert chain.pid.call_one().get(PATIENCE_S)
    wait_until(
        lambda: sum(made.parent is None for made in _after(folder, 3, "first.note", "CONSUMER")) == 3,
        "three spans without a parent",
    )


def _after(folder: Path, count: int, name: str, kind: str) -> list[Made]:
    """The spans of that name and kind, the latest that were made, once there are so many."""

    def found() -> list[Made]:
        return [made for made in read(folder) if (made.name, made.kind) == (name, kind)]

    wait_until(lambda: len(found()) >= count, f"{count} spans {name} {kind}")
    return found()
