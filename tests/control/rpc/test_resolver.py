import pytest

from skipper.control.model.errors import NameNotFoundError, ResolverError, ServiceUrlError
from skipper.control.rpc import ActorHandle, ChainResolver, FixedResolver, GcsResolver, NameMapping, Resolver

A, B = "actor://host:1/a", "grpc://host:2/b"


class Failing:
    """A resolver of a user's, which has no base class."""

    namespace = "job-7"

    def resolve(self, name: str) -> list[str]:
        raise ResolverError("it cannot be asked")


class Empty:
    def resolve(self, name: str) -> list[str]:
        return []


def test_fixed_addresses_are_for_any_name_or_by_name() -> None:
    assert FixedResolver(A, B).resolve("whatever") == [A, B]
    by_name = FixedResolver({"a": A, "both": [A, B]})
    assert (by_name.resolve("a"), by_name.resolve("both")) == ([A], [A, B])
    with pytest.raises(NameNotFoundError) as raised:
        by_name.resolve("c")
    assert isinstance(raised.value, LookupError)


def test_a_fixed_resolver_cannot_be_changed_by_what_it_gives_or_was_given() -> None:
    urls = {"a": [A]}
    resolver = FixedResolver(urls)
    urls["a"].append(B)
    resolver.resolve("a").append(B)
    assert resolver.resolve("a") == [A]


def test_fixed_addresses_are_checked() -> None:
    with pytest.raises(ServiceUrlError):
        FixedResolver("host:1")
    with pytest.raises(ServiceUrlError):
        FixedResolver({"a": [A, "host:1"]})
    with pytest.raises(ValueError, match="needs a URL"):
        FixedResolver()
    with pytest.raises(TypeError):
        FixedResolver(A, {"a": A})


def test_the_first_of_a_chain_that_knows_a_name_answers() -> None:
    chain = ChainResolver(FixedResolver({"a": A}), Empty(), FixedResolver({"a": B, "b": B}))
    assert (chain.resolve("a"), chain.resolve("b")) == ([A], [B])
    with pytest.raises(NameNotFoundError):
        chain.resolve("c")


def test_one_of_a_chain_that_cannot_find_out_does_not_keep_the_others_from_it() -> None:
    chain = ChainResolver(Failing(), FixedResolver({"a": A}))
    assert chain.resolve("a") == [A]
    with pytest.raises(ResolverError, match="cannot be asked"):  # nobody may say that there is no such name
        chain.resolve("b")
    assert chain.namespace == "job-7"
    with pytest.raises(ValueError, match="needs a resolver"):
        ChainResolver()


def test_resolvers_need_no_base_class() -> None:
    for resolver in (Failing(), FixedResolver(A), ChainResolver(Empty()), GcsResolver(), ActorHandle(A, "1")):
        assert isinstance(resolver, Resolver)
    assert not isinstance(FixedResolver(A), NameMapping)
