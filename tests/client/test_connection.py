"""Connections of the small client: versions, answers that are none, brokers that are not there."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.client.connection import (
    GROUP,
    TRANSACTION,
    Address,
    ClientError,
    Cluster,
    Connection,
    RefusedError,
    UnreachableError,
    UnsupportedError,
    parse_bootstrap,
)
from penstock.client.fetching import readable
from penstock.client.security import Security
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.init_producer_id import InitProducerIdRequest
from penstock.wire.messages.metadata import MetadataRequest
from tests.client.certificates import authority, issued


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, int]]:
    """A server that sends the same bytes to everyone, and then closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()
        thread.join()


def free_address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
    return host, port


def test_requests_go_out_in_the_newest_version_that_both_know(broker: Broker) -> None:
    with Cluster(broker.bootstrap) as cluster:
        connection = cluster.any()
        assert connection is cluster.any()
        assert connection.version_of(MetadataRequest) == MetadataRequest.VERSIONS[1]
        # One that Kafka calls unstable is used where it is asked for, and only there.
        assert connection.version_of(InitProducerIdRequest) == 5
        assert connection.version_of(InitProducerIdRequest, at_least=6) == 6
        assert connection.call(MetadataRequest(topics=[])).brokers[0].port == broker.server.port


def test_what_the_broker_does_not_know_is_not_asked(broker: Broker) -> None:
    with Cluster(broker.bootstrap) as cluster:
        connection = cluster.any()
        connection.versions = {InitProducerIdRequest.API_KEY: (0, 5)}
        with pytest.raises(UnsupportedError, match="no InitProducerId version 6"):
            connection.version_of(InitProducerIdRequest, at_least=6)
        with pytest.raises(UnsupportedError, match="no Metadata"):
            connection.call(MetadataRequest(topics=[]))


def test_the_right_broker_is_found(broker: Broker) -> None:
    with Cluster(broker.bootstrap) as cluster:
        assert cluster.coordinator(GROUP, "g") is cluster.any()
        assert cluster.coordinator(TRANSACTION, "t") is cluster.any()
        assert list(cluster.brokers()) == [cluster.any()]
        with pytest.raises(RefusedError) as caught:
            cluster.leader("nowhere", 0)
        assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_the_next_server_is_tried(broker: Broker) -> None:
    host, port = free_address()
    with Cluster(f"{host}:{port},{broker.bootstrap}") as cluster:
        assert cluster.any().address[1] == broker.server.port
    with Cluster(f"{host}:{port}") as cluster, pytest.raises(UnreachableError, match="refused"):
        cluster.any()


def test_a_lost_connection_is_made_anew(broker: Broker) -> None:
    with Cluster(broker.bootstrap) as cluster:
        before = cluster.any()
        before.close()
        assert cluster.any() is not before


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed the connection"),
        (struct.pack(">i", 10) + b"abc", "closed the connection"),
        (struct.pack(">i", 0x7FFFFFFF), "no answer of Kafka begins"),
        (struct.pack(">i", -1), "no answer of Kafka begins"),
        (struct.pack(">ii", 4, 77), "answered another request"),
        (struct.pack(">iih", 6, 1, 0), "ApiVersions"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "speaks HTTP"),
    ],
)
def test_answers_that_are_none(answer: bytes, message: str) -> None:
    with answering(answer) as address, pytest.raises(ClientError, match=message):
        Connection(address, timeout_s=10)


def test_silence_has_a_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(UnreachableError, match="no answer in time"):
            Connection(server.getsockname(), timeout_s=0.05)


def test_addresses() -> None:
    assert parse_bootstrap("a:1, b ,[::1]:3,[::1],PLAINTEXT://c:4") == [
        ("a", 1),
        ("b", 9092),
        ("::1", 3),
        ("::1", 9092),
        ("c", 4),
    ]
    for wrong in ("", " , ", "a:b", "a:70000", ":1"):
        with pytest.raises(ClientError):
            parse_bootstrap(wrong)


# ---- several answers at once ---------------------------------------------------------------------


def frame(connection: socket.socket) -> bytes:
    """One request or answer with the length before it."""
    stream = b""
    while len(stream) < 4 or len(stream) < 4 + int.from_bytes(stream[:4], "big"):
        wanted = 4 + int.from_bytes(stream[:4], "big") if len(stream) >= 4 else 4
        got = connection.recv(wanted - len(stream))
        assert got
        stream += got
    return stream


def answer_in_one_record(listener: socket.socket, context: ssl.SSLContext, to: Address) -> None:
    """TLS in front of a broker; after the first request, answers leave two at a time."""
    plain, _ = listener.accept()
    with context.wrap_socket(plain, server_side=True) as client:
        with socket.create_connection(to) as broker:
            for count in (1, 2):
                for _ in range(count):
                    broker.sendall(frame(client))
                client.sendall(b"".join(frame(broker) for _ in range(count)))


def test_answers_that_share_a_record_of_tls_are_not_overlooked(
    broker: Broker, tmp_path: Path
) -> None:
    ca = authority("tests")
    (tmp_path / "ca.crt").write_text(ca.certificate_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued("broker", ca).write(tmp_path, "server"))
    options = {"security.protocol": "SSL", "ssl.ca.location": str(tmp_path / "ca.crt")}
    (behind,) = parse_bootstrap(broker.bootstrap)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        relay = pool.submit(answer_in_one_record, listener, context, behind)
        with Connection(listener.getsockname(), security=Security.from_options(options)) as ours:
            asked = [ours.submit(MetadataRequest(topics=[])) for _ in range(2)]
            assert not ours.is_buffered()
            assert readable([ours.fileno()], 60)
            first = ours.receive(asked[0])
            # The second is here, and nothing will arrive any more.
            assert ours.is_buffered()
            assert ours.receive(asked[1]).brokers == first.brokers
            assert not ours.is_buffered()
        relay.result(60)
    assert not ours.is_buffered()
