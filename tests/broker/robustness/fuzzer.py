"""Sends frames to a broker and says what became of each: answered, closed, or still waiting.

After every frame goes a harmless question (ApiVersions). Its answer proves that the frame before
it was dealt with and that the connection lives on; otherwise the connection must be closed. Frames
go several at a time as long as that works; where a connection is closed the frame to blame is
found by sending the next ones alone. Can be run as a process of its own, so that a broker in the
test's process has a core for itself.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Final
from uuid import UUID

from penstock.wire import request_header
from tests.broker.robustness.frames import (
    LENGTH,
    Target,
    broken_streams,
    damaged_frames,
    valid_frames,
)

API_VERSIONS: Final = 18
THREADS: Final = 3
_QUESTION_IDS: Final = 0x7E57_0000
_MOST_AT_ONCE: Final = 16
# Fetch, JoinGroup, SyncGroup and ShareFetch wait for records, or for other members, as long as the
# request says. One that was damaged into waiting for weeks is not waited for; anything else is.
_WAITING: Final = frozenset(key.to_bytes(2, "big") for key in (1, 11, 14, 78))
_WAITING_PATIENCE_S: Final = 1.0
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Work:
    """What a fuzzer is asked to do."""

    host: str
    port: int
    seed: int
    target_topics: dict[str, str]
    now_ms: int
    frames: int
    streams: int
    each: int = 8


class Fuzzer:
    """One stream of damage, over as many connections as it takes."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self.outcomes: Counter[str] = Counter()

    def send_frames(self, frames: Iterator[bytes]) -> None:
        """Send each frame; note what became of it."""
        again: list[bytes] = []
        at_once = 1
        connection: socket.socket | None = None
        while True:
            sending = again[:at_once] or list(itertools.islice(frames, at_once))
            del again[:at_once]
            if not sending:
                break
            connection = connection or self._connect()
            done, end = self._send_some(connection, sending)
            self.outcomes["answered"] += done
            if end == "alive":
                at_once = min(at_once * 2, _MOST_AT_ONCE)
                continue
            connection.close()
            connection = None
            at_once = 1
            # The first that was not dealt with is to blame, if it was not sent along with others.
            if end != "closed" or len(sending) - done == 1:
                self.outcomes[end] += 1
                done += 1
            again = sending[done:] + again
        if connection is not None:
            connection.close()

    def send_streams(self, streams: Iterator[bytes]) -> None:
        """Send each stretch of bytes on a connection of its own, and then nothing more."""
        for stream in streams:
            with self._connect() as connection:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(stream)
                    connection.shutdown(socket.SHUT_WR)
                self._read_to_the_end(connection)

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A port must be free again at once: there are more connections than ports.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return connection

    def _send_some(self, connection: socket.socket, frames: list[bytes]) -> tuple[int, str]:
        """How many of the frames were dealt with, and what became of the connection."""
        data = bytearray()
        for at, frame in enumerate(frames):
            question = request_header(API_VERSIONS, 0, _QUESTION_IDS + at)
            data += LENGTH.pack(len(frame)) + frame + LENGTH.pack(len(question)) + question
        may_wait = any(bytes(frame[:2]) in _WAITING for frame in frames)
        connection.settimeout(_WAITING_PATIENCE_S if may_wait else _PATIENCE_S)
        done = 0
        try:
            connection.sendall(data)
            for answer in self._answers(connection):
                if answer[:4] == LENGTH.pack(_QUESTION_IDS + done):
                    done += 1
                    if done == len(frames):
                        return done, "alive"
        except ConnectionError:
            return done, "closed"
        except TimeoutError:
            return done, "waiting" if may_wait else "stuck"
        return done, "closed"

    def _answers(self, connection: socket.socket) -> Iterator[bytes]:
        buffer = bytearray()
        while data := connection.recv(1 << 16):
            buffer += data
            while len(buffer) >= 4:
                (length,) = LENGTH.unpack_from(buffer)
                assert 4 <= length < 200 << 20, f"an answer of {length} bytes"
                if len(buffer) < 4 + length:
                    break
                yield bytes(buffer[4 : 4 + length])
                del buffer[: 4 + length]
        assert not buffer, "the broker closed in the middle of an answer"

    def _read_to_the_end(self, connection: socket.socket) -> None:
        connection.settimeout(60)
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 16):
                pass
        self.outcomes["closed"] += 1


def run(work: Work) -> Counter[str]:
    """Do the work here, on a few threads: while one waits for an answer the others go on."""
    target = Target({name: UUID(id_) for name, id_ in work.target_topics.items()}, work.now_ms)
    with ThreadPoolExecutor(THREADS) as threads:
        parts = threads.map(lambda number: _run_part(work, target, number), range(THREADS))
        return sum(parts, Counter())


def _run_part(work: Work, target: Target, number: int) -> Counter[str]:
    rng = random.Random(work.seed + number)
    corpus = valid_frames(work.seed + number, target, work.each)
    fuzzer = Fuzzer(work.host, work.port)
    fuzzer.send_frames(iter(corpus))
    frames, streams = work.frames // THREADS + 1, work.streams // THREADS + 1
    fuzzer.send_frames(itertools.islice(damaged_frames(rng, corpus), frames))
    fuzzer.send_streams(itertools.islice(broken_streams(rng, corpus), streams))
    return fuzzer.outcomes


class FuzzProcess:
    """The work in a process of its own."""

    def __init__(self, work: Work) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.broker.robustness.fuzzer", json.dumps(asdict(work))],
            stdout=subprocess.PIPE,
        )

    def running(self) -> bool:
        return self._process.poll() is None

    def outcomes(self) -> Counter[str]:
        """Wait for the end; what became of the frames."""
        output, _ = self._process.communicate()
        assert self._process.returncode == 0, "the fuzzer failed; see its output"
        return Counter(json.loads(output))


if __name__ == "__main__":
    print(json.dumps(run(Work(**json.loads(sys.argv[1])))))
