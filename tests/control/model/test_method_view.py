import inspect
from collections.abc import Iterator

import pytest
from IPython.core.oinspect import Inspector

from skipper.control import Actor, ActorMesh, Port, ProcMesh, as_endpoint, endpoint, this_proc
from skipper.control.services import Service
from tests.control.conftest import PATIENCE_S


class Library(Actor):
    """Actors whose methods are described."""

    @endpoint
    def find(self, title: str, *authors: str, year: int | None = None) -> list[str]:
        """Look for a book.

        It may be anywhere.
        """
        return [title, *authors, str(year)]

    @endpoint(explicit_response_port=True)
    def lend(self, port: Port[int], title: str = "any") -> None:
        """Give away a book."""
        port.send(len(title))

    @endpoint
    def undescribed(self) -> None: ...

    @endpoint
    def pass_on(self, mesh: "ActorMesh[Library]") -> tuple[str, object, str]:
        return str(inspect.signature(mesh.find)), mesh.find.__doc__, mesh.find.__name__  # type: ignore[arg-type]

    def count(self, shelf: int = 3) -> int:
        """Count the books."""
        return shelf

    def deliver(self, port: Port[int], title: str) -> None:
        """Send a book."""
        port.send(len(title))


@pytest.fixture(scope="module")
def library() -> ActorMesh[Library]:
    return this_proc().spawn("library", Library)


@pytest.fixture(scope="module")
def service() -> Iterator[Service[Library]]:
    service = Library.options().as_service(name="libraries")
    yield service
    service.stop().get(PATIENCE_S)


@pytest.mark.parametrize("name", ["find", "lend", "undescribed", "count"])
def test_an_attribute_of_a_mesh_has_the_name_and_text_of_the_method(library: ActorMesh[Library], name: str) -> None:
    view = getattr(library, name)
    assert view.__name__ == name
    assert view.__doc__ == inspect.getdoc(getattr(Library, name))
    assert not hasattr(view, "__wrapped__")


def test_the_signature_is_the_methods_without_what_callers_do_not_give(library: ActorMesh[Library]) -> None:
    assert str(inspect.signature(library.find)) == "(title: str, *authors: str, year: int | None = None) -> list[str]"
    assert str(inspect.signature(library.lend)) == "(title: str = 'any') -> None"
    assert str(inspect.signature(library.count)) == "(shelf: int = 3) -> int"
    assert str(inspect.signature(as_endpoint(library.count))) == "(shelf: int = 3) -> int"
    delivering = as_endpoint(library.deliver, explicit_response_port=True)
    assert str(inspect.signature(delivering)) == "(title: str) -> None"
    assert str(inspect.signature(library.find.wrapped(lambda method, *args: None))) == "(*args, **kwargs)"


def test_a_reference_without_the_class_knows_the_parameters(procs: ProcMesh, library: ActorMesh[Library]) -> None:
    other = procs.slice(gpus=0).spawn("other", Library)
    signature, text, name = other.pass_on.call_one(library).get(PATIENCE_S)
    assert (signature, text, name) == ("(title, *authors, year=...)", None, "find")


def test_the_classes_of_attributes_keep_their_own_descriptions(library: ActorMesh[Library]) -> None:
    for view in (library.find, library.count):
        described = type(view).__doc__
        assert described is not None
        assert described != view.__doc__
        inspect.signature(type(view))  # that of its constructor


def test_a_call_without_an_adverb_names_the_adverbs(library: ActorMesh[Library]) -> None:
    with pytest.raises(TypeError) as caught:
        library.find("it")
    for adverb in ("call_one", "call", "choose", "stream", "broadcast", "rref"):
        assert f"{adverb}(" in str(caught.value)
    assert "library.find" in str(caught.value)
    with pytest.raises(TypeError, match=r"library\.count is not an endpoint.*as_endpoint\(mesh\.count\)\.call_one\("):
        library.count(3)


def test_endpoints_and_methods_are_completed(library: ActorMesh[Library], service: Service[Library]) -> None:
    assert {"find", "lend", "count", "slice", "stop"} <= set(dir(library))
    assert {"find", "lend", "scale", "stop"} <= set(dir(service))
    with service.session() as session:
        assert {"find", "replica", "close"} <= set(dir(session))


def test_endpoints_of_services_look_like_their_methods(service: Service[Library]) -> None:
    with service.session() as session:
        for view in (service.find, session.find):
            assert view.__name__ == "find"
            assert view.__doc__ == inspect.getdoc(Library.find)
            assert inspect.signature(view) == inspect.signature(this_proc().spawn("one", Library).find)
        with pytest.raises(TypeError, match=r"libraries\.find\.route\(\.\.\.\).*fanout\("):
            service.find("it")
        with pytest.raises(TypeError, match=r"session\.find\.route\("):
            session.find("it")


def test_a_notebook_shows_the_method(library: ActorMesh[Library]) -> None:
    told = Inspector(theme_name="nocolor").info(library.find, oname="library.find")
    assert "title: str" in told["definition"]
    assert told["docstring"].startswith("Look for a book.")
