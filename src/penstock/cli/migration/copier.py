"""Copying: records from the source to the target, each transaction with its position and its map.

What is in memory is bounded: a transaction holds at most so many records and bytes, and the
clients' queues have limits of their own.

A transaction that must be aborted (a broker went away, a coordinator moved) is aborted, and reading
goes back to the last position that was committed. Only what cannot be mended by that ends the run;
the next run goes on there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.kafka import REQUEST_TIMEOUT_S, BrokerError, broker_error, translated
from penstock.cli.migration.ends import WAIT_S, End, check_stall, taken
from penstock.cli.migration.state import Copied, Progress, parse_progress
from penstock.client.migration_map import GROUP_KEY, TOPIC_KEY, Place, encode, runs_of

if TYPE_CHECKING:
    from confluent_kafka import (
        Consumer,
        KafkaError,
        KafkaException,
        Message,
        Producer,
        TopicPartition,
    )

BATCH_RECORDS: Final = 10_000
BATCH_BYTES: Final = 16 << 20
# Taken from the client at a time, unless records are so large that it would be too much.
SLICE: Final = 1_000
SLICE_BYTES: Final = 4 << 20
TRANSACTION_TIMEOUT_MS: Final = 60_000
# Transactions that are aborted one after the other before the run gives up.
ATTEMPTS: Final = 10
CLOSE_TIMEOUT_S: Final = 5.0
OFFSETS_TIMEOUT_S: Final = 8.0
# The version of librdkafka that began to forget brokers when none of them answers.
RECOVERS_SINCE: Final = 0x020B0000

WRITING: Final = {
    "acks": "all",
    "enable.idempotence": True,
    "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
    "message.max.bytes": 100_000_000,
    "queue.buffering.max.kbytes": 65_536,
    "linger.ms": 5,
    "compression.type": "lz4",
    # A broker that was away is found again soon.
    "reconnect.backoff.max.ms": 500,
}


@dataclass(slots=True)
class Batch:
    """What one transaction copies: records by partition, and how far each was read."""

    records: dict[Place, list[tuple[int, Copied]]] = field(default_factory=dict)
    # Where partitions without more records were seen to go on.
    ends: dict[Place, int] = field(default_factory=dict)
    count: int = 0
    bytes: int = 0
    clamped: int = 0

    def add(self, place: Place, offset: int, record: Copied | None) -> None:
        if record is None:
            self.ends[place] = offset
            return
        self.records.setdefault(place, []).append((offset, record))
        self.count += 1
        self.bytes += record.size()
        self.clamped += record.clamped


class TransactionAbortedError(BrokerError):
    """The transaction had no effect; it can be tried again."""


class Copier:
    """Copies partitions and keeps their progress. Use `close` at the end."""

    def __init__(
        self, source: End, target: End, name: str, mapping_topic: str, batch_records: int
    ) -> None:
        self._source, self._target = source, target
        self._mapping_topic = mapping_topic
        self._batch_records = batch_records
        self.progress: dict[Place, Progress] = {}
        self.copied: dict[Place, int] = {}
        self.clamped = 0
        self._delivered: dict[Place, list[int]] = {}
        self._refused: list[KafkaError] = []
        self._reader: Consumer | None = None
        self._aborted_in_a_row = 0
        self._open = False
        # It stands for the migration group, and joins nothing.
        self._group = target.connection.consumer({"group.id": name})
        self._name = name
        self._producer = self._new_producer()

    def _new_producer(self) -> Producer:
        """Whoever wrote under this name before is fenced, its open transaction aborted."""
        producer = self._target.connection.producer(
            {**WRITING, **_patience(), "transactional.id": self._name}
        )
        with translated("beginning to write to the target"):
            producer.init_transactions(REQUEST_TIMEOUT_S * 2)
        return producer

    def close(self) -> None:
        """End the clients, and a transaction that is still open: readers wait for it."""
        from confluent_kafka import KafkaException

        if self._open:
            # Whatever has ended the run is worth saying, not that this failed too.
            with suppress(KafkaException):
                self._producer.abort_transaction(CLOSE_TIMEOUT_S)
        if self._reader is not None:
            self._reader.close()
        self._group.close()

    # ---- positions -------------------------------------------------------------------------

    def load(self, topic_ids: Mapping[Place, str]) -> set[Place]:
        """Take up partitions where they are; those that are new begin at 0 and are returned."""
        from confluent_kafka import TopicPartition

        new = set()
        wanted = [TopicPartition(*place) for place in topic_ids]
        with translated("asking the target how far it is"):
            found = self._group.committed(wanted, timeout=REQUEST_TIMEOUT_S)
        for at in found:
            place = Place(at.topic, at.partition)
            if at.error is not None:
                raise broker_error(at.error, f"asking how far {place} is")
            topic_id = topic_ids[place]
            if at.offset < 0:
                new.add(place)
                self.progress[place] = Progress(topic_id, 0, 0)
                continue
            progress = parse_progress(place, at.offset, at.metadata)
            if progress.topic_id != topic_id:
                raise BrokerError(
                    f"{place.topic} of the source is not the topic that was migrated before: it "
                    "has been deleted and made anew",
                    advice="Delete the topic in the target too, or leave it out with --exclude.",
                )
            self.progress[place] = progress
        return new

    def skip_to(self, place: Place, offset: int) -> None:
        """Begin there: what was before is gone from the source."""
        progress = self.progress[place].moved_to(offset)
        if not progress.count:
            progress = progress.verified()
        self.progress[place] = progress

    def read_on(self) -> None:
        """Read (again) from the positions that are committed."""
        if self._reader is not None:
            self._reader.close()
        starts = {place: progress.position for place, progress in self.progress.items()}
        self._reader = self._source.reader(starts)

    # ---- copying ---------------------------------------------------------------------------

    def step(self) -> int:
        """Copy what there is now, in one transaction; how many records that was."""
        batch = self._gather()
        if batch.count:
            try:
                self._write(batch)
            except TransactionAbortedError:
                self._aborted_in_a_row += 1
                if self._aborted_in_a_row >= ATTEMPTS:
                    raise
                self.read_on()
                return 0
            self._aborted_in_a_row = 0
        for place, end in batch.ends.items():
            self.progress[place] = self.progress[place].moved_to(end)
        return batch.count

    def copy_until(self, ends: Mapping[Place, int], advance: Any) -> None:
        """Copy until every partition has come so far."""
        last_news = time.monotonic()
        while any(self.progress[place].position < end for place, end in ends.items()):
            before = sum(self.progress[place].position for place in ends)
            count = self.step()
            advance(count)
            if count or sum(self.progress[place].position for place in ends) != before:
                last_news = time.monotonic()
            check_stall(last_news, self._source.what)

    def _gather(self) -> Batch:
        assert self._reader is not None
        batch = Batch()
        slice_records = min(100, self._batch_records)
        while batch.count < self._batch_records and batch.bytes < BATCH_BYTES:
            limit = min(slice_records, self._batch_records - batch.count)
            # Once there is something, only what is already here is taken along.
            wait_s = WAIT_S if not batch.count else 0.01
            count = 0
            for place, offset, record in taken(self._reader, limit, wait_s, self._source.what):
                batch.add(place, offset, record)
                count += 1
            if count < limit:
                break
            average = batch.bytes // max(1, batch.count) + 1
            slice_records = max(1, min(SLICE, SLICE_BYTES // average))
        self.clamped += batch.clamped
        return batch

    def _write(self, batch: Batch) -> None:
        from confluent_kafka import KafkaException

        self._delivered, self._refused = {}, []
        try:
            self._begin()
            for place, records in batch.records.items():
                for _, record in records:
                    self._produce(place, record)
            self._flush()
            after = self._after(batch)
            for place, records in batch.records.items():
                pairs = zip((offset for offset, _ in records), self._delivered[place], strict=True)
                anew = self.progress[place].last_target < 0
                for value in encode(place, runs_of(pairs), anew=anew):
                    self._produce(Place(self._mapping_topic, 0), Copied(None, value, 0, ()))
            self._commit(after)
        except KafkaException as error:
            self._abort(error)
        self.progress.update(after)
        for place, records in batch.records.items():
            self.copied[place] = self.copied.get(place, 0) + len(records)

    def _produce(self, place: Place, record: Copied) -> None:
        more: dict[str, Any] = {"headers": list(record.headers)} if record.headers else {}
        if record.timestamp_ms:
            more["timestamp"] = record.timestamp_ms
        while True:
            try:
                self._producer.produce(
                    place.topic,
                    record.value,
                    record.key,
                    place.partition,
                    on_delivery=self._on_delivery,
                    **more,
                )
                return
            except BufferError:
                # Its queue is full: let it send.
                self._producer.poll(0.1)

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._refused.append(error)
            return
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        self._delivered.setdefault(Place(topic, partition), []).append(offset)

    def _flush(self) -> None:
        from confluent_kafka import KafkaException

        left = self._producer.flush(TRANSACTION_TIMEOUT_MS / 1000)
        if self._refused:
            raise KafkaException(self._refused[0])
        if left:
            raise BrokerError(
                "the target did not take the records in time",
                advice="Is it overloaded? Start the command again: it goes on where it was.",
            )

    def _after(self, batch: Batch) -> dict[Place, Progress]:
        """The progress that this transaction makes true."""
        after = {}
        for place, records in batch.records.items():
            offsets = self._delivered.get(place, [])
            if len(offsets) != len(records) or offsets[-1] - offsets[0] != len(records) - 1:
                raise BrokerError(
                    f"someone else writes to {place} of the target",
                    advice="Nobody may write there before the migration is finished. Stop the "
                    "other writer, delete the target's topic and start again.",
                )
            after[place] = self.progress[place].with_records(records, offsets[-1])
        return after

    def _begin(self) -> None:
        self._producer.begin_transaction()
        self._open = True

    def _commit(self, after: Mapping[Place, Progress]) -> None:
        """Add positions to the open transaction and commit it."""
        from confluent_kafka import KafkaException, TopicPartition

        offsets = [
            TopicPartition(*place, progress.position, metadata=progress.metadata())
            for place, progress in after.items()
        ]
        if offsets:
            self._send_offsets(offsets)
        while True:
            try:
                self._producer.commit_transaction(REQUEST_TIMEOUT_S)
                self._open = False
                return
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise

    def _send_offsets(self, offsets: list[TopicPartition]) -> None:
        """Add offsets to the transaction, with a producer of its own if this one is stuck.

        When a coordinator goes away the client library may wait for it for ever, whatever its
        time-out (librdkafka#5511). Nothing is decided then: a new producer aborts what is open.
        """
        producer, failures = self._producer, list[BaseException]()

        def send() -> None:
            try:
                producer.send_offsets_to_transaction(
                    offsets, self._group.consumer_group_metadata(), OFFSETS_TIMEOUT_S
                )
            except BaseException as error:  # raised by the thread that waits
                failures.append(error)

        thread = threading.Thread(target=send, name="send-offsets", daemon=True)
        thread.start()
        thread.join(OFFSETS_TIMEOUT_S + 2)
        if thread.is_alive():
            self._producer = self._new_producer()
            self._open = False
            raise TransactionAbortedError("the target's coordinator did not answer in time")
        if failures:
            raise failures[0]

    def settle(self) -> None:
        """Until readers see all that was committed.

        Apache Kafka answers a commit before it has written the markers that readers wait for; but
        it takes nothing for the next transaction before.
        """
        from confluent_kafka import KafkaException

        written = (item for item in self.progress.items() if item[1].last_target >= 0)
        again = dict(islice(written, 1))
        if not again:
            return
        try:
            self._begin()
            self._commit(again)
        except KafkaException as error:
            self._abort(error)

    def mark_verified(self, places: list[Place]) -> None:
        """Begin new windows: what is before has been compared."""
        from confluent_kafka import KafkaException

        after = {place: self.progress[place].verified() for place in places}
        if not after:
            return
        try:
            self._begin()
            self._commit(after)
        except KafkaException as error:
            self._abort(error)
        self.progress.update(after)

    def note_groups(self, values: Iterable[bytes]) -> None:
        """Keep in the map which offsets are about to be committed for groups."""
        self._note(GROUP_KEY, values)

    def note_topics(self, values: Iterable[bytes]) -> None:
        """Keep in the map which topics were moved, and how far."""
        self._note(TOPIC_KEY, values)

    def _note(self, key: bytes, values: Iterable[bytes]) -> None:
        from confluent_kafka import KafkaException

        try:
            self._begin()
            for value in values:
                self._produce(Place(self._mapping_topic, 0), Copied(key, value, 0, ()))
            self._commit({})
        except KafkaException as error:
            self._abort(error)

    def _abort(self, error: KafkaException) -> None:
        """Give the transaction up, and say whether another may be tried."""
        from confluent_kafka import KafkaError, KafkaException

        reason: KafkaError = error.args[0]
        if reason.code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED):
            raise BrokerError(
                "another migration from this source to this target has taken over",
                advice="Let it finish; only one can run at a time.",
            ) from None
        if reason.fatal():
            raise broker_error(reason, "writing to the target") from None
        try:
            self._producer.abort_transaction(REQUEST_TIMEOUT_S)
            self._open = False
        except KafkaException as failure:
            raise broker_error(failure.args[0], "writing to the target") from None
        raise TransactionAbortedError(f"writing to the target: {reason.str()}") from None


def _patience() -> dict[str, str]:
    """Keep what is known of brokers when none answers: a single one comes back as it was."""
    from confluent_kafka import libversion

    return {"metadata.recovery.strategy": "none"} if libversion()[1] >= RECOVERS_SINCE else {}
