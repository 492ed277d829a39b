"""The inputs of a flow as DataFrames: streams, micro-batches of them, and tables.

What a function sees of a typed stream are the columns of its schema and, beginning with `_`, where
each record stood: `_key`, `_topic`, `_partition`, `_offset`, `_timestamp`. Columns that begin with
`_` are never written to a topic unless it is raw.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Final, cast

import orjson
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.spark import reading, sql
from penstock.spark.flows.declare import Reading, Stream, Table
from penstock.spark.flows.errors import (
    DeclarationError,
    FlowError,
    UnknownTopicError,
    UserCodeError,
)
from penstock.spark.places import told
from penstock.spark.reading import decoding
from penstock.spark.reading.avro_types import parse as parse_avro
from penstock.spark.reading.decoding import TimeRules
from penstock.spark.reading.frame import Tombstones
from penstock.spark.reading.heartbeat_keys import HEARTBEATS
from penstock.spark.reading.json_records import SECONDS, UNITS
from penstock.spark.reasons import reason
from penstock.spark.runtime.micro_batches import Source
from penstock.spark.source import PenstockSource
from penstock.spark.source.options import TYPED, parse
from penstock.spark.state.watching import UnreadError

log = logging.getLogger(__name__)

FORMAT: Final = "penstock"
_SECURITY: Final = ("security.", "sasl.", "ssl.")
_VALUE: Final = decoding.VALUE
TIME: Final = decoding.TIME
STAMP: Final = decoding.STAMP
# Records of a stream in a micro-batch of a flow with operators.
MOST_AT_ONCE: Final = 2_000_000
# By these options several tasks read a partition, each a piece of it.
_CUTTING: Final = frozenset({"minpartitions", "maxrecordsperpartition"})
POSITIONS: Final = {name: f"_{name}" for name in reading.POSITION}


class BadRecordError(FlowError):
    """A record cannot be read, and the flow has no dead-letter topic for it."""

    advice = (
        "Mend the schema of the input; for a stream, say where such records go with "
        'dead_letters="TOPIC".'
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where the log is, and how to get in; `resolve` gives the topic that stands for a name."""

    bootstrap: str
    # As the source takes them: `kafka.` and the client's own name.
    options: Mapping[str, str]
    resolve: Callable[[str], str]

    def cluster(self) -> Cluster:
        plain = {key.removeprefix("kafka."): value for key, value in self.options.items()}
        secret = {key: value for key, value in plain.items() if key.startswith(_SECURITY)}
        if not secret:
            return Cluster(self.bootstrap)
        from penstock.client.security import Security

        return Cluster(self.bootstrap, security=Security.from_options(secret))

    def source(self, topic: str, options: Mapping[str, str]) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self.bootstrap,
            "subscribe": self.resolve(topic),
            "includeHeaders": "true",
            **self.options,
            **options,
        }


def check_topics(place: Place, flow: str, topics: list[str]) -> None:
    """UnknownTopicError if a topic that a flow reads is not there."""
    wanted = [place.resolve(topic) for topic in topics]
    with place.cluster() as cluster:
        there = set(Metadata(cluster).topics(wanted))
    missing = [topic for topic in wanted if topic not in there]
    if missing:
        names = ", ".join(repr(topic) for topic in missing)
        raise UnknownTopicError(
            f"flow {flow!r} reads {'topics' if len(missing) > 1 else 'topic'} {names}, which "
            f"{'do' if len(missing) > 1 else 'does'} not exist at {place.bootstrap}",
            advice=f"It is made when somebody first writes to it, or by `penstock topics create "
            f"{missing[0]}`; `penstock topics list` shows what there is. If it was deleted, what "
            f"the flow had read of it stays counted: `penstock flows reset {flow}` begins anew.",
        )


def check_schema(declared: Stream | Table) -> None:
    """DeclarationError if the schema of an input cannot be read: said with where it stands.

    Only Spark knows the types, so this needs a session.
    """
    how = declared.reading
    try:
        if how.format in decoding.SHAPES:
            found = T.StructType.fromDDL(how.schema)
            empty = not isinstance(found, T.StructType) or not found.fields
        else:
            empty = how.format == "avro" and not parse_avro(how.schema)["fields"]
        if not empty:
            _check_time(declared)
            _check_unit(declared)
            return
        why, advice = "it has no fields", ""
    except PySparkException as error:
        why = reason(error)
        advice = 'A schema is names and types of Spark, such as "user string, at timestamp".'
    except reading.ReadingError as error:
        why, advice = str(error), error.advice
    kind = type(declared).__name__.lower()
    raise DeclarationError(
        told(declared.callsite, f"{kind} {declared.topic!r}, {how.format}={how.schema!r}: {why}"),
        advice=f"{advice} {UserCodeError.advice}".strip(),
    )


def row_of(how: Reading) -> T.StructType:
    """The columns of a row of a captured table."""
    row = T.StructType.fromDDL(how.schema)
    assert isinstance(row, T.StructType)
    return row


def _check_time(declared: Stream | Table) -> None:
    """DeclarationError if the event time of a stream is none of its columns."""
    how, time = declared.reading, getattr(declared, "time", None)
    if time is None or time == decoding.STAMP or how.format not in decoding.SHAPES or "`" in time:
        return
    row = T.StructType.fromDDL(how.schema)
    assert isinstance(row, T.StructType)
    typing = decoding.Typing(cast("decoding.Shape", how.format), row.json(), time)
    if typing.has_field(time):
        if how.published is not None and not typing.has_instant(time):
            raise DeclarationError(
                told(declared.callsite, f"stream {declared.topic!r}, time={time!r}: the column of "
                     "the table is no timestamp"),
                advice="Write the schema, with timestamp as the column's type, if its values are "
                f"texts or seconds. {UserCodeError.advice}",
            )  # fmt: skip
        return
    others = cast("T.StructType", typing.frame[decoding.VALUE].dataType).names
    advice = f"Its columns are {', '.join(others)}; {decoding.STAMP} is when a record was written."
    if how.format != "json" and typing.has_field(f"_after.{time}"):
        advice += f" The {time} of a row is _after.{time}, which a deleted row does not have."
    raise DeclarationError(
        told(
            declared.callsite, f"stream {declared.topic!r}, time={time!r}: there is no such column"
        ),
        advice=f"{advice} {UserCodeError.advice}",
    )


def _check_unit(declared: Stream | Table) -> None:
    """DeclarationError if times that are numbers could not be read by their unit.

    Spark's own parser takes them for seconds; it reads what has maps or binary fields.
    """
    if not isinstance(declared, Stream) or declared.time_unit in {None, SECONDS}:
        return
    how = declared.reading
    row = T.StructType.fromDDL(how.schema)
    assert isinstance(row, T.StructType)
    if (
        "timestamp" in row.simpleString()
        and decoding.typing_of(how.format, how.schema, None) is None
    ):
        raise DeclarationError(
            told(
                declared.callsite,
                f"stream {declared.topic!r}: time_unit={declared.time_unit!r} has no effect on the "
                "timestamps of a schema with maps or binary fields",
            ),
            advice="Let the field be a bigint or a double, and name it with time=.",
        )


def partitions_of(place: Place, topic: str) -> int:
    """How many partitions a topic has, by its own name."""
    with place.cluster() as cluster:
        return len(Metadata(cluster).partitions(topic))


def topic_ids(place: Place, declared: Sequence[Stream]) -> tuple[tuple[str, ...], str]:
    """The ids of the topics of streams: a topic that is made again has another one. And that of
    their cluster."""
    with place.cluster() as cluster:
        metadata = Metadata(cluster)
        found = [metadata.topic_id(place.resolve(each.topic)) for each in declared]
        return tuple(str(each) if each.int else "" for each in found), metadata.cluster_id()


# ---- streams -----------------------------------------------------------------------------


def open_stream(
    spark: SparkSession, place: Place, declared: Stream, *, replay: bool, number: int = 0
) -> DataFrame:
    """The records of a stream, typed by the source if it can, as Spark streams them."""
    options = stream_options(place, declared, replay=replay, number=number)
    return spark.readStream.format(FORMAT).options(**options).load()


def stream_options(
    place: Place,
    declared: Stream,
    *,
    replay: bool,
    bounded: bool = False,
    watch: str | None = None,
    number: int = 0,
    packs: bool = False,
) -> dict[str, str]:
    """How a stream is read, as options of the source. A replay begins at the log's start.

    What is `bounded` gives so many at once that a task has room for its share, unless the stream
    says how many: operators take the rows of a shard as a whole. With `watch`, a folder, the
    source tells there how far event time has come: see `is_watchable`. `number` is that of the
    stream in its flow, and whoever `packs` sends its rows by shard.
    """
    start = "earliest" if replay else declared.start
    options = place.source(declared.topic, {"startingOffsets": start, **declared.options})
    said = {each.lower() for each in options}
    if bounded and not said & {"maxoffsetspertrigger", "minoffsetspertrigger"}:
        options["maxOffsetsPerTrigger"] = str(MOST_AT_ONCE)
    typing = _typing(declared)
    if typing is not None:
        typing = replace(typing, watch=watch, number=number, packs=packs)
        options[TYPED] = typing.as_option()
    return options


def source(options: Mapping[str, str], number: int) -> Source:
    """A stream as the driver and its tasks read it without a query of Spark's."""
    schema = PenstockSource(dict(options)).schema()
    if isinstance(schema, str):
        schema = cast("T.StructType", T.StructType.fromDDL(schema))
    return Source(parse(options, streaming=True), schema, number)


def is_watchable(place: Place, declared: Stream) -> bool:
    """Whether the tasks that read a stream can tell its time: each partition is read by one."""
    options = place.source(declared.topic, declared.options)
    if declared.time is None or declared.where or {each.lower() for each in options} & _CUTTING:
        return False
    return _typing(declared) is not None


def is_typed_by_source(declared: Stream) -> bool:
    """Whether the tasks that read a stream also read its values."""
    return _typing(declared) is not None


def _typing(declared: Stream) -> decoding.Typing | None:
    how = declared.reading
    return decoding.typing_of(
        how.format, how.schema, declared.time, how.published, declared.time_rules
    )


def typed(
    records: DataFrame,
    how: Reading,
    *,
    metrics: str,
    time: str | None = None,
    rules: TimeRules = decoding.ANY_TIME,
) -> DataFrame:
    """Records with the parsed value in one column, and what is wrong with it in another.

    With `time`, the path of a field, a column `_time` is its event time, and what has no value is
    kept: heartbeats count for time, and only there. What the source has typed is as it should be,
    but for records that `rules` may leave out: these have no time before that is known.
    """
    if is_typed(records):
        if rules.where is not None:
            return _chosen(records, rules, time)
        # Without an event time, what has no value says nothing.
        said = f"{_VALUE} IS NOT NULL OR {reading.ERROR} IS NOT NULL"
        return records if time else records.where(said)
    if time is None:
        records = without_heartbeats(records)
    keep = time is not None or how.format == "changelog"
    tombstones: Tombstones = "keep" if keep else "drop"
    shaped: Callable[[Column], Column] = _SHAPES.get(how.format, _same)

    def check(value: Column) -> Column:
        reasons = [F.lit(None).cast("string")]
        there = F.col("value").isNotNull()
        if how.format == "debezium":
            no_op = shaped(value)["_op"].isNull()
            reasons.append(F.when(there & no_op, F.lit("the value is no change event: no op")))
        if how.format == "changelog":
            reasons.append(F.when(F.col("key").isNull(), F.lit("the record has no key")))
        if time is not None and time != STAMP and rules.where is None:
            said = _field(shaped(value), time)
            reasons.append(F.when(there, _wrong_time(said, time, rules)))
        return F.coalesce(*reasons)

    later = rules.where is not None and time is not None

    if how.format == "avro":
        rows = reading.avro(
            records,
            how.schema,
            into=_VALUE,
            metrics=metrics,
            tombstones=tombstones,
            check=check,
            keeps_raw=later,
        )
    else:
        schema = T.StructType.fromDDL(how.schema)
        assert isinstance(schema, T.StructType)
        schema = decoding.envelope(schema) if how.format == "debezium" else schema
        rows = reading.json(
            records,
            schema,
            into=_VALUE,
            metrics=metrics,
            tombstones=tombstones,
            check=check,
            keeps_raw=later,
        )
    if how.format in _SHAPES:
        good = F.col(reading.ERROR).isNull() & ~is_heartbeat(F.col("key"), _is_null(rows))
        rows = rows.withColumn(_VALUE, F.when(good, shaped(F.col(_VALUE))))
    if rules.where is not None:
        return _chosen(rows.drop(reading.TOMBSTONE), rules, time)
    if time is not None:
        rows = _with_time(rows, time, rules)
    return rows.drop(reading.TOMBSTONE)


def _with_time(rows: DataFrame, time: str, rules: TimeRules) -> DataFrame:
    """With the event time; that of a heartbeat, which has no value, is when it was written."""
    stamp = F.col("timestamp")
    at = stamp if time == STAMP else _instant(_field(F.col(_VALUE), time), rules)
    silent = F.col(_VALUE).isNull() & F.col(reading.ERROR).isNull()
    beat = is_heartbeat(F.col("key"), silent)
    return rows.withColumn(TIME, F.when(beat, stamp).when(F.col(_VALUE).isNotNull(), at))


def _instant(said: Column, rules: TimeRules) -> Column:
    """The event time that a field says: numbers count units."""
    times, parts = UNITS[rules.unit or SECONDS]
    counted = F.timestamp_micros(_whole(said, times, parts))
    return F.coalesce(F.when(_is_number(said), counted), said.try_cast("timestamp"))


def _is_number(said: Column) -> Column:
    name = F.typeof(said)
    whole = name.isin("tinyint", "smallint", "int", "bigint", "float", "double")
    return whole | name.startswith("decimal")


def _whole(said: Column, times: int, parts: int) -> Column:
    """A number of units as microseconds; null if it has no place among them."""
    # By way of text: dates, say, are no numbers at all, and then this is not asked for.
    wide = said.cast("string").try_cast("decimal(29,9)")
    micros = F.floor(wide * F.lit(times) / F.lit(parts))
    inside = (micros >= F.lit(decoding.FIRST_US)) & (micros <= F.lit(decoding.LAST_US))
    return F.when(inside, micros.try_cast("bigint"))


def _wrong_time(said: Column, time: str, rules: TimeRules) -> Column:
    """Why a field cannot be the event time of its record; null if it can."""
    unit = rules.unit or SECONDS
    missing = F.when(said.isNull(), F.lit(f"the event time {time} is missing or null"))
    times, parts = UNITS[unit]
    whole = F.concat(said.cast("string"), F.lit(f" {unit} since 1970"))
    at = _instant(said, rules)
    beyond = F.when(_is_number(said) & _whole(said, times, parts).isNull(), whole)
    year = F.year(at)
    beyond = beyond.when((year < 1) | (year > 9999), F.concat(F.lit("year "), year))
    out = decoding.out_of_range(time, "%s", rules.unit)
    reasons = [missing, F.when(beyond.isNotNull(), F.format_string(out, beyond))]
    # Of texts and numbers, which Spark makes times of.
    reasons.append(F.when(at.isNull(), F.lit(f"the event time {time} is no time")))
    if rules.max_future_us is not None:
        stamp = F.unix_micros("timestamp")
        ahead = F.unix_micros(at) - stamp
        far = (stamp > 0) & (ahead > rules.max_future_us)
        seconds = F.floor(ahead / decoding.SECOND_US).cast("string")
        text = decoding.future(time, 0, rules.max_future_us).replace(" 0 s after", " %s s after", 1)
        reasons.append(F.when(far, F.format_string(text, seconds)))
    return F.coalesce(*reasons)


def _chosen(rows: DataFrame, rules: TimeRules, time: str | None) -> DataFrame:
    """The rows of a typed frame for which the condition of its stream is true.

    Only of these it is looked whether they have an event time. What could not be read is kept, and
    so are heartbeats.
    """
    assert rules.where is not None
    own = [each for each in rows.columns if each != _VALUE]
    hidden = {name: f"_{name}" for name in reading.POSITION}
    row, keep = "_penstock_row", "_penstock_keep"
    named = [F.col(name).alias(shown) for name, shown in hidden.items()]
    seen = rows.select(F.struct(*rows.columns).alias(row), f"{_VALUE}.*", *named)
    try:
        seen = seen.select(row, F.expr(rules.where).cast("boolean").alias(keep))
    except PySparkException as error:
        raise DeclarationError(
            f"where={rules.where!r} is no condition over the columns of the stream: "
            f"{reason(error)}",
            advice=f"They are those of the schema, and _key, _topic, _partition, _offset and "
            f"_timestamp. {UserCodeError.advice}",
        ) from error
    good = F.col(f"{row}.{reading.ERROR}").isNull() & F.col(f"{row}.{_VALUE}").isNotNull()
    silent = F.col(f"{row}.{reading.ERROR}").isNull() & ~good
    left = ~good if time is not None else ~good & ~silent
    rows = seen.where(left | (good & F.col(keep))).select(f"{row}.*").select(_VALUE, *own)
    if time is None:
        return rows
    if time != STAMP:
        there = F.col(_VALUE).isNotNull()
        wrong = _wrong_time(_field(F.col(_VALUE), time), time, rules)
        rows = rows.withColumn(
            reading.ERROR, F.coalesce(F.col(reading.ERROR), F.when(there, wrong))
        )
        rows = rows.withColumn(_VALUE, F.when(F.col(reading.ERROR).isNull(), F.col(_VALUE)))
    # Heartbeats are told by their lack of a value, so those of the bad ones must not be looked at.
    return _with_time(rows, time, rules)


def is_typed(records: DataFrame) -> bool:
    """Whether the source has typed them."""
    return _VALUE in records.columns


def read_again(
    spark: SparkSession, place: Place, declared: Stream, ends: Mapping[int, tuple[int, int]]
) -> DataFrame:
    """Records of a stream as they are in the log: of each partition the first and last offset."""
    topic = place.resolve(declared.topic)
    starts = {topic: {str(number): first for number, (first, _) in ends.items()}}
    stops = {topic: {str(number): last + 1 for number, (_, last) in ends.items()}}
    options = place.source(declared.topic, {})
    del options["subscribe"]
    options["assign"] = orjson.dumps({topic: sorted(ends)}).decode()
    options["startingOffsets"] = orjson.dumps(starts).decode()
    options["endingOffsets"] = orjson.dumps(stops).decode()
    return spark.read.format(FORMAT).options(**options).load()


def _is_null(rows: DataFrame) -> Column:
    return F.col(reading.TOMBSTONE) if reading.TOMBSTONE in rows.columns else F.lit(False)


def _field(value: Column, path: str) -> Column:
    for name in path.split("."):
        value = value[name]
    return value


def _change(event: Column) -> Column:
    """What a function sees of a change event."""
    inner = event["payload"]
    wrapped = inner["op"].isNotNull()

    def either(name: str) -> Column:
        return F.when(wrapped, inner[name]).otherwise(event[name])

    ms = F.coalesce(either("source")["ts_ms"], either("ts_ms"))
    return F.struct(
        either("before").alias("_before"),
        either("after").alias("_after"),
        either("op").alias("_op"),
        F.timestamp_millis(ms).alias("_changed"),
    )


def _upsert(row: Column) -> Column:
    """The same of a row of a changelog without envelopes: null is a deletion."""
    return F.struct(
        F.when(F.lit(False), row).alias("_before"),
        row.alias("_after"),
        F.when(row.isNull(), F.lit("d")).otherwise(F.lit("u")).alias("_op"),
    )


def _same(value: Column) -> Column:
    return value


_SHAPES: Final[Mapping[str, Callable[[Column], Column]]] = {
    "debezium": _change,
    "changelog": _upsert,
}


def is_heartbeat(key: Column, is_null: Column) -> Column:
    """Whether a record only says that time has passed: see `heartbeats`."""
    is_key = reduce(or_, (key.eqNullSafe(F.lit(each)) for each in HEARTBEATS))
    return is_null & is_key


def without_heartbeats(records: DataFrame) -> DataFrame:
    return records.where(~is_heartbeat(F.col("key"), F.col("value").isNull()))


def has_value() -> Column:
    """Whether a row of a typed frame has one, and does not only say that time has passed."""
    return F.col(_VALUE).isNotNull()


def visible(rows: DataFrame) -> DataFrame:
    """The good rows of a typed frame, as the user's function sees them."""
    taken = {hidden: name for name, hidden in POSITIONS.items()}
    good = f"{reading.ERROR} IS NULL"
    if TIME in rows.columns:
        # What has a time but no value is a heartbeat. The reason is looked at first: see `failing`.
        good, taken = f"{good} AND {_VALUE} IS NOT NULL", {**taken, TIME: TIME}
    return sql.select(rows.where(good), taken, f"{_VALUE}.*")


def guarded(rows: DataFrame) -> DataFrame:
    """The same rows, but who looks at packed ones fails: they were meant for an operator alone."""
    if decoding.PACKED not in rows.columns:
        return rows
    text = f"{UnreadError.__name__}: rows that were packed for an operator are needed elsewhere"
    failure = f"CAST(raise_error('{text}') AS string)"
    told = f"CASE WHEN {decoding.PACKED} IS NOT NULL THEN {failure} ELSE {reading.ERROR} END"
    others = [each for each in rows.columns if each != reading.ERROR]
    return sql.select(rows, {reading.ERROR: told}, *others)


def packed(rows: DataFrame, declared: Stream) -> DataFrame | None:
    """What stands for the good rows of a typed frame where the source packs them; None if never."""
    if decoding.PACKED not in rows.columns:
        return None
    if declared.dead_letters is not None:
        return rows.where(f"{decoding.PACKED} IS NOT NULL")
    # Who looks at the reason of a bad one fails.
    told = failing(rows, "the record at")
    return told.where(f"{decoding.PACKED} IS NOT NULL OR {reading.ERROR} IS NOT NULL")


def as_text(records: DataFrame) -> DataFrame:
    """Key and value as strings."""
    taken = [
        F.col(name).alias(f"_{name}") for name in ("topic", "partition", "offset", "timestamp")
    ]
    key, value = F.col("key").cast("string"), F.col("value").cast("string")
    return records.select(key.alias("key"), value.alias("value"), *taken)


def failing(rows: DataFrame, what: str) -> DataFrame:
    """The same rows, but whoever asks which are good fails at the first that is not.

    The reason itself fails when it is looked at: Spark would be free to look at another condition
    first.
    """
    told = F.concat(
        F.lit(f"{BadRecordError.__module__}.BadRecordError: {what} "),
        F.concat_ws("-", "topic", "partition"),
        F.lit(" offset "),
        F.col("offset"),
        F.lit(" cannot be read: "),
        F.col(reading.ERROR),
    )
    bad = F.col(reading.ERROR).isNotNull()
    return rows.withColumn(reading.ERROR, F.when(bad, F.raise_error(told).cast("string")))
