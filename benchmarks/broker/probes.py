"""Is it there yet? One question per protocol, asked over a bare socket.

A server counts as started when it gives a right answer in its own protocol, not when its port is
open. Each probe returns False while there is none.
"""

from __future__ import annotations

import socket
import struct

HOST = "127.0.0.1"
TIMEOUT_S = 5.0


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _ask(port: int, question: bytes, size: int, *, greeting_until: bytes = b"") -> bytes:
    """Send, and receive exactly `size` bytes; after the greeting, if the server speaks first."""
    with (
        socket.create_connection((HOST, port), timeout=TIMEOUT_S) as connection,
        connection.makefile("rb") as answers,
    ):
        if greeting_until and greeting_until not in answers.readline():
            return b""
        connection.sendall(question)
        return answers.read(size)


def kafka(port: int) -> bool:
    """Answers Metadata v1 (about no topic) with at least one broker."""
    body = struct.pack(">hhihi", 3, 1, 7, -1, 0)
    try:
        answer = _ask(port, struct.pack(">i", len(body)) + body, 12)
        _, correlation_id, brokers = struct.unpack(">iii", answer)
        return bool(correlation_id == 7 and brokers > 0)
    except (OSError, struct.error):
        return False


def nats(port: int) -> bool:
    """Greets with JetStream on, and answers a ping."""
    try:
        question = b'CONNECT {"verbose":false}\r\nPING\r\n'
        return _ask(port, question, 6, greeting_until=b'"jetstream":true') == b"PONG\r\n"
    except OSError:
        return False


def redis(port: int) -> bool:
    """Answers a ping (and not that it is still loading)."""
    try:
        return _ask(port, b"PING\r\n", 7) == b"+PONG\r\n"
    except OSError:
        return False


def amqp(port: int) -> bool:
    """Answers the protocol header with Connection.Start."""
    try:
        answer = _ask(port, b"AMQP\x00\x00\x09\x01", 11)
        return len(answer) == 11 and answer[0] == 1 and answer[7:] == b"\x00\x0a\x00\x0a"
    except OSError:
        return False


def rabbit_stream(port: int) -> bool:
    """Answers PeerProperties with success."""
    body = struct.pack(">HHII", 17, 1, 1, 0)
    try:
        answer = _ask(port, struct.pack(">I", len(body)) + body, 14)
        _, key, _, _, code = struct.unpack(">IHHIH", answer)
        return bool(key == 0x8011 and code == 1)
    except (OSError, struct.error):
        return False
