import pytest

from skipper.control.model.errors import NamingError, ServiceUrlError
from skipper.control.rpc import ServiceUrl
from skipper.control.rpc.urls import split_address
from skipper.control.wire import addresses


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("grpc://host:7000/controller", ("grpc", "host", 7000, "controller")),
        ("actor://10.0.0.1:1/trainer/0", ("actor", "10.0.0.1", 1, "trainer/0")),
        ("actor://[::1]:65535/a", ("actor", "::1", 65535, "a")),
    ],
)
def test_a_url_is_what_it_was_parsed_from(text: str, parts: tuple[str, str, int, str]) -> None:
    url = ServiceUrl.parse(text)
    assert (url.scheme, url.host, url.port, url.path) == parts
    assert str(url) == text


def test_a_url_needs_no_path() -> None:
    assert ServiceUrl.parse("grpc://host:1") == ServiceUrl("grpc", "host", 1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "host:1/x", "http://host:1/x", "actor://host/x", "actor://:1/x", "actor://host:0/x"),
        *("actor://host:70000/x", "actor://host:1/x y", "actor://host:1/x?y", " actor://host:1/x"),
        *("actor://host:1/x\n", "actor://us er:1/x"),
    ],
)
def test_what_is_no_url_of_a_service_is_refused(text: str) -> None:
    with pytest.raises(ServiceUrlError) as raised:
        ServiceUrl.parse(text)
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, NamingError)


def test_addresses_are_joined_and_split() -> None:
    for host in ("localhost", "::1", "10.1.2.3"):
        assert split_address(addresses.at(host, 80)) == (host, 80)
    with pytest.raises(ServiceUrlError):
        split_address("localhost")
