"""Pages over HTTP among strangers: who says nothing, too much or garbage, and what other sites make browsers ask."""

import contextlib
import gc
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from skipper.control.observe.metrics import RecentResult
from skipper.control.support.pages import MAX_CONNECTIONS, MAX_HEAD_NBYTES, MAX_HEADERS, Page, PageServer
from tests.control.conftest import PATIENCE_S, wait_until

TOKEN = "sixteen-letters-or-more"


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer({"/page": lambda: Page("text/plain", "figures")}) as server:
        yield server


@pytest.fixture
def guarded() -> Iterator[PageServer]:
    pages = {"/page": lambda: Page("text/plain", "figures")}
    with PageServer(pages, token=TOKEN) as server:
        yield server


def ask(server: PageServer, path: str = "/page", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def connect(server: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def send(server: PageServer, content: bytes) -> bytes:
    """All that comes back for some bytes, until the server closes."""
    with connect(server) as client:
        client.sendall(content)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65536):
            answer += part
        return answer


def get(*fields: str, line: str = "GET /page HTTP/1.1") -> bytes:
    return "\r\n".join([line, *fields, "", ""]).encode("latin-1")


@pytest.mark.parametrize("begin", [b"", b"GET /page HTTP/1.1\r\nHost: localhost\r\nX: ", get("Host: localhost")])
def test_connections_that_say_nothing_or_never_end_keep_nobody_out(server: PageServer, begin: bytes) -> None:
    strangers = []
    try:
        for _ in range(MAX_CONNECTIONS + 20):
            strangers.append(connect(server))
            strangers[-1].sendall(begin)
            if len(strangers) % 20 == 0:
                assert ask(server) == (200, "figures")
        assert ask(server) == (200, "figures")
        assert len(server._connections) <= MAX_CONNECTIONS
        # The first of them have made way: there is an end to what is read from them.
        while strangers[0].recv(65536):
            pass
    except ConnectionResetError:
        pass
    finally:
        for stranger in strangers:
            stranger.close()
    assert ask(server) == (200, "figures")


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipper.control.support.pages.HEAD_TIMEOUT_S", 0.3)
    over = threading.Event()
    with connect(server) as client:

        def drip() -> None:
            while not over.wait(0.02):
                try:
                    client.send(b"x")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:
            pass
        finally:
            over.set()
            dripping.join()


def test_a_client_that_does_not_take_its_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipper.control.support.pages.ANSWER_TIMEOUT_S", 0.3)
    nbytes = 64 << 20  # more than the system keeps for a connection
    with PageServer({"/": lambda: Page("text/plain", "x" * nbytes)}) as server, connect(server) as client:
        client.sendall(get("Host: localhost", line="GET / HTTP/1.1"))
        received = len(client.recv(1))
        wait_until(lambda: not server._connections, "the client has been cut")
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(1 << 20):
                received += len(part)
        assert received < nbytes


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\0" * 100 + b"\r\n\r\n", 400),
        (b"GET /page\r\n\r\n", 400),
        (get(line="GET http://elsewhere.example/page HTTP/1.1"), 400),
        (get(line="GET * HTTP/1.1"), 400),
        (get(line="GET /page HTTP/1.1"), 400),
        (get("Host: localhost", " folded: line"), 400),
        (get("Host: localhost", "no colon"), 400),
        (get("Host: localhost", "Host: 127.0.0.1"), 400),
        (get("Host: localhost", "na me: x"), 400),
        (get("Host: localhost\0"), 400),
        (get("Host: localhost", "Content-Length: 0", "Content-Length: 5"), 400),
        (get("Host: localhost", "Content-Length: 5"), 413),
        (get("Host: localhost", f"Content-Length: {1 << 64}"), 413),
        (get("Host: localhost", "Content-Length: -1"), 413),
        (get("Host: localhost", "Transfer-Encoding: chunked"), 413),
        (get("Host: localhost", *["X: y"] * MAX_HEADERS), 431),
        (get("Host: localhost", "X: " + "y" * MAX_HEAD_NBYTES), 431),
        (get("Host: localhost", line="GET /page/../page HTTP/1.1"), 404),
        (get("Host: localhost", line="GET /../../etc/passwd HTTP/1.1"), 404),
        (get("Host: localhost", line="GET /%2e%2e/etc/passwd HTTP/1.1"), 404),
        (get("Host: localhost", line="POST /page HTTP/1.1"), 405),
        (get("Host: localhost", line="HEAD /page HTTP/1.1"), 200),
        (get("Host: localhost", line="GET /page HTTP/1.0"), 200),
    ],
)
def test_garbage_is_answered_for_what_it_is(server: PageServer, content: bytes, status: int) -> None:
    answer = send(server, content)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"figures" in answer) == (status == 200 and not content.startswith(b"HEAD"))
    assert b"\r\nX-Content-Type-Options: nosniff\r\n" in answer
    assert b"frame-ancestors 'none'" in answer
    assert ask(server) == (200, "figures")


def test_one_request_is_answered_whatever_follows_it(server: PageServer) -> None:
    answer = send(server, get("Host: localhost") * 100 + b"\0" * 100_000)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"\r\n\r\nfigures")


def test_what_another_site_makes_a_browser_ask_is_refused(server: PageServer) -> None:
    port = server.port
    for headers in (
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://localhost:{port + 1}", "Host": f"localhost:{port}"},
        {"Origin": "http://[::1", "Host": "localhost"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    ):
        status, body = ask(server, **headers)
        assert status == 403, headers
        assert "figures" not in body
    for headers in (
        {"Origin": f"http://localhost:{port}", "Host": f"localhost:{port}", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
    ):
        assert ask(server, **headers) == (200, "figures"), headers


def test_a_token_opens_every_page_and_nothing_else_does(guarded: PageServer) -> None:
    for path, headers in (
        ("/page", {}),
        ("/nothing", {}),
        ("/page?token=", {}),
        (f"/page?token={TOKEN[:-1]}", {}),
        (f"/page?token=x&token={TOKEN}", {}),
        ("/page", {"Authorization": TOKEN}),
        ("/page", {"Authorization": f"Basic {TOKEN}"}),
        ("/page", {"Authorization": "Bearer \xe9"}),
        ("/page", {"Cookie": f"skipper-token-{guarded.port}={TOKEN}x"}),
    ):
        status, body = ask(guarded, path, **headers)
        assert (status, "/page" in body) == (403, False), (path, headers)
    for path, headers in (
        (f"/page?token={TOKEN}", {}),
        ("/page", {"Authorization": f"Bearer {TOKEN}"}),
        ("/page", {"Authorization": f"bearer {TOKEN}"}),
        ("/page", {"Cookie": f"skipper-token-{guarded.port}={TOKEN}"}),
    ):
        assert ask(guarded, path, **headers) == (200, "figures"), (path, headers)
    assert guarded.url.endswith(f"/page?token={TOKEN}")


def test_others_than_this_host_always_need_a_token() -> None:
    pages = {"/page": lambda: Page("text/plain", "figures")}
    with pytest.raises(ValueError, match="needs a token"):
        PageServer(pages, host="0.0.0.0", token=False)
    with PageServer(pages, host="0.0.0.0") as server:
        assert len(server.token) >= 32
        assert ask(server)[0] == 403
        assert ask(server, Host="a-name-of-this-host.example", Authorization=f"Bearer {server.token}")[0] == 200


@pytest.mark.parametrize("token", ["short", "x" * 257, "with spaces in it all", "with-a-line\r\nSet-Cookie: x"])
def test_tokens_that_cannot_be_used_are_refused(token: str) -> None:
    with pytest.raises(ValueError, match="a token has 16 to 256 letters") as caught:
        PageServer({"/": lambda: Page("text/plain", "")}, token=token)
    assert token not in str(caught.value)


def test_who_connects_while_it_is_closed_is_cut_too() -> None:
    for _ in range(10):
        server = PageServer({"/page": lambda: Page("text/plain", "figures")})
        clients: list[socket.socket] = []

        def connect(port: int = server.port, clients: list[socket.socket] = clients) -> None:
            with contextlib.suppress(OSError):  # it listens no more
                while True:
                    clients.append(socket.create_connection(("127.0.0.1", port), PATIENCE_S))

        crowd = [threading.Thread(target=connect) for _ in range(3)]
        for thread in crowd:
            thread.start()
        wait_until(lambda clients=clients: len(clients) > MAX_CONNECTIONS, "there are more than it takes")
        server.close()
        for thread in crowd:
            thread.join(PATIENCE_S)
        for client in clients:
            with client, contextlib.suppress(ConnectionError):
                # Where the queue of connections is full, a client is made to believe that it has one until it sends.
                client.sendall(b"G")
                assert client.recv(1) == b""  # a connection that was left open would say nothing for ever
    gc.collect()  # warnings of what was left open are errors


@pytest.mark.parametrize("port", [-1, 65536, 1 << 64])
def test_ports_that_are_none_are_refused(port: int) -> None:
    with pytest.raises(ValueError, match="from 0 to 65535"):
        PageServer({"/": lambda: Page("text/plain", "")}, port)


def test_what_is_found_out_is_shared_by_all_who_ask_and_so_is_an_error() -> None:
    calls: list[int] = []

    def find() -> int:
        calls.append(1)
        if len(calls) > 1:
            raise LookupError("gone")
        return 7

    recent = RecentResult(find, 60.0)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(recent.get())) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, calls) == ([7] * 20, [1])
    with PageServer({"/": lambda: Page("text/plain", str(recent.get()))}) as server:
        assert [ask(server, "/") for _ in range(3)] == [(200, "7")] * 3
    assert calls == [1]
    recent._interval_s = 1e-9
    with pytest.raises(LookupError):
        recent.get()
    recent._interval_s = 60.0
    with pytest.raises(LookupError):
        recent.get()
    assert calls == [1, 1]
    for interval in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive"):
            RecentResult(find, interval)
