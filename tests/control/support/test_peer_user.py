"""Whose a connection over the loopback is, and pages that are for one user alone."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest

from skipper.control.support.pages import Page, PageServer
from skipper.control.support.peer_user import user_of_peer

NOBODY = 65534
PATIENCE_S = 20.0

as_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("bash") is None, reason="needs root, to ask as another user, and bash"
)


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family, host = request.param
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"needs the address {host}")
    with server:
        yield server


def test_a_connection_of_this_process_is_this_users(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()[:2], timeout=PATIENCE_S) as client:
        accepted, peer = listener.accept()
        with accepted:
            assert user_of_peer(peer[:2], accepted.getsockname()[:2]) == os.geteuid()
            assert user_of_peer((peer[0], 1), accepted.getsockname()[:2]) is None
        assert client.getsockname()[:2] == peer[:2]


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="not an address"):
        user_of_peer(("localhost", 80), ("127.0.0.1", 80))


def ask_as(user: int, port: int, path: str) -> str:
    """The answer to a request that another user of this host makes."""
    script = f"exec 3<>/dev/tcp/127.0.0.1/{port}; cat >&3; cat <&3"
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    done = subprocess.run(
        ["bash", "-c", script],
        input=request,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        user=user,
        check=True,
        cwd="/",
    )
    return done.stdout


@as_root
def test_a_private_page_is_for_this_user_alone_unless_a_token_says_who_may() -> None:
    pages = {"/": lambda: Page("text/plain", "all may")}
    lookups = {"/mine": lambda query: Page("text/plain", f"secret {query.get('of', '')}")}
    with PageServer(pages, lookups=lookups, private=["/mine"]) as server:
        assert "all may" in ask_as(NOBODY, server.port, "/")
        refused = ask_as(NOBODY, server.port, "/mine?of=weights")
        assert "403" in refused.splitlines()[0]
        assert "secret" not in refused
        assert "--token" in refused
        assert "secret weights" in ask_as(os.geteuid(), server.port, "/mine?of=weights")
    token = "sixteen-letters-or-more"
    with PageServer(pages, lookups=lookups, private=["/mine"], token=token) as server:
        assert "403" in ask_as(NOBODY, server.port, "/mine").splitlines()[0]
        assert "secret" in ask_as(NOBODY, server.port, f"/mine?token={token}")


def test_a_lookup_is_given_the_fields_of_its_query() -> None:
    seen: list[dict[str, str]] = []

    def note(query: object) -> Page:
        seen.append(dict(query))  # type: ignore[call-overload]
        return Page("text/plain", "")

    with PageServer({"/": lambda: Page("text/plain", "")}, lookups={"/note": note}) as server:
        answers = [
            ask_as(os.geteuid(), server.port, path)
            for path in ("/note", "/note?a=1&b=%7Bx%7D&a=2&c=", f"/note?{'&'.join(['a=1'] * 65)}", "/note/more?a=1")
        ]
    assert seen == [{}, {"a": "2", "b": "{x}", "c": ""}]
    assert [answer.split()[1] for answer in answers] == ["200", "200", "400", "404"]
