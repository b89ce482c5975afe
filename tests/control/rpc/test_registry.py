import pytest

from skipper.control.rpc import registry
from skipper.control.rpc.registry import FullError, Registry

A, B = "actor://host:1/a", "actor://host:2/a"


def test_a_registration_lasts_as_long_as_its_lease_is_renewed() -> None:
    names = Registry()
    names.register("lease", "/job/a", A, 10, now=100)
    assert names.resolve("/job/a", now=109.9) == [A]
    assert names.renew(["lease", "unheard of"], now=109.9) == ["unheard of"]
    assert names.resolve("/job/a", now=119.8) == [A]
    assert names.resolve("/job/a", now=119.9) == []
    assert names.renew(["lease"], now=120) == ["lease"]


def test_a_name_has_several_servers_the_latest_first() -> None:
    names = Registry()
    names.register("one", "/job/a", A, 10, now=0)
    names.register("two", "/job/a", B, 20, now=1)
    names.register("three", "/job/b", B, 20, now=1)
    assert names.resolve("/job/a", now=2) == [B, A]
    assert names.resolve("/job/a", now=10) == [B]
    assert names.names("/job/", now=10) == {"/job/a": [B], "/job/b": [B]}
    assert names.names("/other/", now=10) == {}
    names.withdraw("two")
    names.withdraw("two")
    assert names.resolve("/job/a", now=10) == []


def test_the_same_lease_again_replaces_and_the_same_url_counts_once() -> None:
    names = Registry()
    for lease in ("one", "one", "two"):
        names.register(lease, "/job/a", A, 10, now=0)
    assert names.resolve("/job/a", now=1) == [A]
    names.register("one", "/job/b", B, 10, now=1)
    names.withdraw("two")
    assert (names.resolve("/job/a", now=1), names.resolve("/job/b", now=1)) == ([], [B])


def test_a_short_lease_ends_before_longer_ones_that_were_there_before() -> None:
    names = Registry()
    names.register("long", "/a", A, 3600, now=0)
    assert names.resolve("/a", now=1) == [A]
    names.register("short", "/b", B, 1, now=1)
    assert names.resolve("/b", now=2) == []
    assert names.resolve("/a", now=2) == [A]


def test_leases_and_their_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Registry()
    for lease_s in (0, 0.01, -1, float("nan"), float("inf"), 1e9):
        with pytest.raises(ValueError, match="a lease is for"):
            names.register("lease", "/a", A, lease_s, now=0)
    monkeypatch.setattr(registry, "MAX_REGISTRATIONS", 2)
    for lease in ("one", "two", "two"):
        names.register(lease, "/a", A, 10, now=0)
    with pytest.raises(FullError):
        names.register("three", "/a", A, 10, now=0)
    names.register("three", "/a", A, 10, now=10)
