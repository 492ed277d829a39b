"""Topics that choose their codec: batches are packed anew, and nothing else about them changes."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import pytest

from penstock.broker import recompression
from penstock.broker.apis.produce_single import Targets
from penstock.broker.server import Broker as Server
from penstock.errors import RecordTooLargeError
from penstock.log.partition import Partition
from penstock.records.batch import headers
from penstock.records.compression import CODES, GZIP, NONE, SNAPPY, ZSTD
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from tests.broker.raw import RawClient
from tests.broker.requests import (
    alter,
    batch,
    create,
    fetch,
    metadata,
    new_name,
    new_producer,
    one,
    produce,
    resealed,
    values_of,
)
from tests.broker.transactions.raw_producer import RawProducer, read
from tests.broker.waits import wait_until

# As `compression.type` names them.
TARGETS: Final = {**CODES, "uncompressed": NONE}
del TARGETS["none"]
SET: Final = 0


def codec_topic(client: RawClient, codec: str, **configs: str) -> str:
    name = new_name()
    configs = {"compression_type": codec, **configs}
    result = client.call(create(name, configs=configs)).topics[0]
    assert not result.error_code, result.error_message
    return name


def stored(client: RawClient, topic: str) -> tuple[list[int], list[bytes | None]]:
    """The codecs of a topic's batches, and the values in them."""
    records = one(client.call(fetch(topic), 12)).records
    return [header.codec for _, header in headers(bytes(records))], values_of(records)


class Stopped:
    """The threads that pack batches wait until they are told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._began, self._may_go = threading.Event(), threading.Event()
        self._pack = recompression._pack
        monkeypatch.setattr(recompression, "_pack", self._wait_and_pack)

    def _wait_and_pack(self, job: Any) -> Any:
        self._began.set()
        assert self._may_go.wait(60)
        return self._pack(job)

    def wait(self) -> None:
        """Until a batch is about to be packed."""
        assert self._began.wait(60)

    def go_on(self) -> None:
        self._may_go.set()


def name_of(result: Any) -> str:
    return ErrorCode(result.error_code).name


@pytest.mark.parametrize("target", TARGETS)
def test_every_codec_becomes_the_topics(client: RawClient, target: str) -> None:
    topic = codec_topic(client, target)
    wanted: list[bytes | None] = []
    for source in CODES.values():
        values = [b"%d" % source * 50, b"", b"x"]
        result = one(client.call(produce(topic, batch(*values, codec=source)), 12))
        assert (name_of(result), result.base_offset) == ("NONE", len(wanted))
        wanted += values
    assert stored(client, topic) == ([TARGETS[target]] * len(CODES), wanted)


@pytest.mark.parametrize("levels", [("1", "9"), ("-1", "9")])
def test_levels(client: RawClient, levels: tuple[str, str]) -> None:
    value = random.Random(3).choices([b"pear ", b"plum ", b"fig ", b"quince "], k=9_000)
    sizes = []
    for level in levels:
        topic = codec_topic(client, "gzip", compression_gzip_level=level)
        client.call(produce(topic, batch(b"".join(value))), 12)
        sizes.append(len(one(client.call(fetch(topic), 12)).records))
    assert sizes[1] < sizes[0]


def test_requests_of_a_connection_keep_their_order(client: RawClient, seed: int) -> None:
    """Of an idempotent producer, in one go; some batches wait for their codec, others need not."""
    rng = random.Random(seed)
    topic, plain = codec_topic(client, "gzip"), new_name()
    client.call(create(plain))
    producer_id = client.call(new_producer()).producer_id
    for start in (0, 40):
        for at in range(start, start + 40):
            item = batch(
                b"%d" % at,
                codec=rng.choice((GZIP, NONE, SNAPPY, ZSTD)),
                producer=(producer_id, 0, at),
            )
            client.send_all(
                (produce(topic, item), 12), (produce(plain, batch(b"%d" % at)), 12), metadata(topic)
            )
        for at in range(start, start + 40):
            for _ in range(2):
                result = one(client.receive())
                assert (name_of(result), result.base_offset) == ("NONE", at)
            assert client.receive().topics[0].name == topic
    wanted = [b"%d" % at for at in range(80)]
    assert stored(client, topic) == ([GZIP] * 80, wanted)
    assert stored(client, plain)[1] == wanted
    # A repeated batch is known again, though it lies there in another codec.
    again = batch(b"79", producer=(producer_id, 0, 79))
    assert one(client.call(produce(topic, again), 12)).base_offset == 79


def test_what_others_send_meanwhile_does_not_touch_a_batch(
    client: RawClient, shared: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections read into one buffer, and a held request lies in it no longer."""
    topic, plain = codec_topic(client, "gzip"), new_name()
    client.call(create(plain))
    packing = Stopped(monkeypatch)
    left = shared.call(lambda server: server.buffer_pool.left_bytes)
    client.send_all((produce(topic, batch(b"mine" * 100)), 12))
    packing.wait()
    with RawClient(shared.bootstrap) as other:
        other.call(produce(plain, batch(b"theirs" * 10_000)), 12)
    packing.go_on()
    assert name_of(one(client.receive())) == "NONE"
    assert stored(client, topic) == ([GZIP], [b"mine" * 100])
    assert shared.call(lambda server: server.buffer_pool.left_bytes) == left


def test_several_partitions_in_one_request(client: RawClient) -> None:
    topic = new_name()
    client.call(create(topic, 3, configs={"compression.type": "zstd"}))
    damaged = bytearray(batch(b"damaged"))
    damaged[-1] ^= 1
    answer = client.call(produce(topic, {0: batch(b"a"), 1: bytes(damaged), 2: batch(b"c")}), 12)
    parts = sorted(answer.responses[0].partition_responses, key=lambda part: part.index)
    assert [name_of(part) for part in parts] == ["NONE", "CORRUPT_MESSAGE", "NONE"]


def test_what_cannot_be_unpacked_is_refused(client: RawClient) -> None:
    topic = codec_topic(client, "lz4")
    whole = batch(b"x" * 500, codec=GZIP)
    torn = resealed(whole[:-9], batch_length=len(whole) - 9 - 12)
    assert name_of(one(client.call(produce(topic, torn), 12))) == "INVALID_RECORD"
    assert name_of(one(client.call(produce(topic, whole), 12))) == "NONE"


def test_a_batch_may_be_too_large_before_and_after(client: RawClient) -> None:
    packs_well = b"x" * 5_000
    small = codec_topic(client, "gzip", max_message_bytes="1000")
    assert name_of(one(client.call(produce(small, batch(packs_well)), 12))) == "MESSAGE_TOO_LARGE"
    unfolds = codec_topic(client, "uncompressed", max_message_bytes="1000")
    packed = batch(packs_well, codec=GZIP)
    assert name_of(one(client.call(produce(unfolds, packed), 12))) == "MESSAGE_TOO_LARGE"
    assert stored(client, unfolds) == ([], [])


def test_old_versions_of_produce(client: RawClient) -> None:
    """Who may not send zstd may write to a topic that is stored so."""
    topic = codec_topic(client, "zstd")
    assert name_of(one(client.call(produce(topic, batch(b"a", codec=GZIP)), 6))) == "NONE"
    refused = one(client.call(produce(topic, batch(b"b", codec=ZSTD)), 6))
    assert name_of(refused) == "UNSUPPORTED_COMPRESSION_TYPE"
    gzip = codec_topic(client, "gzip")
    refused = one(client.call(produce(gzip, batch(b"b", codec=ZSTD)), 6))
    assert name_of(refused) == "UNSUPPORTED_COMPRESSION_TYPE"


def test_a_setting_takes_effect_at_once(client: RawClient, topic: str) -> None:
    """Also for requests that were recognised by their bytes before."""
    for codec, setting in ((NONE, None), (SNAPPY, "snappy"), (NONE, "producer")):
        if setting is not None:
            changed = client.call(alter(topic, (SET, "compression.type", setting))).responses[0]
            assert not changed.error_code
        for _ in range(3):
            client.call(produce(topic, batch(b"x")), 12)
        assert stored(client, topic)[0][-3:] == [codec] * 3
    wrong = client.call(alter(topic, (SET, "compression.type", "brotli"))).responses[0]
    assert name_of(wrong) == "INVALID_CONFIG"


def test_a_setting_costs_no_more_than_it_must(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per connection, however many partitions there are; and only where a codec is chosen."""
    looked: list[int] = []
    forget = Targets.forget_all

    def count(targets: Targets, partitions: Collection[Partition]) -> None:
        looked.append(len(partitions))
        forget(targets, partitions)

    monkeypatch.setattr(Targets, "forget_all", count)
    with RawClient(broker.bootstrap) as client:
        client.call(create("new", 4, configs={"compression.type": "gzip"}))
        client.call(create("t", 4))
        for name, value, expected in (
            ("compression.type", "gzip", [4]),
            ("compression.type", "zstd", []),
            ("retention.ms", "1000", []),
            ("compression.type", "producer", []),
        ):
            looked.clear()
            assert not client.call(alter("t", (SET, name, value))).responses[0].error_code
            assert looked == expected


def test_without_acknowledgement(client: RawClient) -> None:
    topic = codec_topic(client, "gzip")
    for at in range(5):
        client.send_unanswered(produce(topic, batch(b"%d" % at), acks=0), 12)
    client.call(produce(topic, batch(b"5")), 12)
    assert stored(client, topic) == ([GZIP] * 6, [b"%d" % at for at in range(6)])


@pytest.mark.parametrize("form", ["older", "newer"])
def test_in_transactions(client: RawClient, form: str) -> None:
    topic = codec_topic(client, "gzip")
    producer = RawProducer(client, new_name(), form)
    assert not producer.init().error_code
    for commit in (True, False):
        for at in range(3):
            assert not producer.send(topic, b"%d %d" % (commit, at))
        assert not producer.end(commit=commit)
    assert read(client, topic) == [b"1 0", b"1 1", b"1 2"]


class Never(ThreadPoolExecutor):
    """Threads that never come to anything."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        return Future()


def test_a_connection_that_is_lost_leaves_nothing_behind(broker: Broker) -> None:
    def use_never(server: Server) -> None:
        server.recompression._executor = Never()

    def cut(server: Server) -> None:
        for connection in list(server.recompression._held):
            connection.close()

    broker.call(use_never)
    with RawClient(broker.bootstrap) as client, RawClient(broker.bootstrap) as waiting:
        topic = codec_topic(client, "gzip")
        waiting.send(produce(topic, batch(b"x")), 12)
        wait_until(broker, lambda server: len(server.recompression._held) == 1)
        # Others go on meanwhile.
        result = one(client.call(produce(topic, batch(b"y", codec=GZIP)), 12))
        assert name_of(result) == "NONE"
        broker.call(cut)
        wait_until(broker, lambda server: not server.recompression._held)
        assert stored(client, topic) == ([GZIP], [b"y"])


def test_a_request_whose_client_has_gone_is_not_appended_late(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have come again over another connection; without answers nobody sends it again."""
    packing = Stopped(monkeypatch)
    broker.call(lambda server: setattr(server.recompression, "_threads", 1))

    def held(server: Server) -> int:
        return len(server.recompression._held)

    def is_more(before: int, server: Server) -> bool:
        return held(server) > before

    with RawClient(broker.bootstrap) as client:
        topic = codec_topic(client, "gzip")
        for value, acks in ((b"packed", -1), (b"waits", -1), (b"no answer", 0)):
            before = broker.call(held)
            with RawClient(broker.bootstrap) as gone:
                gone.send(produce(topic, batch(value), acks=acks), 12)
                wait_until(broker, partial(is_more, before))
        packing.wait()
        packing.go_on()
        wait_until(broker, lambda server: not server.recompression._held)
        assert name_of(one(client.call(produce(topic, batch(b"after")), 12))) == "NONE"
        assert stored(client, topic)[1] == [b"no answer", b"after"]


def test_who_waits_for_too_long_is_refused(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = Stopped(monkeypatch)
    broker.call(lambda server: setattr(server.recompression, "_threads", 1))

    def grow_old(server: Server) -> None:
        for held in server.recompression._waiting:
            held.since_s -= 10

    with RawClient(broker.bootstrap) as client, RawClient(broker.bootstrap) as late:
        topic = codec_topic(client, "gzip")
        client.send(produce(topic, batch(b"first")), 12)
        packing.wait()
        late.send(produce(topic, batch(b"late")), 12)
        wait_until(broker, lambda server: len(server.recompression._waiting) == 1)
        broker.call(grow_old)
        packing.go_on()
        assert name_of(one(client.receive())) == "NONE"
        answer = late.receive()
        assert (name_of(one(answer)), answer.throttle_time_ms) == ("KAFKA_STORAGE_ERROR", 1_000)
        assert name_of(one(late.call(produce(topic, batch(b"again")), 12))) == "NONE"
        assert stored(client, topic)[1] == [b"first", b"again"]


def test_what_becomes_too_large_is_not_kept() -> None:
    """As soon as it is known, and with the same words as by the log."""
    packed = batch(b"x" * 5_000, codec=GZIP)
    result = recompression._pack(recompression._Job(packed, NONE, None, 1 << 20, 1_000))
    assert isinstance(result, RecordTooLargeError)
    assert "exceeds max.message.bytes=1000" in str(result)


def test_what_threads_work_on_counts_as_long_as_they_do(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = Stopped(monkeypatch)

    def left(server: Server) -> int:
        return server.buffer_pool.left_bytes

    before = broker.call(left)
    with RawClient(broker.bootstrap) as client:
        topic = codec_topic(client, "gzip")
        client.send(produce(topic, batch(b"x" * 1_000)), 12)
        packing.wait()
        broker.call(lambda server: next(iter(server.recompression._held)).close())
        wait_until(broker, lambda server: not server.recompression._held)
        assert broker.call(left) < before - 1_000
        packing.go_on()
        wait_until(broker, lambda server: left(server) == before)


def test_what_becomes_of_batches_counts(broker: Broker) -> None:
    def leave_little(server: Server) -> None:
        server.buffer_pool._left = 10_000

    with RawClient(broker.bootstrap) as client, RawClient(broker.bootstrap) as other:
        topic = codec_topic(client, "uncompressed")
        broker.call(leave_little)
        client.send(produce(topic, batch(b"x" * 20_000, codec=GZIP)), 12)
        assert client.wait_closed() == b""
        wait_until(broker, lambda server: server.buffer_pool.left_bytes == 10_000)
        result = one(other.call(produce(topic, batch(b"x" * 5_000, codec=GZIP)), 12))
        assert name_of(result) == "NONE"
        assert broker.call(lambda server: server.buffer_pool.left_bytes) == 10_000
