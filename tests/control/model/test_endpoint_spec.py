import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from skipper.control import Actor, ActorDefinitionError, concurrent_endpoint, endpoint, idempotent
from skipper.control.model.actor import interface_of


def generator(self: object) -> Iterator[int]:
    yield 1


async def async_generator(self: object) -> AsyncIterator[int]:
    yield 1


def plain(self: object) -> None: ...


async def coroutine(self: object) -> None: ...


def __special__(self: object) -> None: ...  # noqa: N807


@pytest.mark.parametrize("mark", [endpoint, endpoint(), concurrent_endpoint, concurrent_endpoint(propagate=None)])
@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (generator, "generator is a generator.*return a list.*Port"),
        (async_generator, "async_generator is a generator.*return a list.*Port"),
        (staticmethod(plain), "plain is a staticmethod"),
        (classmethod(plain), "plain is a classmethod"),
        (property(plain), "is a property"),
        (functools.cached_property(plain), "is a cached_property"),
        (functools.partial(plain, 1), "is a partial"),
        (Actor, "Actor is a class"),
        (3, "3 is an int"),
        (__special__, "__special__: a name that begins with two underscores"),
    ],
)
def test_what_cannot_be_an_endpoint_is_refused_where_it_is_defined(
    mark: Callable[[Any], Any], method: Any, reason: str
) -> None:
    with pytest.raises(ActorDefinitionError, match=reason):
        mark(method)


@pytest.mark.parametrize("upper", [endpoint, endpoint(propagate=None), concurrent_endpoint])
@pytest.mark.parametrize("lower", [endpoint, concurrent_endpoint, concurrent_endpoint()])
def test_stacked_decorators_are_refused(upper: Callable[[Any], Any], lower: Callable[[Any], Any]) -> None:
    def method(self: object) -> None: ...

    with pytest.raises(ActorDefinitionError, match="method is marked as an endpoint twice"):
        upper(idempotent(lower(method)))


@pytest.mark.parametrize(
    ("above", "kind"),
    [
        (staticmethod, "a staticmethod"),
        (classmethod, "a classmethod"),
        (property, "a property"),
        (functools.cached_property, "a cached_property"),
    ],
)
def test_an_endpoint_below_another_decorator_is_refused_with_the_class(above: Callable[[Any], Any], kind: str) -> None:
    def method(self: object) -> None: ...

    def define() -> None:
        class Hiding(Actor):
            hidden = above(endpoint(method))

    with pytest.raises(ActorDefinitionError, match=f"Hiding.hidden is {kind}, and no endpoint can be one"):
        define()


def test_an_endpoint_that_a_mixin_hides_is_refused_at_spawn() -> None:
    class Mixin:
        @staticmethod
        @endpoint
        def hidden(self: object) -> None: ...

    class Hiding(Mixin, Actor):
        pass

    with pytest.raises(ActorDefinitionError, match=r"Hiding.hidden is a staticmethod"):
        interface_of(Hiding)


def test_subclasses_may_have_other_members_and_arguments() -> None:
    class Base(Actor):
        def __init_subclass__(cls, *, kind: str, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            cls.kind = kind  # type: ignore[attr-defined]

    class Sub(Base, kind="special"):
        @endpoint
        @functools.lru_cache  # noqa: B019
        def cached(self) -> int:
            return 1

        @staticmethod
        def static() -> None: ...

        @property
        def value(self) -> int:
            return 1

    assert list(interface_of(Sub).endpoints) == ["cached"]
    assert Sub.kind == "special"  # type: ignore[attr-defined]
