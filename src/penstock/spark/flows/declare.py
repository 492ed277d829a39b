"""What a user declares flows with: `stream`, `table`, `topic` and the decorator `flow`.

Only descriptions are made here, nothing is read and Spark is not started, so that a flow can be
listed, described and tested as the plain function that it stays: calling a flow calls the function.

**Streams and tables.** A `stream` is a topic read record by record as it grows. A `table` is a
changelog topic seen as what it says now: the last record of each key, keys with a tombstone left
out. A flow gets the streams as streaming DataFrames and the tables as ordinary ones.

**What a table means.** Each micro-batch sees the table as it stood in the log at some moment
between the end of the micro-batch before and the start of this one. A record that is read before
its row arrives in the table is joined with what is there then, and a replay joins with the table
as it is at the time of the replay. So a table is right for what changes rarely or where the newest
is wanted. It is read whole and kept in Spark's memory, and bounded by `max_rows`.

**Outputs.** `topic` writes to the log. Any other kind has only to look like `Output`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    Protocol,
    Self,
    cast,
    get_args,
    runtime_checkable,
)

from penstock.spark.flows.checks import (
    check_limit,
    check_names,
    check_parameters,
    check_texts,
    check_topic,
    is_whole,
    source_options,
)
from penstock.spark.flows.dead_letters import DEFAULT_SHARE, DeadLetterLimit
from penstock.spark.flows.durations import microseconds
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.flows.versions import physical
from penstock.spark.places import caller, place
from penstock.spark.reading.decoding import SHAPES, TimeRules
from penstock.spark.reading.json_records import UNITS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# "published" is "debezium" with the schema that a capture has published, or "raw" where none has.
Format = Literal["raw", "text", "json", "avro", "debezium", "changelog", "published"]
# What a flow does when a captured table that it reads is altered: see `stream`.
OnSchemaChange = Literal["stop", "follow", "ignore"]
Mode = Literal["append", "update", "complete"]
Body = Callable[..., Any]

DEFAULT_MAX_ROWS: Final = 5_000_000
DEFAULT_SHARDS: Final = 4
DEFAULT_MAX_FUTURE: Final = "1 hour"
MOST_SHARDS: Final = 4096
DEAD_SUFFIX: Final = ".dead"
LATE_SUFFIX: Final = ".late"
LEAST_IDLE_US: Final = 1_000_000
MAX_NAME: Final = 100
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_START: Final = ("earliest", "latest")
# What `every` may be: Spark's interval of a trigger.
_EVERY: Final = re.compile(r"\d+ (milli)?(second|minute|hour)s?")


# ---- inputs ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """How the values of a topic become columns."""

    format: Format = "raw"
    # A schema for JSON as Spark writes it, or an Avro schema as JSON.
    schema: str = ""
    # Of change events what is published of their tables: see `reading.decoding.Typing`.
    published: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def describe(self) -> str:
        return f"{self.format} {self.schema}".strip()


@dataclass(frozen=True, slots=True)
class Stream:
    """A topic as a stream."""

    topic: str
    reading: Reading
    start: str = "earliest"
    dead_letters: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    # The field that is its event time, and by how much a record may be behind another before it.
    time: str | None = None
    lateness_us: int = 0
    # Where records go that are later than that; None counts and drops them.
    late: str | None = None
    # After how long without a record a partition gets a heartbeat.
    idle_us: int | None = None
    # What numbers count that are times.
    time_unit: str | None = None
    # How far its event time may be after the time at which a record was written.
    max_future_us: int | None = None
    # Whether somebody has said how far.
    is_max_future_given: bool = False
    # A condition in SQL: what it is not true for is left out.
    where: str | None = None
    # The topic for dead letters, if the columns turn out to be published.
    letters_if_typed: str | None = None
    on_schema_change: OnSchemaChange = "stop"
    # The file and line that declare it.
    callsite: str = field(default="", compare=False)

    @property
    def time_rules(self) -> TimeRules:
        return TimeRules(self.time_unit, self.max_future_us, self.where)

    @property
    def is_typed(self) -> bool:
        return self.reading.format not in {"raw", "text", "published"}


@dataclass(frozen=True, slots=True)
class Table:
    """A changelog topic as the table that it is the history of."""

    topic: str
    reading: Reading
    key: str | None = None
    max_rows: int = DEFAULT_MAX_ROWS
    options: Mapping[str, str] = field(default_factory=dict)
    on_schema_change: OnSchemaChange = "stop"
    callsite: str = field(default="", compare=False)


Input = Stream | Table


def stream(
    topic: str,
    *,
    json: str | None = None,
    avro: str | None = None,
    debezium: str | None = None,
    changelog: str | None = None,
    text: bool = False,
    raw: bool = False,
    start: str = "earliest",
    dead_letters: str | None = "",
    time: str | None = None,
    lateness: str = "0 seconds",
    late: str | None = "",
    idle: str | None = None,
    time_unit: str | None = None,
    max_future: str | None = "",
    where: str | None = None,
    on_schema_change: OnSchemaChange = "stop",
    options: Mapping[str, str] | None = None,
) -> Stream:
    """A topic, read record by record.

    With `json` (a schema such as "user string, at timestamp") or `avro` (a schema as JSON) each
    value becomes columns, beside `_key`, `_topic`, `_partition`, `_offset` and `_timestamp`;
    records that do not fit go to the topic `dead_letters` (TOPIC.dead), with their position and the
    reason. `None` stops the flow at the first. With `text` the key and the value are strings.

    With none of these a captured table has the columns and types that it has in its database, as
    capture has published them: `_before` and `_after`, structs of a row, `_op`, and `_changed`,
    when it was changed in the database. Tombstones are left out. Of any other topic the columns are
    those of Spark's own Kafka source; `raw` asks for these of a captured table, too. `debezium`
    (the schema of a row) is for columns and types of your choice, and for change events of other
    origin; `changelog` for topics that hold the row itself as JSON and a null for its deletion:
    `_before` is always null, `_op` is "u" or "d".

    `time` names the field that says when something happened, "at" or "order.placed", or
    "_timestamp" for the record's own. It becomes the column `_time`. `lateness` is how far a record
    may be behind the latest before it *in the same partition of the log*; one that is further
    behind is late. It goes, as it was read, to the topic `late` (TOPIC.late), with headers that say
    where it stood and why it is late; `None` drops it. Either way it is counted. Because the place
    in the log decides, every replay finds the same records late.
    A partition that gets no records holds windows open. With `idle`, such as "30 seconds", one
    without news for so long gets a heartbeat, a record that only says that time has passed.

    `max_future` is how far an event time may be after the time at which its record was written: an
    hour; None for any time. What is further ahead, or in no year from 1 to 9999, is a dead letter.
    `time_unit` says what numbers count that are times, "s" (the default), "ms", "us" or "ns": those
    in columns of the type timestamp, and an event time that is a whole number. `where` is a
    condition in SQL over the columns, such as "kind = 'order'": records for which it is not true
    are left out before their time is looked at.

    `on_schema_change`: when a captured table is altered, "stop" stops the flow at the first event
    in which a column that it reads is gone or has another type; "follow" also starts it again for
    new columns if it has no schema of its own; "ignore" goes on, with null for what is gone.
    `start` is where a new flow begins: "earliest" or "latest". `options` go to the source, such as
    {"maxOffsetsPerTrigger": "100000"}; a flow with operators reads at most two million records of
    a stream at once, unless this says otherwise.
    """
    check_topic(topic)
    schemas = {"json": json, "avro": avro, "debezium": debezium, "changelog": changelog}
    check_texts(f"stream {topic!r}", **schemas, time=time, where=where, time_unit=time_unit)
    _check_start(topic, start)
    reading = _reading(topic, **schemas, text=text, raw=raw)
    has_columns = reading.format not in {"raw", "text"}
    letters = _aside(topic, dead_letters, DEAD_SUFFIX) if has_columns else None
    is_open = reading.format == "published"
    _check_time_unit(topic, reading, time_unit)
    _check_where(topic, reading, where)
    declared = Stream(
        topic,
        reading,
        start,
        None if is_open else letters,
        source_options(topic, options),
        time_unit=time_unit,
        where=where,
        letters_if_typed=letters if is_open else None,
        on_schema_change=_policy(topic, on_schema_change),
        callsite=caller(),
    )
    if time is None:
        if idle is not None or late or lateness != "0 seconds" or max_future:
            raise DeclarationError(
                f"stream {topic!r}: lateness, late, idle and max_future need an event time",
                advice='Name the field that it is in, as in time="at".',
            )
        return declared
    return _timed(declared, time, lateness, late, idle, max_future)


def _check_start(topic: str, start: str) -> None:
    if start not in _START:
        raise DeclarationError(
            f"stream {topic!r}: start={start!r} is not known", advice=f"Use {' or '.join(_START)}."
        )


def _policy(topic: str, given: OnSchemaChange) -> OnSchemaChange:
    if given not in get_args(OnSchemaChange):
        raise DeclarationError(
            f"{topic!r}: on_schema_change={given!r} is not known",
            advice=f"Use {', '.join(get_args(OnSchemaChange))}.",
        )
    return given


def _timed(
    declared: Stream,
    time: str,
    lateness: str,
    late: str | None,
    idle: str | None,
    max_future: str | None,
) -> Stream:
    """The stream with an event time."""
    topic = declared.topic
    if declared.reading.format in {"raw", "text"}:
        raise DeclarationError(
            f"stream {topic!r}: an event time needs columns",
            advice='Give a schema, as in json="user string, at timestamp".',
        )
    idle_us = future_us = None
    if max_future is not None:
        said = DEFAULT_MAX_FUTURE if max_future == "" else max_future
        future_us = microseconds(said, f"stream {topic!r}: max_future")
    if idle is not None:
        idle_us = microseconds(idle, f"stream {topic!r}: idle")
        if idle_us < LEAST_IDLE_US:
            raise DeclarationError(f"stream {topic!r}: idle must be at least 1 second")
    return replace(
        declared,
        time=time,
        lateness_us=microseconds(lateness, f"stream {topic!r}: lateness"),
        late=_aside(topic, late, LATE_SUFFIX),
        idle_us=idle_us,
        max_future_us=future_us,
        is_max_future_given=max_future != "",
    )


def _check_where(topic: str, reading: Reading, where: str | None) -> None:
    if where is None:
        return
    if not str(where).strip():
        raise DeclarationError(
            f"stream {topic!r}: where={where!r} is no condition",
            advice="Write one in SQL, as in where=\"kind = 'order'\".",
        )
    if reading.format in {"raw", "text"}:
        raise DeclarationError(
            f"stream {topic!r}: where needs columns",
            advice='Give a schema, as in json="kind string, at timestamp", or filter in the flow.',
        )


def _check_time_unit(topic: str, reading: Reading, unit: str | None) -> None:
    if unit is None:
        return
    if unit not in UNITS:
        raise DeclarationError(
            f"stream {topic!r}: time_unit={unit!r} is not known",
            advice=f"Use one of {', '.join(UNITS)}.",
        )
    if reading.format not in SHAPES:
        raise DeclarationError(
            f"stream {topic!r}: time_unit is for times in JSON",
            advice="Avro's schema tells what its times count; raw and text have no times.",
        )


def _aside(topic: str, given: str | None, suffix: str) -> str | None:
    """The topic for what goes aside: as given, or the default for an empty text; None for none."""
    if given is None:
        return None
    name = given or f"{topic}{suffix}"
    check_topic(name)
    return name


def table(
    topic: str,
    *,
    json: str | None = None,
    avro: str | None = None,
    debezium: str | None = None,
    key: str | None = None,
    max_rows: int = DEFAULT_MAX_ROWS,
    on_schema_change: OnSchemaChange = "stop",
    options: Mapping[str, str] | None = None,
) -> Table:
    """A changelog topic, as the last record of each key.

    `json` or `avro` is the schema of the values. Without one a captured table has the columns that
    capture has published; `debezium` is the schema of a row in change events, of which a deletion
    counts as a tombstone. With `key` the
    record's key, as text, is a column of this name; with `debezium` a key of one column is the
    value of that column, one of several is JSON. See the module for what a table means in a flow
    that goes on for ever. `on_schema_change` is that of `stream`.
    """
    check_topic(topic)
    check_texts(f"table {topic!r}", json=json, avro=avro, debezium=debezium, key=key)
    if not is_whole(max_rows) or max_rows < 1:
        raise DeclarationError(f"table {topic!r}: max_rows must be at least 1")
    if debezium is not None and (json is not None or avro is not None):
        raise DeclarationError(f"table {topic!r}: give json, avro or debezium, not several")
    if debezium is not None:
        reading = Reading("debezium", debezium)
    else:
        reading = _reading(topic, json=json, avro=avro)
    return Table(
        topic, reading, key, max_rows, source_options(topic, options, streaming=False),
        _policy(topic, on_schema_change), caller(),
    )  # fmt: skip


def _reading(
    topic: str, *, text: bool = False, raw: bool = False, **schemas: str | None
) -> Reading:
    given = [(name, schema) for name, schema in schemas.items() if schema]
    names = [name for name, _ in given] + (["text"] if text else []) + (["raw"] if raw else [])
    if len(names) > 1:
        raise DeclarationError(f"{topic!r}: give {' or '.join(names)}, not both")
    if given:
        [(name, schema)] = given
        return Reading(cast(Format, name), schema)
    return Reading("text" if text else "raw" if raw else "published")


# ---- outputs -----------------------------------------------------------------------------


class Batch(Protocol):
    """What an output is given to work with in one micro-batch."""

    @property
    def flow(self) -> str: ...

    @property
    def batch_id(self) -> int: ...


@runtime_checkable
class Output(Protocol):
    """Where the rows of a flow go, other than a topic: whatever looks like this.

    `write` is called once per micro-batch, after the topics of the same flow were written, and
    must take the same batch again without harm: the id of the last one belongs in the same
    transaction as its rows. It gives the number of rows.
    """

    @property
    def target(self) -> str:
        """What is written to, for people and for telling whether the flow has changed."""
        ...

    def write(self, rows: DataFrame, batch: Batch) -> int: ...


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that a flow writes.

    `generation` is the number of times that it was built anew, plus one: see `versions`.
    """

    name: str
    key: tuple[str, ...] = ()
    partitions: int = 0
    compacted: bool = False
    format: Literal["json", "raw"] = "json"
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return f"topic {self.name}"


def topic(
    name: str,
    *,
    key: str | Sequence[str] = (),
    raw: bool = False,
    partitions: int = 0,
    compacted: bool = False,
    settings: Mapping[str, str] | None = None,
) -> Topic:
    """A topic to write to, made if it is not there.

    Each row becomes a record: the value is the row as JSON, the key the column `key` as text, or
    several as JSON. With `raw` the columns `key` and `value`, and `headers` if there are such, are
    written as they are. `partitions`, `compacted` and `settings` count only when the topic is made.
    """
    check_topic(name)
    if not isinstance(key, str | Sequence):
        raise DeclarationError(
            f"topic {name!r}: key={key!r} is no column", advice='Name it, as in key="id".'
        )
    keys = (key,) if isinstance(key, str) else tuple(key)
    if raw and keys:
        raise DeclarationError(
            f"topic {name!r}: with raw=True the column `key` is the key", advice="Leave out key=."
        )
    if not is_whole(partitions) or partitions < 0:
        raise DeclarationError(f"topic {name!r}: partitions must be positive")
    if compacted and not keys and not raw:
        raise DeclarationError(
            f"topic {name!r}: a compacted topic keeps the last record of each key, so it needs one",
            advice='Say which column it is, as in key="id".',
        )
    return Topic(name, keys, partitions, compacted, "raw" if raw else "json",
                 {name: str(value) for name, value in (settings or {}).items()})  # fmt: skip


# ---- flows -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """A declared flow. Calling it calls the function, so that it can be tried on any DataFrame."""

    name: str
    function: Body
    inputs: tuple[Input, ...]
    # By the names that the function gives them; a single output has the name "".
    outputs: Mapping[str, Topic | Output]
    mode: Mode
    every: str | None
    exactly_once: bool
    # Into how many parts state is divided when the flow first runs.
    shards: int
    where: str
    # From when on it is not the records that are wrong.
    dead_letter_limit: DeadLetterLimit
    # What it was made from, if not from Python: the SQL of a view.
    source: str = ""

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    @property
    def streams(self) -> tuple[Stream, ...]:
        return tuple(each for each in self.inputs if isinstance(each, Stream))

    @property
    def tables(self) -> tuple[Table, ...]:
        return tuple(each for each in self.inputs if isinstance(each, Table))

    @property
    def topics(self) -> tuple[Topic, ...]:
        return tuple(each for each in self.outputs.values() if isinstance(each, Topic))

    @property
    def asides(self) -> frozenset[str]:
        """The topics for what is late, or cannot be read."""
        found = {
            each
            for own in self.streams
            for each in (own.late, own.dead_letters, own.letters_if_typed)
        }
        return frozenset(each for each in found if each is not None)

    @property
    def dead_letter_topics(self) -> frozenset[str]:
        """The topics for what cannot be read: of a stream that follows the table's schema, too,
        which is not known before the flow starts."""
        found = (each.dead_letters or each.letters_if_typed for each in self.streams)
        return frozenset(filter(None, found))

    def of_generation(self, generation: int) -> Flow:
        """The same, with the topics for what goes aside named as those of a generation.

        A replay finds the same records again. Beside those of before they would count twice.
        """

        def own(each: Input) -> Input:
            if not isinstance(each, Stream):
                return each
            late, letters, if_typed = (
                None if name is None else physical(name, generation)
                for name in (each.late, each.dead_letters, each.letters_if_typed)
            )
            return replace(each, late=late, dead_letters=letters, letters_if_typed=if_typed)

        return replace(self, inputs=tuple(map(own, self.inputs)))


_declared: ContextVar[list[Flow] | None] = ContextVar("_declared", default=None)


@contextmanager
def collecting() -> Iterator[list[Flow]]:
    """All flows that are declared inside, those with the same name too."""
    found: list[Flow] = []
    token = _declared.set(found)
    try:
        yield found
    finally:
        _declared.reset(token)


class _Decorator(Protocol):
    def __call__(self, function: Body, /) -> Flow: ...


def flow(
    *,
    inputs: Sequence[Input] | Input,
    output: Topic | Output | None = None,
    outputs: Mapping[str, Topic | Output] | None = None,
    name: str | None = None,
    mode: Mode = "append",
    every: str | None = None,
    exactly_once: bool = True,
    shards: int = DEFAULT_SHARDS,
    max_dead_share: float = DEFAULT_SHARE,
    max_dead_letters: int | None = None,
) -> _Decorator:
    """Declare that a function turns inputs into outputs.

    The function gets a DataFrame for each of `inputs`, in their order, and gives the DataFrame to
    write to `output`; with `outputs` it gives a dict of them by the same names. What it returns
    several of is read once: a function without aggregations or joins of streams is run on each
    micro-batch, whose rows are kept until all outputs are written, in one transaction.

    `every`, such as "10 seconds", is the least time between micro-batches; without it the next
    begins when one ends and there is something to do. `mode` is Spark's output mode, for
    aggregations: "append" writes final results, "update" each change. `exactly_once=False` is
    faster, and after a failure may write records a second time.

    A function that uses Penstock's windows, joins, views or patterns is run on each micro-batch
    too, over any number of streams. What they keep is divided by key into `shards`, each of which
    is one task: as many as there are cores is a good number. It counts when the flow first runs;
    later `penstock flows rescale` changes it.

    If more than `max_dead_share` of the last thousand records are dead letters it is not the
    records that are wrong, and the flow stops with the reason of the first; with 1 it never does.
    `max_dead_letters` stops it at more than so many in one micro-batch, whatever their share. What
    stopped it was not written, and is read again when the schema was mended.
    """
    many: dict[str, Topic | Output] = dict(outputs) if outputs is not None else {}
    if (output is None) == (outputs is None) or (outputs is not None and not many):
        raise DeclarationError("a flow has either output= or outputs={name: ...}")
    if output is not None:
        many = {"": output}
    takes = (inputs,) if isinstance(inputs, Stream | Table) else tuple(inputs)

    def declare(function: Body) -> Flow:
        code = inspect.unwrap(function).__code__
        made = Flow(
            name=name or function.__name__,
            function=function,
            inputs=takes,
            outputs=many,
            mode=mode,
            every=every,
            exactly_once=exactly_once,
            shards=shards,
            where=place(code.co_filename, code.co_firstlineno),
            dead_letter_limit=DeadLetterLimit(max_dead_share, max_dead_letters),
        )
        _check(made)
        found = _declared.get()
        if found is not None:
            found.append(made)
        return made

    return declare


def _check(made: Flow) -> None:
    place = f"{Path(made.where).name}: flow {made.name!r}"
    check_texts(place, name=made.name)
    if not _NAME.fullmatch(made.name) or len(made.name) > MAX_NAME:
        raise DeclarationError(
            f"{place}: not a name for a flow",
            advice=f"Use up to {MAX_NAME} letters, digits, dots, dashes and underscores.",
        )
    for each in made.inputs:
        if not isinstance(each, Stream | Table):
            raise DeclarationError(
                f"{place}: input {each!r} is neither stream(...) nor table(...)",
                advice="A table that is static can be read inside the function with spark.read.",
            )
    if not made.streams:
        raise DeclarationError(
            f"{place} reads no stream", advice="At least one input must be stream(...)."
        )
    for output in made.outputs.values():
        if not isinstance(output, Output | Topic):
            raise DeclarationError(f"{place}: {output!r} is no output, such as topic(...)")
    if made.mode not in {"append", "update", "complete"}:
        raise DeclarationError(f"{place}: mode={made.mode!r} is none of append, update, complete")
    if made.every is not None and not _EVERY.fullmatch(str(made.every)):
        raise DeclarationError(
            f"{place}: every={made.every!r} is no length of time",
            advice='Write a number and a unit, as in every="10 seconds".',
        )
    if not is_whole(made.shards) or not 1 <= made.shards <= MOST_SHARDS:
        raise DeclarationError(f"{place}: shards={made.shards} is not from 1 to {MOST_SHARDS}")
    check_limit(made.dead_letter_limit, place)
    check_names(made, place)
    check_parameters(made, place)


class Collected(tuple[Flow, ...]):
    """Flows by name, in the order in which they were declared."""

    __slots__ = ()

    @classmethod
    def of(cls, flows: Sequence[Flow]) -> Self:
        """The flows; DeclarationError if two have the same name or write the same topic."""
        by_name: dict[str, Flow] = {}
        writers: dict[str, Flow] = {}
        for each in flows:
            other = by_name.setdefault(each.name, each)
            if other is not each:
                raise DeclarationError(
                    f"two flows are named {each.name!r}: at {other.where} and at {each.where}",
                    advice='Give one another name, with @flow(name="...").',
                )
            for target in each.topics:
                writer = writers.setdefault(target.name, each)
                if writer is not each:
                    raise DeclarationError(
                        f"flows {writer.name!r} and {each.name!r} both write topic "
                        f"{target.name!r}: at {writer.where} and at {each.where}",
                        advice="Give each its own topic, or unite them in one flow.",
                    )
        return cls(by_name.values())

    def writer(self, topic: str) -> Flow | None:
        """The flow that writes a topic; of one for what goes aside only if no other does."""
        for each in self:
            if any(own.name == topic for own in each.topics):
                return each
        found = [each for each in self if topic in each.asides]
        return found[0] if len(found) == 1 else None

    def named(self, name: str) -> Flow | None:
        return next((each for each in self if each.name == name), None)
