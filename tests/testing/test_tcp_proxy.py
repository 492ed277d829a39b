"""The proxy that breaks things, between plain sockets."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import warnings
from collections.abc import Iterator
from time import monotonic

import pytest

from penstock.testing.tcp_proxy import TcpProxy


class EchoServer:
    """Sends back what it gets, a thread for each connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.close()


@pytest.fixture
def proxy(server: EchoServer) -> Iterator[TcpProxy]:
    with TcpProxy(server.address) as proxy:
        yield proxy


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=60)


def receive(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer if the connection ends."""
    data = b""
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return data


def test_what_goes_in_comes_out(proxy: TcpProxy) -> None:
    text = bytes(range(256)) * 8000
    with connect(proxy) as sock:
        sender = threading.Thread(target=sock.sendall, args=(text,))
        sender.start()
        assert receive(sock, len(text)) == text
        sender.join()
        assert proxy.connections == proxy.accepted == 1
        # One side may be done sending and still get its answer.
        sock.sendall(b"last words")
        sock.shutdown(socket.SHUT_WR)
        assert receive(sock, 100) == b"last words"
    proxy.wait_for(lambda it: it.connections == 0)
    assert proxy.passed_bytes == {"server": len(text) + 10, "client": len(text) + 10}


def test_delay(proxy: TcpProxy) -> None:
    with connect(proxy) as sock:
        proxy.delay_ms = 50
        began = monotonic()
        sock.sendall(b"x")
        assert receive(sock, 1) == b"x"
        assert monotonic() - began >= 0.1
        proxy.delay_ms = 0
        sock.sendall(b"y")
        assert receive(sock, 1) == b"y"


def test_rate(proxy: TcpProxy) -> None:
    proxy.rate_bytes_per_s = 200_000
    with connect(proxy) as sock:
        began = monotonic()
        sock.sendall(bytes(20_000))
        assert len(receive(sock, 20_000)) == 20_000
        assert monotonic() - began >= 0.1


@pytest.mark.parametrize("after", [0, 1, 1000, 65_536, 100_001])
def test_a_cut_at_a_byte_towards_the_client(proxy: TcpProxy, after: int) -> None:
    proxy.cut_after(after, towards="client")
    with connect(proxy) as sock:
        threading.Thread(target=sock.sendall, args=(bytes(200_000),), daemon=True).start()
        assert len(receive(sock, 200_000)) == after
    # Only the next one was meant.
    with connect(proxy) as sock:
        sock.sendall(b"fine")
        assert receive(sock, 4) == b"fine"


def test_a_cut_at_a_byte_towards_the_server(proxy: TcpProxy) -> None:
    proxy.cut_after(7, towards="server", reset=True)
    with connect(proxy) as sock:
        sock.sendall(b"0123456789")
        with contextlib.suppress(ConnectionResetError):
            assert len(receive(sock, 10)) <= 7
    proxy.wait_for(lambda it: it.connections == 0)
    assert proxy.passed_bytes["server"] == 7


def test_a_cut_now(proxy: TcpProxy) -> None:
    with connect(proxy) as one, connect(proxy) as two:
        proxy.wait_for(lambda it: it.connections == 2)
        assert proxy.cut() == 2
        for sock in (one, two):
            with pytest.raises(ConnectionResetError):
                sock.recv(1)
    with connect(proxy) as sock:
        proxy.wait_for(lambda it: it.connections == 1)
        assert proxy.cut(reset=False) == 1
        assert sock.recv(1) == b""


def test_a_pause_loses_nothing(proxy: TcpProxy) -> None:
    with connect(proxy) as sock:
        proxy.pause()
        sock.sendall(b"patience")
        sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(60)
        proxy.resume()
        assert receive(sock, 8) == b"patience"


def test_what_is_swallowed_is_gone(proxy: TcpProxy) -> None:
    with connect(proxy) as sock:
        proxy.swallow = True
        sock.sendall(b"gone")
        sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(60)
        proxy.swallow = False
        sock.sendall(b"here")
        assert receive(sock, 4) == b"here"


def test_refusing(proxy: TcpProxy) -> None:
    proxy.refuse = True
    with connect(proxy) as sock, contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    proxy.refuse = False
    with connect(proxy) as sock:
        sock.sendall(b"x")
        assert receive(sock, 1) == b"x"
    assert proxy.accepted == 2


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with (
        TcpProxy(f"127.0.0.1:{free}") as proxy,
        connect(proxy) as sock,
        contextlib.suppress(ConnectionResetError),
    ):
        assert sock.recv(1) == b""


def test_closing_twice_and_a_port_that_is_taken(server: EchoServer) -> None:
    proxy = TcpProxy(server.address)
    proxy.close()
    proxy.start()
    with pytest.raises(OSError, match="in use"):
        TcpProxy(server.address, port=proxy.port).start()
    sock = connect(proxy)
    proxy.wait_for(lambda it: it.connections == 1)
    proxy.close()
    proxy.close()
    with pytest.raises(ConnectionResetError):
        sock.recv(1)
    sock.close()


def test_waiting_for_what_does_not_come(proxy: TcpProxy) -> None:
    with pytest.raises(TimeoutError):
        proxy.wait_for(lambda it: it.connections == 5, timeout_s=0.01)


def test_who_comes_while_it_closes_leaves_nothing_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            for _ in range(30):
                proxy = TcpProxy(target)
                proxy.start()
                clients = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(3)]
                proxy.close()
                for client in clients:
                    client.close()
            gc.collect()
    assert [str(each.message) for each in caught] == []
