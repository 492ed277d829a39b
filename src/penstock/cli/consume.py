"""`penstock consume`: read a topic from anywhere, once or for as long as it goes on.

Partitions are assigned, not subscribed: no group is joined, nothing is committed, so reading
leaves no trace on the broker. Without --follow the end is where each partition ended when the
command started, and the command stops there even while others go on writing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import output
from penstock.cli.kafka import (
    DEFAULT_BOOTSTRAP,
    REQUEST_TIMEOUT_S,
    Bootstrap,
    BrokerError,
    ClientSettings,
    broker_error,
    complete_topics,
    connect,
    translated,
)
from penstock.cli.values import Start, parse_start, show_time

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

# Taken from the client at a time, and how long to wait for the first of them.
BATCH: Final = 500
WAIT_S: Final = 0.1
# With this much silence before the expected end, something is wrong.
STALL_TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class Plan:
    """Where each partition starts, and where it ends for this command."""

    topic: str
    starts: dict[int, int]
    ends: dict[int, int]
    # Partitions that are read up to their end.
    finished: set[int] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return len(self.finished) == len(self.starts)

    def saw(self, partition: int, next_offset: int) -> None:
        if next_offset >= self.ends[partition]:
            self.finished.add(partition)


def consume(
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="What to read.", autocompletion=complete_topics)
    ],
    start: Annotated[
        str,
        typer.Option("--from", "-f", metavar="WHERE", help="Where to start: beginning, end, an "
                     "offset, -N for the last N records of each partition, or a time: ISO, "
                     "milliseconds since 1970, or such as '10m ago'."),
    ] = "beginning",
    partition: Annotated[
        list[int],
        typer.Option("--partition", "-p", min=0, metavar="N", help="Only this partition. "
                     "May be repeated."),
    ] = [],  # noqa: B006
    maximum: Annotated[
        int | None, typer.Option("--max", "-n", min=1, metavar="N", help="Stop after N records.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-F", help="Go on with new records as they come.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, for programs.")
    ] = False,
    value_only: Annotated[
        bool, typer.Option("--value-only", help="Only the values, byte for byte, one a line.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not say how many records there were.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:  # fmt: skip
    """Read the records of a topic.

    Starts at the beginning and stops at what was the end when the command started, unless told
    otherwise. Joins no group and commits nothing: it can be used beside any consumer. A number
    for --from is an offset, unless it is so large that it must be a time.

    In JSON a record has topic, partition, offset, timestamp, key, value and headers. Bytes that
    are not UTF-8 appear as {"base64": "..."}; `penstock produce --json-lines` reads the same.

    \b
    Examples:
      penstock consume orders
      penstock consume orders --from end --follow
      penstock consume orders --from '10m ago' --json | jq .value
      penstock consume orders --from -5 --partition 0
      penstock consume orders --from 2026-03-01T12:00:00Z --max 100
    """
    if json and value_only:
        raise typer.BadParameter("--json and --value-only exclude each other")
    where = parse_start(start, int(time.time() * 1000))
    show = _show_json if json else _show_value if value_only else _line_printer()
    consumer = connect(bootstrap, client).consumer()
    count, status = 0, 0
    try:
        plan = _plan(consumer, topic, where, sorted(set(partition)))
        for message in _messages(consumer, plan, follow=follow):
            show(message)
            count += 1
            if count == maximum:
                break
        output.flush()
    except KeyboardInterrupt:
        status = output.EXIT_INTERRUPTED
        output.flush()
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        output.silence_stdout()
        raise typer.Exit from None
    finally:
        consumer.close()
    if not quiet:
        output.say(f"{output.count(count, 'record')} of {topic}")
    raise typer.Exit(status)


# ---- where to start and to stop ----------------------------------------------------------


def _plan(consumer: Consumer, topic: str, where: Start, wanted: list[int]) -> Plan:
    from confluent_kafka import TopicPartition

    there = _partitions_of(consumer, topic)
    missing = sorted(set(wanted) - set(there))
    if missing:
        raise BrokerError(
            f"{topic} has no partition {missing[0]}",
            advice=f"It has {len(there)}, numbered from 0.",
        )
    chosen = wanted or there
    bounds: dict[int, tuple[int, int]] = {}
    with translated(f"asking for the offsets of {topic}"):
        for number in chosen:
            bounds[number] = consumer.get_watermark_offsets(
                TopicPartition(topic, number), timeout=REQUEST_TIMEOUT_S
            )
    starts = {number: bounds[number][0] for number in chosen}
    if where.kind == "end":
        starts = {number: bounds[number][1] for number in chosen}
    elif where.kind == "last":
        starts = {number: max(low, high - where.value) for number, (low, high) in bounds.items()}
    elif where.kind == "offset":
        starts = _starts_at(where.value, bounds, topic)
    elif where.kind == "time":
        starts = _starts_by_time(consumer, topic, where.value, bounds)
    plan = Plan(topic, starts, {number: bounds[number][1] for number in chosen})
    for number, offset in starts.items():
        plan.saw(number, offset)
    return plan


def _partitions_of(consumer: Consumer, topic: str) -> list[int]:
    with translated(f"looking for {topic}"):
        found = consumer.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic]
    if found.error is not None:
        raise broker_error(found.error, topic)
    return sorted(found.partitions)


def _starts_at(offset: int, bounds: dict[int, tuple[int, int]], topic: str) -> dict[int, int]:
    """The offset in every partition that has it; a stale one must not pass for an empty topic."""
    if not any(low <= offset <= high for low, high in bounds.values()):
        holds = ", ".join(f"{n} holds {low} to {high - 1}" if high > low else f"{n} is empty"
                          for n, (low, high) in bounds.items())  # fmt: skip
        raise BrokerError(
            f"offset {offset} is not in {topic}: partition {holds}",
            advice="--from beginning starts with the first record that is still there.",
        )
    starts = {}
    for number, (low, high) in bounds.items():
        starts[number] = min(max(offset, low), high)
        if offset < low:
            output.warn(f"partition {number} begins at {low}; reading it from there")
    return starts


def _starts_by_time(
    consumer: Consumer, topic: str, time_ms: int, bounds: dict[int, tuple[int, int]]
) -> dict[int, int]:
    from confluent_kafka import TopicPartition

    wanted = [TopicPartition(topic, number, time_ms) for number in bounds]
    with translated(f"looking for {show_time(time_ms)} in {topic}"):
        found = consumer.offsets_for_times(wanted, timeout=REQUEST_TIMEOUT_S)
    starts = {}
    for at in found:
        if at.error is not None:
            raise broker_error(at.error, f"partition {at.partition}")
        # Negative: no record is that late, so the end.
        starts[at.partition] = at.offset if at.offset >= 0 else bounds[at.partition][1]
    return starts


# ---- reading -----------------------------------------------------------------------------


def _messages(consumer: Consumer, plan: Plan, *, follow: bool) -> Iterator[Message]:
    """Records from the plan's starts on, up to its ends or for ever."""
    from confluent_kafka import TopicPartition

    if not follow and plan.is_done:
        return
    open_partitions = [n for n in plan.starts if follow or n not in plan.finished]
    consumer.assign([TopicPartition(plan.topic, n, plan.starts[n]) for n in open_partitions])
    last_news = time.monotonic()
    while follow or not plan.is_done:
        first = consumer.poll(WAIT_S)
        if first is None:
            output.flush()
            if not follow and time.monotonic() - last_news > STALL_TIMEOUT_S:
                raise BrokerError(
                    f"nothing came for {STALL_TIMEOUT_S:.0f} s, before the end was reached",
                    advice="Is the broker still running?",
                )
            continue
        last_news = time.monotonic()
        for message in (first, *consumer.consume(BATCH, timeout=0)):
            if _is_record(message, plan):
                number, offset = message.partition(), message.offset()
                assert number is not None
                assert offset is not None
                if follow or offset < plan.ends[number]:
                    yield message
                plan.saw(number, offset + 1)
        output.flush()


def _is_record(message: Message, plan: Plan) -> bool:
    """Whether it is one; the client hands out events and errors the same way."""
    from confluent_kafka import KafkaError

    error = message.error()
    if error is None:
        return True
    if error.code() == KafkaError._PARTITION_EOF:
        number, offset = message.partition(), message.offset()
        assert number is not None
        assert offset is not None
        plan.saw(number, offset)
        return False
    if error.retriable() or error.code() in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
        # The client goes on trying by itself.
        return False
    raise broker_error(error, f"reading {plan.topic}")


# ---- showing -----------------------------------------------------------------------------


def _show_json(message: Message) -> None:
    output.write_json(as_json(message))


def as_json(message: Message) -> dict[str, Any]:
    """A record as JSON; `produce --json-lines` reads the same."""
    return {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp": message.timestamp()[1],
        "key": output.json_bytes(_bytes(message.key())),
        "value": output.json_bytes(_bytes(message.value())),
        "headers": [
            {"name": name, "value": output.json_bytes(value)} for name, value in _headers(message)
        ],
    }


def _show_value(message: Message) -> None:
    sys.stdout.buffer.write((_bytes(message.value()) or b"") + b"\n")


def _line_printer() -> Callable[[Message], None]:
    """One line a record for people: where and when, key, value, headers."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if output.is_colourful(sys.stdout) else ("", "")

    def show(message: Message) -> None:
        place = f"{message.partition()}:{message.offset()}"
        key, value = _bytes(message.key()), _bytes(message.value())
        parts = [f"{dim}{place:<8} {show_time(message.timestamp()[1])}{plain}"]
        if key is not None:
            parts.append(f"{output.text_bytes(key)}:")
        parts.append(f"{dim}(null){plain}" if value is None else output.text_bytes(value))
        headers = _headers(message)
        if headers:
            shown = " ".join(f"{n}={output.text_bytes(v)}" for n, v in headers)
            parts.append(f"{dim}[{shown}]{plain}")
        sys.stdout.buffer.write("  ".join(parts).encode() + b"\n")

    return show


def _bytes(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


def _headers(message: Message) -> list[tuple[str, bytes | None]]:
    headers = message.headers() or []
    pairs = headers.items() if isinstance(headers, dict) else headers
    return [(name, _bytes(value)) for name, value in pairs]
