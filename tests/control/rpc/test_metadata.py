"""The metadata service: leases, namespaces, its own restart, and servers that come and go."""

import threading
import tracemalloc
from collections.abc import Callable
from signal import SIGCONT, SIGSTOP

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipper.control import DeadlineError
from skipper.control.model.errors import NameNotFoundError, ResolverError
from skipper.control.rpc import (
    ActorServer,
    MetadataMapping,
    MetadataResolver,
    MetadataServer,
    RpcClient,
    RpcOptions,
)
from skipper.control.rpc import metadata as metadata_module
from skipper.control.rpc.metadata import FullError, Registry
from tests.control.conftest import wait_until
from tests.control.rpc.conftest import client_of
from tests.control.rpc.parties import PATIENCE_S, Calculator, Host

A, B = "actor://127.0.0.1:1/a", "actor://127.0.0.1:2/a"
FIRST, SECOND = "actor://host:1/a", "actor://host:2/a"
Hosts = Callable[..., Host]


def resolves(resolver: MetadataResolver, name: str) -> list[str]:
    try:
        return resolver.resolve(name)
    except NameNotFoundError:
        return []


def test_a_name_is_known_in_its_namespace_until_it_is_taken_back(metadata: MetadataServer) -> None:
    with MetadataMapping(metadata.address, namespace="job-1") as mapping:
        mapping.register("trainer/0", A)
        mapping.register("/shared/board", B)
        first = MetadataResolver(metadata.address, namespace="job-1")
        second = MetadataResolver(metadata.address, namespace="job-2")
        assert first.resolve("trainer/0") == second.resolve("/job-1/trainer/0") == [A]
        assert first.resolve("/shared/board") == second.resolve("/shared/board") == [B]
        assert first.names() == {"/job-1/trainer/0": [A]}
        assert second.names("/") == {"/job-1/trainer/0": [A], "/shared/board": [B]}
        with pytest.raises(NameNotFoundError, match="'/job-2/trainer/0'"):
            second.resolve("trainer/0")
        for name in ("trainer/0", "/shared/board"):
            mapping.unregister(name, A if name == "trainer/0" else B)
            mapping.unregister(name, A)  # which it does not hold
            assert resolves(first, name) == []


def test_a_registration_is_renewed_while_its_process_lives_and_ends_with_it(
    metadata: MetadataServer, host: Hosts
) -> None:
    resolver = MetadataResolver(metadata.address, namespace="leases")
    env = {"SKIPPER_NAMESPACE": "leases"}
    lasting, doomed = (host(metadata=metadata.address, lease_s=0.5, env=env) for _ in range(2))
    assert set(resolver.resolve("calculator")) == {lasting.url(), doomed.url()}
    doomed.kill()
    wait_until(lambda: resolver.resolve("calculator") == [lasting.url()], "the registration of the dead one has ended")
    lasting.signal(SIGSTOP)
    wait_until(lambda: resolves(resolver, "calculator") == [], "that of the frozen one has ended")
    lasting.signal(SIGCONT)
    wait_until(lambda: resolves(resolver, "calculator") == [lasting.url()], "it is back, by itself")
    lasting.end()
    assert resolves(resolver, "calculator") == []


def test_the_service_may_be_restarted_at_its_address() -> None:
    first = MetadataServer()
    first.start()
    mapping = MetadataMapping(first.address, namespace="job", lease_s=0.6)
    mapping.register("a", A)
    resolver = MetadataResolver(first.address, namespace="job")
    assert resolver.resolve("a") == [A]
    first.stop()
    with pytest.raises(ResolverError, match="does not answer"):
        resolver.resolve("a")
    with MetadataServer(port=first.port):
        wait_until(lambda: resolves(resolver, "a") == [A], "what was registered is registered again")
        mapping.unregister("a", A)
        assert resolves(resolver, "a") == []
    mapping.close()


def test_a_service_that_is_not_there_is_an_error_at_once() -> None:
    with pytest.raises(ResolverError, match="does not answer"):
        MetadataMapping("127.0.0.1:1", namespace="job").register("a", A)
    with ActorServer("127.0.0.1", 0) as server, pytest.raises(ResolverError):  # it is no metadata service
        MetadataResolver(server.address, namespace="job").resolve("a")
    broken = ActorServer("127.0.0.1", 0, MetadataMapping("127.0.0.1:1", namespace="job"))
    broken.register("calculator", Calculator())
    with pytest.raises(ResolverError):
        broken.start()


def test_the_environment_says_where_the_service_is(metadata: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="SKIPPER_METADATA"):
        MetadataResolver()
    assert metadata.environment() == {"SKIPPER_METADATA": metadata.address}
    monkeypatch.setenv("SKIPPER_METADATA", metadata.address)
    monkeypatch.setenv("SKIPPER_NAMESPACE", "from-there")
    with MetadataMapping() as mapping:
        mapping.register("a", A)
        assert MetadataResolver().resolve("a") == MetadataResolver(namespace="from-there").resolve("a") == [A]
        assert repr(MetadataResolver()) == f"MetadataResolver({metadata.address!r}, namespace='from-there')"
        mapping.unregister("a", A)
    with pytest.raises(ValueError, match="is not a URL"):
        MetadataResolver("nowhere")


def test_what_is_no_name_or_no_url_is_not_registered(metadata: MetadataServer) -> None:
    mapping = MetadataMapping(metadata.address, namespace="job")
    with pytest.raises(ValueError, match="is not a name"):
        mapping.register("no name", A)
    with pytest.raises(ResolverError, match="ServiceUrlError"):
        mapping.register("a", "host:1")
    with pytest.raises(ValueError, match=r"0\.1 to 3600"):
        MetadataMapping(metadata.address, namespace="job", lease_s=1e6)


def test_a_server_is_known_from_its_start_to_its_stop(metadata: MetadataServer) -> None:
    mapping = MetadataMapping(metadata.address, namespace="job", lease_s=3600)
    resolver = MetadataResolver(metadata.address, namespace="job")
    server = ActorServer("127.0.0.1", 0, mapping)
    server.register("early", Calculator("early"))
    assert resolves(resolver, "early") == []
    server.start()
    server.register("late", Calculator("late"))
    server.register("/shared/late", Calculator("shared"))
    for name, label in (("early", "early"), ("late", "late"), ("/shared/late", "shared")):
        assert RpcClient(resolver, Calculator, name=name).label.sync() == label
    server.unregister("late")
    assert resolves(resolver, "late") == []
    server.stop()
    assert resolves(resolver, "early") == resolves(resolver, "/shared/late") == []


def test_a_server_may_be_of_another_namespace_than_its_mapping(metadata: MetadataServer) -> None:
    mapping = MetadataMapping(metadata.address, namespace="job")
    with ActorServer("127.0.0.1", 0, mapping, namespace="guests") as server:
        server.register("a", Calculator())
        assert resolves(MetadataResolver(metadata.address, namespace="job"), "a") == []
        assert len(MetadataResolver(metadata.address, namespace="guests").resolve("a")) == 1


def test_a_port_that_went_to_another_namespace_answers_nobody_of_the_former(metadata: MetadataServer) -> None:
    """What a stale registration leads to must not be taken for what had been there."""
    mapping = MetadataMapping(metadata.address, namespace="former")
    with mapping, ActorServer("127.0.0.1", 0, namespace="present") as server:
        server.register("calculator", Calculator("present"))
        mapping.register("calculator", f"actor://{server.address}/calculator")
        client = RpcClient(
            MetadataResolver(metadata.address, namespace="former"),
            Calculator,
            RpcOptions(PATIENCE_S),
            name="calculator",
        )
        with pytest.raises(NameNotFoundError):
            client.label.sync()
        assert client_of(server.address, Calculator, "calculator").label.sync() == "present"


def test_a_frozen_service_keeps_nobody_waiting_for_ever(host: Hosts) -> None:
    frozen = host(name="metadata")
    resolver = MetadataResolver(frozen.address, namespace="job", timeout=0.3)
    frozen.signal(SIGSTOP)
    done = threading.Event()

    def ask() -> None:
        with pytest.raises(ResolverError) as raised:
            resolver.resolve("a")
        assert isinstance(raised.value.__cause__, DeadlineError)
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    assert done.wait(PATIENCE_S)


# The registry


def test_a_registration_lasts_as_long_as_its_lease_is_renewed() -> None:
    names = Registry()
    names.register("lease", "/job/a", FIRST, 10, now=100)
    assert names.resolve("/job/a", now=109.9) == [FIRST]
    assert names.renew(["lease", "unheard of"], now=109.9) == ["unheard of"]
    assert names.resolve("/job/a", now=119.8) == [FIRST]
    assert names.resolve("/job/a", now=119.9) == []
    assert names.renew(["lease"], now=120) == ["lease"]


def test_a_name_has_several_servers_the_latest_first() -> None:
    names = Registry()
    names.register("one", "/job/a", FIRST, 10, now=0)
    names.register("two", "/job/a", SECOND, 20, now=1)
    names.register("three", "/job/b", SECOND, 20, now=1)
    assert names.resolve("/job/a", now=2) == [SECOND, FIRST]
    assert names.resolve("/job/a", now=10) == [SECOND]
    assert names.names("/job/", now=10) == {"/job/a": [SECOND], "/job/b": [SECOND]}
    assert names.names("/other/", now=10) == {}
    names.withdraw("two")
    names.withdraw("two")
    assert names.resolve("/job/a", now=10) == []


def test_the_same_lease_again_replaces_and_the_same_url_counts_once() -> None:
    names = Registry()
    for lease in ("one", "one", "two"):
        names.register(lease, "/job/a", FIRST, 10, now=0)
    assert names.resolve("/job/a", now=1) == [FIRST]
    names.register("one", "/job/b", SECOND, 10, now=1)
    names.withdraw("two")
    assert (names.resolve("/job/a", now=1), names.resolve("/job/b", now=1)) == ([], [SECOND])


def test_a_short_lease_ends_before_longer_ones_that_were_there_before() -> None:
    names = Registry()
    names.register("long", "/a", FIRST, 3600, now=0)
    assert names.resolve("/a", now=1) == [FIRST]
    names.register("short", "/b", SECOND, 1, now=1)
    assert names.resolve("/b", now=2) == []
    assert names.resolve("/a", now=2) == [FIRST]


def test_leases_and_their_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Registry()
    for lease_s in (0, 0.01, -1, float("nan"), float("inf"), 1e9):
        with pytest.raises(ValueError, match="a lease is for"):
            names.register("lease", "/a", FIRST, lease_s, now=0)
    monkeypatch.setattr(metadata_module, "MAX_REGISTRATIONS", 2)
    for lease in ("one", "two", "two"):
        names.register(lease, "/a", FIRST, 10, now=0)
    with pytest.raises(FullError):
        names.register("three", "/a", FIRST, 10, now=0)
    names.register("three", "/a", FIRST, 10, now=10)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["register", "renew", "withdraw"]),
            st.sampled_from(["one", "two", "three", "four"]),
            st.sampled_from(["/a", "/a/b", "/ab", "/b"]),
            st.integers(1, 5),
        ),
        max_size=60,
    )
)
def test_the_registry_says_what_a_plain_list_would(steps: list[tuple[str, str, str, int]]) -> None:
    names = Registry()
    plain: list[tuple[str, str, float, float]] = []  # lease, name, its length, when it expires
    for now, (action, lease, name, lease_s) in enumerate(steps):
        plain = [each for each in plain if each[3] > now]
        kept = [each for each in plain if each[0] != lease]
        if action == "register":
            names.register(lease, name, f"actor://127.0.0.1:1/{lease}", lease_s, now)
            plain = [*kept, (lease, name, lease_s, now + lease_s)]
        elif action == "withdraw":
            names.withdraw(lease)
            plain = kept
        else:
            known = len(kept) < len(plain)
            assert names.renew([lease], now) == ([] if known else [lease])
            plain = [(each[0], each[1], each[2], now + each[2]) if each[0] == lease else each for each in plain]
        for prefix in ("/", "/a", "/a/", "/b", "/c"):
            expected: dict[str, list[str]] = {}
            for each in reversed(plain):
                if each[1].startswith(prefix):
                    expected.setdefault(each[1], []).append(f"actor://127.0.0.1:1/{each[0]}")
            found = names.names(prefix, now)
            assert found == expected
            assert list(found) == sorted(found)


def test_what_comes_and_goes_leaves_nothing_in_the_registry() -> None:
    names = Registry()
    begin = None
    for number in range(20_000):
        if number == 5_000:
            tracemalloc.start()
            begin = tracemalloc.get_traced_memory()[0]
        names.register(f"{number}", f"/job/{number}", FIRST, 3600, now=0)
        names.withdraw(f"{number}")
    assert begin is not None
    grown = tracemalloc.get_traced_memory()[0] - begin
    tracemalloc.stop()
    assert grown < 1_000_000  # 15,000 that had stayed would be more than twice as much
