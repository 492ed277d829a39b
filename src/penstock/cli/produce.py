"""`penstock produce`: records from lines, options or JSON into a topic.

Input is read as it comes and sent in the background, so it works in a pipe of any length with
little memory. Each record knows the line it came from: what fails is named, the rest goes on.
"""

from __future__ import annotations

import base64
import binascii
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, NamedTuple

import typer

from penstock.cli import output
from penstock.cli.kafka import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    ClientSettings,
    Connection,
    broker_error,
    complete_topics,
    connect,
    result_of,
    translated,
)
from penstock.cli.values import parse_headers, parse_time_ms, parse_timestamp, show_bytes
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

SHOWN_FAILURES: Final = 10
# How long a full queue or a broker that does not answer may hold things up.
DELIVERY_TIMEOUT_S: Final = 60
# After so long without an acknowledgement one is told what may be the reason.
STALLED_AFTER_S: Final = 4.0
_LOOK_S: Final = 0.5
_GIVE_UP_S: Final = 2.0
OVERFLOW: Final = ("overflow", "overflow.groups")


class Compression(StrEnum):
    """The codecs of the Kafka protocol."""

    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


class Acks(StrEnum):
    """What counts as sent."""

    ALL = "all"
    ONE = "1"
    NONE = "0"


class Item(NamedTuple):
    """One record to send, and the line it came from."""

    line: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, str | bytes | None]]
    partition: int
    timestamp_ms: int


class LineError(PenstockError):
    """A line of input that is no record."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How input becomes records."""

    key: bytes | None
    key_separator: bytes | None
    null_marker: bytes | None
    headers: list[tuple[str, bytes]]
    partition: int
    timestamp_ms: int

    def plain(self, number: int, line: bytes) -> Item:
        """A line of text: a value, or a key and a value."""
        key, value = self.key, line
        if self.key_separator is not None:
            before, found, value = line.partition(self.key_separator)
            if not found:
                raise LineError(f"there is no {self.key_separator.decode()!r} after a key")
            key = before
        return self._item(number, key, None if value == self.null_marker else value)

    def json(self, number: int, line: bytes) -> Item:
        """A JSON object as `penstock consume --json` prints it, or with less in it."""
        import orjson

        try:
            parsed = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise LineError(f"not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise LineError("not a JSON object")
        key = from_json(parsed["key"]) if "key" in parsed else self.key
        item = self._item(number, key, from_json(parsed.get("value")))
        if "headers" in parsed:
            item = item._replace(headers=_json_headers(parsed["headers"]))
        if self.partition < 0 and parsed.get("partition") is not None:
            item = item._replace(partition=_whole_number(parsed, "partition"))
        if self.timestamp_ms == 0 and parsed.get("timestamp") is not None:
            item = item._replace(timestamp_ms=_json_timestamp(parsed["timestamp"]))
        return item

    def single(self, value: bytes | None) -> Item:
        return self._item(1, self.key, value)

    def _item(self, number: int, key: bytes | None, value: bytes | None) -> Item:
        return Item(number, key, value, [*self.headers], self.partition, self.timestamp_ms)


def from_json(value: Any) -> bytes | None:
    """Bytes for a JSON value: text as it is, `{"base64": ...}` decoded, anything else as JSON."""
    import orjson

    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and set(value) == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except binascii.Error as error:
            raise LineError(f"not base64: {error}") from None
    return orjson.dumps(value)


def _json_headers(headers: Any) -> list[tuple[str, str | bytes | None]]:
    if isinstance(headers, dict):
        return [(name, from_json(value)) for name, value in headers.items()]
    try:
        return [(str(header["name"]), from_json(header.get("value"))) for header in headers]
    except (TypeError, KeyError, AttributeError):
        raise LineError('headers are {"name": "value"} or [{"name": ..., "value": ...}]') from None


def _whole_number(parsed: dict[str, Any], name: str) -> int:
    value = parsed[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise LineError(f"{name} is not a number of a {name}")
    return value


def _json_timestamp(value: Any) -> int:
    time_ms = parse_time_ms(str(value), int(time.time() * 1000))
    if time_ms is None:
        raise LineError(f"timestamp {value!r} is not a time")
    return time_ms


@dataclass(slots=True)
class Outcome:
    """What became of the records."""

    sent: int = 0
    sent_bytes: int = 0
    failed: int = 0
    interrupted: bool = False
    # Handed over, and given up before the broker had acknowledged them.
    abandoned: int = 0
    last: tuple[int, int] | None = None
    reasons: list[str] = field(default_factory=list)
    advice: str = ""

    def delivered(self, message: Message, size: int) -> None:
        self.sent += 1
        self.sent_bytes += size
        offset = message.offset()
        partition = message.partition()
        # Without acknowledgements nobody knows the offset.
        if offset is not None and offset >= 0 and partition is not None:
            self.last = (partition, offset)

    def refused(self, line: int, reason: str, advice: str = "") -> None:
        self.failed += 1
        self.advice = self.advice or advice
        if len(self.reasons) < SHOWN_FAILURES:
            self.reasons.append(f"line {line}: {reason}")


class Sender:
    """Hands records to librdkafka and takes in what became of them.

    `why_stalled` is asked once, when nothing has been acknowledged for a while.
    """

    def __init__(self, producer: Producer, topic: str, why_stalled: Callable[[], str]) -> None:
        self._producer = producer
        self._topic = topic
        self._why_stalled = why_stalled
        self._waiting = 0
        self._moved_at = time.monotonic()
        self._giving_up = False
        self.told_stalled = False
        self.outcome = Outcome()

    def send(self, item: Item) -> None:
        size = len(item.key or b"") + len(item.value or b"")

        def done(error: KafkaError | None, message: Message) -> None:
            self._waiting -= 1
            self._moved_at = time.monotonic()
            if error is None:
                self.outcome.delivered(message, size)
            elif self._giving_up:
                self.outcome.abandoned += 1
            else:
                ours = broker_error(error)
                self.outcome.refused(item.line, str(ours), ours.advice)

        if not self._waiting:
            self._moved_at = time.monotonic()
        self._produce(item, done)
        self._producer.poll(0)
        self._watch()

    def _watch(self) -> None:
        """Say so if nothing moves."""
        if self.told_stalled or not self._waiting:
            return
        if time.monotonic() - self._moved_at >= STALLED_AFTER_S:
            self.told_stalled = True
            output.warn(self._why_stalled())

    def _produce(self, item: Item, done: Callable[[KafkaError | None, Message], None]) -> None:
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + DELIVERY_TIMEOUT_S
        while True:
            try:
                self._producer.produce(
                    self._topic,
                    value=item.value,
                    key=item.key,
                    partition=item.partition,
                    on_delivery=done,
                    timestamp=item.timestamp_ms,
                    headers=item.headers,
                )
                self._waiting += 1
                return
            except BufferError:
                # The queue is full: wait for records to leave it.
                if time.monotonic() > deadline:
                    self.outcome.refused(item.line, "the broker takes no more records")
                    return
                self._producer.poll(_LOOK_S)
                self._watch()
            except KafkaException as error:
                ours = broker_error(error.args[0])
                self.outcome.refused(item.line, str(ours), ours.advice)
                return

    def finish(self) -> None:
        """Wait until every record is sent or given up."""
        deadline = time.monotonic() + DELIVERY_TIMEOUT_S + 5
        while (left := self._producer.flush(_LOOK_S)) and time.monotonic() < deadline:
            self._watch()
        if left:
            self.outcome.failed += left
            self.outcome.reasons.append(f"{left} records were neither sent nor refused in time")

    def give_up(self) -> None:
        """Wait no longer for what has not been acknowledged."""
        self._giving_up = True
        self._producer.purge()
        # Counted apart: meanwhile `done` counts those that it is told of.
        left = self._producer.flush(_GIVE_UP_S)
        self.outcome.abandoned += left


TopicArgument = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="Where to.", autocompletion=complete_topics),
]
ValueOption = Annotated[
    list[str],
    typer.Option(
        "--value", "-v", metavar="TEXT", help="Send this instead of reading input. May be repeated."
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="PATH",
        exists=True,
        dir_okay=False,
        readable=True,
        help="Read this file instead of the standard input.",
    ),
]
WholeOption = Annotated[
    bool, typer.Option("--whole", help="The input is one record, not one a line.")
]
JsonLinesOption = Annotated[
    bool,
    typer.Option(
        "--json-lines",
        help="Each line is a JSON object with value and, if wanted, "
        "key, headers, timestamp and partition.",
    ),
]
KeyOption = Annotated[
    str | None, typer.Option("--key", "-k", metavar="TEXT", help="The key of every record.")
]
KeySeparatorOption = Annotated[
    str | None,
    typer.Option(
        "--key-separator",
        "-K",
        metavar="TEXT",
        help="Each line is a key, this separator and a value. \\t is a tab.",
    ),
]
NullOption = Annotated[
    bool,
    typer.Option("--null", help="Send one record without a value: with --key a tombstone."),
]
NullMarkerOption = Annotated[
    str | None,
    typer.Option(
        "--null-marker", metavar="TEXT", help="A value that is this text is sent as null."
    ),
]
HeaderOption = Annotated[
    list[str],
    typer.Option(
        "--header", "-H", metavar="NAME=VALUE", help="A header of every record. May be repeated."
    ),
]
PartitionOption = Annotated[
    int | None,
    typer.Option(
        "--partition",
        "-p",
        min=0,
        metavar="N",
        help="The partition; without it the key decides, or chance.",
    ),
]
TimestampOption = Annotated[
    str | None,
    typer.Option(
        "--timestamp",
        "-t",
        metavar="TIME",
        help="The time of every record: ISO, "
        "milliseconds since 1970, or such as '10m ago'. Otherwise now.",
    ),
]
CompressionOption = Annotated[
    Compression, typer.Option("--compression", "-z", help="How batches are compressed.")
]
AcksOption = Annotated[
    Acks,
    typer.Option(
        "--acks",
        help="What counts as sent: all (as safe as the topic's durability "
        "promises), 1 (written), 0 (not waited for).",
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing if all went well.")]


def produce(
    topic: TopicArgument,
    value: ValueOption = [],  # noqa: B006
    file: FileOption = None,
    whole: WholeOption = False,
    json_lines: JsonLinesOption = False,
    key: KeyOption = None,
    key_separator: KeySeparatorOption = None,
    null: NullOption = False,
    null_marker: NullMarkerOption = None,
    header: HeaderOption = [],  # noqa: B006
    partition: PartitionOption = None,
    timestamp: TimestampOption = None,
    compression: CompressionOption = Compression.NONE,
    acks: AcksOption = Acks.ALL,
    quiet: QuietOption = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Write records to a topic, one a line from the standard input.

    Records with the same key go to the same partition, where they keep their order. With
    --acks all, the default, a retry never writes a record twice. When a record fails, its line
    is named, the others are still sent, and the command ends with status 1.

    \b
    Examples:
      echo hello | penstock produce greetings
      penstock produce orders --key 42 --value '{"total": 9.5}' --header source=shop
      penstock produce users --key-separator : < users.txt
      penstock produce users --key 42 --null
      penstock consume orders --json | penstock produce copy --json-lines
    """
    reading = _reading(key, key_separator, null_marker, header, partition, timestamp)
    _check_sources(value=bool(value), null=null, file=file, json_lines=json_lines, whole=whole,
                   key=key, key_separator=key_separator)  # fmt: skip
    connection = connect(bootstrap, client)
    producer = _open(connection, compression, acks)
    sender = Sender(producer, topic, partial(_why_stalled, connection, topic))
    started = time.monotonic()
    try:
        if null:
            sender.send(reading.single(None))
        elif value:
            for number, text in enumerate(value, 1):
                _send_line(sender, number, text.encode(), reading.plain)
        else:
            _send_input(sender, file, reading, json_lines=json_lines, whole=whole)
    except KeyboardInterrupt:
        sender.outcome.interrupted = True
    try:
        # Who ends the input wants what was typed to be sent, but not to wait for a full topic.
        if sender.outcome.interrupted and sender.told_stalled:
            sender.give_up()
        else:
            sender.finish()
    except KeyboardInterrupt:
        sender.outcome.interrupted = True
        sender.give_up()
    _tell(sender.outcome, topic, time.monotonic() - started, quiet=quiet)


def _reading(
    key: str | None,
    key_separator: str | None,
    null_marker: str | None,
    header: list[str],
    partition: int | None,
    timestamp: str | None,
) -> Reading:
    separator = None if key_separator is None else key_separator.replace("\\t", "\t").encode()
    if separator == b"":
        raise typer.BadParameter("--key-separator is empty")
    now_ms = int(time.time() * 1000)
    return Reading(
        key=None if key is None else key.encode(),
        key_separator=separator,
        null_marker=None if null_marker is None else null_marker.encode(),
        headers=parse_headers(header),
        partition=-1 if partition is None else partition,
        # librdkafka takes 0 as now.
        timestamp_ms=0 if timestamp is None else parse_timestamp(timestamp, now_ms),
    )


def _check_sources(
    *,
    value: bool,
    null: bool,
    file: Path | None,
    json_lines: bool,
    whole: bool,
    key: str | None,
    key_separator: str | None,
) -> None:
    if value + null + (file is not None) > 1:
        raise typer.BadParameter("--value, --null and --file exclude each other")
    if (value or null) and (json_lines or whole):
        raise typer.BadParameter("--json-lines and --whole are about input: a file or a pipe")
    if json_lines and (whole or key_separator is not None):
        raise typer.BadParameter("--json-lines excludes --whole and --key-separator")
    if key is not None and key_separator is not None:
        raise typer.BadParameter("--key and --key-separator exclude each other")


def _open(connection: Connection, compression: Compression, acks: Acks) -> Producer:
    return connection.producer({
        "acks": acks.value,
        "compression.type": compression.value,
        # Retries neither repeat nor reorder; only possible when every write is acknowledged.
        "enable.idempotence": acks is Acks.ALL,
        "message.timeout.ms": DELIVERY_TIMEOUT_S * 1000,
        "linger.ms": 5,
    })  # fmt: skip


def _why_stalled(connection: Connection, topic: str) -> str:
    """What may be the reason that nothing is acknowledged."""
    from confluent_kafka.admin import ConfigResource, ResourceType

    told = f"nothing was acknowledged for {STALLED_AFTER_S:.0f} s"
    try:
        with translated():
            resource = ConfigResource(ResourceType.TOPIC, topic)
            asked = connection.admin().describe_configs([resource], request_timeout=_GIVE_UP_S)
        settings = result_of(next(iter(asked.values())), "")
    except PenstockError:
        return f"{told}, and the broker does not answer; still trying"
    values = {name: str(settings[name].value) for name in OVERFLOW if name in settings}
    overflow, groups = (values.get(name, "") for name in OVERFLOW)
    if overflow not in ("block", "reject"):
        return f"{told}; still trying"
    return (
        f"{told}: {topic} may be full. With overflow={overflow} it takes nothing until "
        f"the slowest of {groups} has read on (`penstock groups describe`, for a queue `penstock "
        "queue inspect`); still trying"
    )


def _send_input(
    sender: Sender, file: Path | None, reading: Reading, *, json_lines: bool, whole: bool
) -> None:
    stream: BinaryIO = sys.stdin.buffer if file is None else file.open("rb")
    try:
        if file is None and sys.stdin.isatty():
            output.say("one record a line; end with Ctrl-D")
        if whole:
            _send_line(sender, 1, stream.read(), reading.plain)
            return
        make = reading.json if json_lines else reading.plain
        for number, line in _lines(stream):
            if line or not json_lines:
                _send_line(sender, number, line, make)
    finally:
        if file is not None:
            stream.close()


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines without their ends, numbered from 1."""
    for number, line in enumerate(stream, 1):
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _send_line(
    sender: Sender, number: int, line: bytes, make: Callable[[int, bytes], Item]
) -> None:
    try:
        item = make(number, line)
    except LineError as error:
        sender.outcome.refused(number, str(error))
    else:
        sender.send(item)


def _tell(outcome: Outcome, topic: str, took_s: float, *, quiet: bool) -> None:
    for reason in outcome.reasons:
        output.say(reason)
    hidden = outcome.failed - len(outcome.reasons)
    if hidden > 0 and len(outcome.reasons) >= SHOWN_FAILURES:
        output.say(f"and {hidden:,} more")
    if not quiet or outcome.failed or outcome.interrupted:
        output.say(_summary(outcome, topic, took_s))
    if outcome.abandoned:
        output.say(
            f"gave up {output.count(outcome.abandoned, 'record')} that nobody had acknowledged; "
            "some may be written all the same"
        )
    if outcome.failed:
        raise LineError(
            f"{output.count(outcome.failed, 'record')} could not be sent", advice=outcome.advice
        )
    if outcome.interrupted:
        raise typer.Exit(output.EXIT_INTERRUPTED)


def _summary(outcome: Outcome, topic: str, took_s: float) -> str:
    if outcome.sent == 1 and outcome.last is not None:
        partition, offset = outcome.last
        return f"sent 1 record to {topic}, partition {partition}, offset {offset}"
    return (
        f"sent {output.count(outcome.sent, 'record')} "
        f"({show_bytes(outcome.sent_bytes)}) to {topic} in {took_s:.2f} s"
    )
