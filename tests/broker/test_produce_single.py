"""Requests recognised by their bytes are answered as if they had been decoded: byte for byte.

Two brokers get the same frames. One recognises what it has seen; the other has forgotten how to.
Whatever comes back must be the same, and so must what lies in the logs afterwards.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from penstock.broker.apis.produce_single import Targets
from penstock.testing.broker import Broker
from penstock.testing.clock import START_MS, ManualClock
from penstock.wire import Message, decode_response_header, decoder, encoder, request_header
from penstock.wire.messages.produce import ProduceRequest, ProduceResponse
from penstock.wire.primitive import encode_compact_string, encode_uvarint
from tests.broker.disks import HastyDisk
from tests.broker.raw import RawClient
from tests.broker.requests import (
    SET,
    alter,
    batch,
    batch_of_size,
    create,
    delete,
    fetch,
    new_name,
    produce,
)
from tests.harness.profiles import PRODUCE_ROUNDS

NO_TAGS = b"\0"
# One tag, unknown; the last two end like a request that has none.
TAGS = (NO_TAGS, b"\x01\x63\x02ab", b"\x01\x63\x01\x00", b"\x01\x63\x05\0\0\0\0\0")
PRODUCER_ID = 4000


class Forgetful(Targets):
    """Recognises nothing."""

    __slots__ = ()

    def find(self, frame: memoryview) -> None:
        return None


class Counting(Targets):
    """Counts what it recognises."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def find(self, frame: memoryview) -> Any:
        known = super().find(frame)
        self.found += known is not None
        return known


class Side:
    """One of the two brokers and the connection to it."""

    def __init__(self, broker: Broker, targets: Targets) -> None:
        self.client = RawClient(broker.bootstrap)
        self.targets = targets
        # Answered: the connection is there on the other side too.
        self.client.call(create(new_name()))
        broker.call(self._replace_targets)
        self.ids: dict[str, UUID] = {}

    def _replace_targets(self, server: Any) -> None:
        (connection,) = server.connections
        connection.targets = self.targets

    def create(self, topic: str, **configs: str) -> None:
        self.ids[topic] = self.client.call(create(topic, 2, configs=configs)).topics[0].topic_id


@dataclass
class Pair:
    """Both of them, asked the same."""

    fast: Side
    plain: Side

    def both(self, act: Callable[[Side], Any]) -> tuple[Any, Any]:
        return act(self.fast), act(self.plain)

    def create(self, topic: str, **configs: str) -> None:
        self.both(lambda side: side.create(topic, **configs))

    def exchange(self, frames: Callable[[Side], list[bytes]]) -> list[bytes]:
        """Send frames in one write; both must answer the same but for the topics' ids."""
        fast, plain = self.both(lambda side: _exchange(side.client, frames(side)))
        for topic, id_ in self.plain.ids.items():
            plain = [frame.replace(id_.bytes, self.fast.ids[topic].bytes) for frame in plain]
        assert fast == plain
        return list(fast)

    def compare_logs(self, topic: str) -> None:
        request = fetch(topic, {0: 0, 1: 0})
        fast, plain = self.both(lambda side: side.client.call(request, 12))
        assert fast == plain


def _exchange(client: RawClient, frames: list[bytes]) -> list[bytes]:
    client.send_bytes(b"".join(struct.pack(">i", len(frame)) + frame for frame in frames))
    return [client.receive_frame() for _ in frames]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        Broker(clock=ManualClock(), disk=HastyDisk()) as one,
        Broker(clock=ManualClock(), disk=HastyDisk()) as other,
    ):
        sides = Pair(Side(one, Counting()), Side(other, Forgetful()))
        yield sides
        sides.both(lambda side: side.client.close())


# ---- requests --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One produce request, as far as it is the same for both."""

    version: int
    topic: str
    records: bytes | None
    partition: int = 0
    acks: int = -1
    more: tuple[tuple[int, bytes], ...] = ()
    header_tags: bytes = NO_TAGS
    tags: tuple[bytes, bytes, bytes] = (NO_TAGS, NO_TAGS, NO_TAGS)
    behind: bytes = b""

    def frame(self, side: Side, correlation_id: int) -> bytes:
        by_id = self.version >= 13
        # An id that nobody has, where the topic is not there.
        topic = side.ids.get(self.topic, UUID(int=9)) if by_id else self.topic
        header = request_header(0, self.version, correlation_id, "c")
        flexible = self.version >= 9
        if flexible:
            header = header[:-1] + self.header_tags
        if flexible and self.records is not None and not self.more:
            body = self._flexible_body(topic)
        else:
            data = {self.partition: self.records, **dict(self.more)}
            body = encoder(ProduceRequest, self.version)(produce(topic, data, acks=self.acks))
        return header + body + self.behind

    def _flexible_body(self, topic: str | UUID) -> bytes:
        """By hand, because the encoder knows of no unknown tags."""
        assert self.records is not None
        name = encode_compact_string(topic) if isinstance(topic, str) else topic.bytes
        return b"".join(
            (
                b"\0",
                struct.pack(">hi", self.acks, 30_000),
                b"\x02" + name,
                b"\x02" + struct.pack(">i", self.partition),
                encode_uvarint(len(self.records) + 1),
                self.records,
                *self.tags,
            )
        )


def damaged() -> bytes:
    raw = bytearray(batch(b"damaged", at_ms=START_MS))
    raw[-1] ^= 1
    return bytes(raw)


BATCHES: dict[str, bytes | None] = {
    "plain": batch(b"a", b"b", key=b"k", at_ms=START_MS),
    **{f"codec {n}": batch(b"c" * 200, key=b"k", at_ms=START_MS, codec=n) for n in range(1, 5)},
    "no key": batch(b"x", at_ms=START_MS),
    "damaged": damaged(),
    "cut": batch(b"cut short", at_ms=START_MS)[:-3],
    "two": batch(b"1", at_ms=START_MS) + batch(b"2", at_ms=START_MS),
    "large": batch_of_size(1500, at_ms=START_MS, key=b"k"),
    "future": batch(b"x", key=b"k", at_ms=START_MS + 86_400_000),
    "none": None,
    "empty": b"",
    **{
        f"sequence {epoch}.{n}": batch(
            b"s", key=b"k", at_ms=START_MS, producer=(PRODUCER_ID, epoch, n)
        )
        for epoch in (0, 1)
        for n in range(3)
    },
}
TOPICS = ("usual", "stamped", "compacted", "missing")


class Random:
    """Requests and changes of topics, drawn from a seed."""

    def __init__(self, seed: int, version: int, base: str) -> None:
        self.rng = random.Random(seed)
        self.version = version
        self.base = base

    def ask(self) -> Ask:
        """Mostly of the same beginning, or nothing would be recognised."""
        rng = self.rng
        odd = rng.random() < 0.2
        return Ask(
            version=self.version,
            topic=f"{self.base}-{rng.choice(TOPICS if odd else TOPICS[:1])}",
            records=BATCHES[rng.choice(list(BATCHES))],
            partition=rng.choice((0, 1, 7)) if odd else 0,
            acks=rng.choice((-1, 1, 5)) if odd else -1,
            more=((1, BATCHES["plain"] or b""),) if rng.random() < 0.05 else (),
            header_tags=TAGS[1] if rng.random() < 0.05 else NO_TAGS,
            tags=(
                (rng.choice(TAGS), rng.choice(TAGS), rng.choice(TAGS))
                if rng.random() < 0.1
                else (NO_TAGS, NO_TAGS, NO_TAGS)
            ),
            behind=rng.choice((b"\0\0", b"xyz")) if rng.random() < 0.05 else b"",
        )

    def change(self) -> list[Message]:
        topic = f"{self.base}-{self.rng.choice(TOPICS[:3])}"
        if self.rng.random() < 0.5:
            return [delete(topic), create(topic, 2)]
        size = self.rng.choice(("1000", "2000"))
        return [alter(topic, (SET, "max.message.bytes", size))]


@pytest.mark.parametrize("version", range(3, 14))
def test_both_ways_give_the_same_bytes(pair: Pair, version: int, seed: int) -> None:
    base = new_name()
    pair.create(f"{base}-usual")
    pair.create(f"{base}-stamped", message_timestamp_type="LogAppendTime")
    pair.create(f"{base}-compacted", cleanup_policy="compact")
    draw = Random(seed, version, base)
    correlation_id = 0
    for _ in range(PRODUCE_ROUNDS):
        for request in draw.change() if draw.rng.random() < 0.1 else ():
            pair.both(partial(_ask_and_learn, request))
        together = [draw.ask() for _ in range(draw.rng.randint(1, 6))]
        correlation_id += len(together)
        pair.exchange(partial(_frames, together, correlation_id))
    for name in TOPICS:
        pair.compare_logs(f"{base}-{name}")


def _frames(together: list[Ask], correlation_id: int, side: Side) -> list[bytes]:
    return [ask.frame(side, correlation_id + at) for at, ask in enumerate(together)]


def _ask_and_learn(request: Message, side: Side) -> None:
    answer = side.client.call(request)
    for told in getattr(answer, "topics", ()):
        side.ids[told.name] = told.topic_id


@pytest.mark.parametrize("version", range(3, 14))
def test_the_second_request_is_recognised(pair: Pair, version: int) -> None:
    topic = new_name()
    pair.create(topic)
    assert isinstance(pair.fast.targets, Counting)
    before = pair.fast.targets.found
    for at in range(3):
        ask = Ask(version, topic, BATCHES["plain"])
        (frame,) = pair.exchange(partial(_frames, [ask], at))
        _, start = decode_response_header(0, version, frame)
        answer, _ = decoder(ProduceResponse, version)(frame, start)
        assert answer.responses[0].partition_responses[0].base_offset == at * 2
    # Older requests are looked at one by one, for a codec that they may not use.
    assert pair.fast.targets.found - before == (2 if version >= 7 else 0)


def test_only_so_many_are_remembered(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.broker.apis.produce_single.MAX_TARGETS", 3)
    topic = new_name()
    pair.create(topic)
    assert isinstance(pair.fast.targets, Counting)
    for _ in range(3):
        for version in (8, 9, 10, 11, 12):
            ask = Ask(version, topic, BATCHES["plain"])
            pair.exchange(partial(_frames, [ask], 1))
            assert sum(map(len, pair.fast.targets._by_length.values())) <= 3
    pair.compare_logs(topic)
