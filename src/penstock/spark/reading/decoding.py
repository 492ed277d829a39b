"""Records typed where they are fetched: JSON values into columns before Spark sees them.

The source gives what `reading.json` and the shapes of a flow's inputs would make of its records
(the same columns, the same reasons for those that cannot be read), but the task that fetched
them does it, on Arrow columns. Spark's own parser costs several times as much, and its expressions
for all that can be wrong with a record make large plans, which are planned and compiled anew for
every micro-batch.

A typed frame has the value in one column, `_penstock_value`, where each record stood (`POSITION`),
`_error` and `_raw` for the bad ones, and `_time` if the stream has an event time. Every record is a
row of it: one that says nothing, or only that time has passed, has neither value nor error.

Records come in spans, each of one partition and in the order of the log. Where there is an event
time, the first row of a span says in `_span` what the times in it are, so that nobody has to look
at all of them to tell how far time has come and whether any may be late. Where the tasks tell
that themselves (`penstock.spark.state.watching`) there is `_aside` in its place: a row that is late
has no value there, but what it came too late for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema

from penstock.spark.reading.captured import CapturedEvents, Find, Parse, Target, of_json
from penstock.spark.reading.frame import ERROR, RAW, RAW_TYPE
from penstock.spark.reading.heartbeat_keys import HEARTBEATS
from penstock.spark.reading.json_columns import JsonColumns, is_supported
from penstock.spark.reading.json_records import SECONDS, UNITS
from penstock.spark.reading.json_values import nullable

Shape = Literal["json", "debezium", "changelog"]

VALUE: Final = "_penstock_value"
# The event time of a timed stream, and the name by which a record's own timestamp can be that.
TIME: Final = "_time"
STAMP: Final = "_timestamp"
# Of the times of a span, microseconds: the least, the latest, and by how much one is at most
# behind another that stands before it; and how many records of the span cannot be read.
SPAN: Final = "_span"
SPAN_FIELDS: Final = ("least", "latest", "behind", "bad")
# Of a late row: the time that it may not be before, microseconds, and whether that is the watermark
# of all partitions, because its own had not come so far.
ASIDE: Final = "_aside"
ASIDE_TYPE: Final = pa.struct([("before", pa.int64()), ("behind", pa.bool_())])
# Good rows of a shard, as Arrow, where the source packs them (`penstock.spark.state.packing`).
PACKED: Final = "_penstock_packed"
PACKED_TYPE: Final = pa.struct([("shard", pa.int32()), ("rows", pa.binary())])
# The first and the last moment that calendars have, microseconds: the years 1 to 9999.
FIRST_US: Final = -62_135_596_800_000_000
LAST_US: Final = 253_402_300_799_999_999
SECOND_US: Final = 1_000_000
SHAPES: Final = frozenset({"json", "debezium", "changelog"})
_INSTANT: Final = pa.timestamp("us", "UTC")


@dataclass(frozen=True, slots=True)
class TimeRules:
    """What counts as the event time of a stream."""

    # What numbers count; None if nothing is said, and then it is seconds.
    unit: str | None = None
    # How far it may be after the time at which the record was written, microseconds.
    max_future_us: int | None = None
    # A condition in SQL: what it is not true for is left out, before its time is looked at.
    where: str | None = None


ANY_TIME: Final = TimeRules()


def typing_of(
    shape: str,
    schema: str,
    time: str | None,
    published: Mapping[str, Any] | None = None,
    rules: TimeRules = ANY_TIME,
) -> Typing | None:
    """How the source types values of this format and schema; None if Spark's parser must.

    `published` are the schemas of the events' tables, if there are such: see `Published`. Only
    where a session is: Spark reads the schema.
    """
    if shape not in SHAPES:
        return None
    row = T.StructType.fromDDL(schema)
    if not isinstance(row, T.StructType) or not (published or is_supported(row)):
        return None
    found = Typing(
        cast("Shape", shape), row.json(), time, published=published, unit=rules.unit,
        max_future_us=rules.max_future_us,
    )  # fmt: skip
    if published is None and time is not None and time != STAMP and not found.has_instant(time):
        # Spark makes times of texts and fractions, too.
        return None
    if rules.where is None:
        return found
    # Whether a record counts is for Spark to say, and then what its time is.
    return replace(found, time=None, keeps_raw=time is not None)


def envelope(row: T.StructType) -> T.StructType:
    """A change event of rows: its fields may also stand under `payload`, beside their schema."""
    inside = [
        T.StructField("before", row),
        T.StructField("after", row),
        T.StructField("op", T.StringType()),
        T.StructField("ts_ms", T.LongType()),
        T.StructField("source", T.StructType([T.StructField("ts_ms", T.LongType())])),
    ]
    return T.StructType([*inside, T.StructField("payload", T.StructType(list(inside)))])


class Watching(Protocol):
    """Whoever tells which rows are late, while a task reads them."""

    def aside(
        self,
        part: tuple[str, int],
        offsets: pa.Array,
        times: pa.Array,
        has_value: pa.BooleanArray,
        bad: int,
    ) -> pa.Array:
        """For each of the next rows of a partition: null, or what it came too late for."""
        ...


@dataclass(frozen=True)
class Typing:
    """How the records of a stream become columns; goes to the tasks."""

    shape: Shape
    # As JSON: without a session nobody reads what Spark calls DDL.
    schema: str
    # The path of the field that is the event time.
    time: str | None = None
    # The folder by which tasks tell how far it has come; None if that is told from the rows.
    watch: str | None = None
    # Of the stream in its flow.
    number: int = 0
    # Whether rows may come packed; if so, in which micro-batches is told in the folder.
    packs: bool = False
    # Of change events whose schemas are published: those that were when the query began, by id, as
    # JSON ("schemas"), whether the user wrote the row's ("written"), and whether columns may go
    # ("ignores").
    published: Mapping[str, Any] | None = None
    # What numbers count that are times; None if they should be texts.
    unit: str | None = None
    # How far the event time may be after the time at which the record was written.
    max_future_us: int | None = None
    # Whether good records, too, come with what they were.
    keeps_raw: bool = False

    def find_schemas(self, find: Find) -> None:
        """How to come by schemas that are published later."""
        self.__dict__["_find"] = find

    def as_option(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_option(cls, text: str) -> Typing:
        return cls(**json.loads(text))

    @cached_property
    def _row(self) -> T.StructType:
        return T.StructType.fromJson(json.loads(self.schema))

    def has_instant(self, path: str) -> bool:
        """Whether the field with this path is a timestamp, or a whole number.

        A timestamp without a zone is taken as UTC.
        """
        times = T.TimestampType | T.TimestampNTZType | T.LongType | T.IntegerType
        return isinstance(self._kind_of(path), times)

    def has_field(self, path: str) -> bool:
        """Whether there is such a field; where Spark reads it, the case of letters is the same."""
        return self._kind_of(path, same_case=False) is not None

    def _kind_of(self, path: str, *, same_case: bool = True) -> T.DataType | None:
        kind: T.DataType = self.frame[VALUE].dataType
        for name in path.split("."):
            fields = kind.fields if isinstance(kind, T.StructType) else []
            wanted = (
                [name] if same_case else [e.name for e in fields if e.name.lower() == name.lower()]
            )
            found = [each.dataType for each in fields if each.name in wanted]
            if not found:
                return None
            kind = found[0]
        return kind

    @cached_property
    def frame(self) -> T.StructType:
        """The schema of the typed frame."""
        row = nullable(self._row)
        value: T.DataType = row
        if self.shape != "json":
            fields = [("_before", row), ("_after", row), ("_op", T.StringType())]
            if self.shape == "debezium":
                fields.append(("_changed", T.TimestampType()))
            value = T.StructType([T.StructField(name, kind) for name, kind in fields])
        columns: list[tuple[str, T.DataType]] = [
            (VALUE, value),
            ("key", T.BinaryType()),
            ("topic", T.StringType()),
            ("partition", T.IntegerType()),
            ("offset", T.LongType()),
            ("timestamp", T.TimestampType()),
            (ERROR, T.StringType()),
            (RAW, RAW_TYPE),
        ]
        if self.time is not None:
            columns.append((TIME, T.TimestampType()))
        if self.time is not None and self.watch is None:
            span = [T.StructField(name, T.LongType()) for name in SPAN_FIELDS]
            columns.append((SPAN, T.StructType(span)))
        elif self.time is not None:
            columns.append((ASIDE, cast("T.StructType", from_arrow_type(ASIDE_TYPE))))
        if self.packs:
            columns.append((PACKED, cast("T.StructType", from_arrow_type(PACKED_TYPE))))
        return T.StructType([T.StructField(name, kind) for name, kind in columns])

    @cached_property
    def _columns(self) -> JsonColumns:
        row = envelope(self._row) if self.shape == "debezium" else self._row
        return JsonColumns(row, self.unit)

    @cached_property
    def _parse(self) -> Parse:
        if self.shape != "debezium":
            return self._columns.parse
        if self.published is None:
            return self._parse_plain
        # By hand a row may have types that only published schemas lead to.
        plain = self.published["written"] and is_supported(self._row)
        events = CapturedEvents(
            Target(
                self._row,
                bool(self.published["written"]),
                ignores=bool(self.published.get("ignores")),
            ),
            of_json(self.published["schemas"]),
            self.__dict__.get("_find"),
            self._parse_plain if plain else None,
        )
        return events.parse

    def _parse_plain(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        """Change events that say nothing of their schema."""
        parsed, reasons = self._columns.parse(values)
        return _unwrapped(parsed), reasons

    @cached_property
    def _arrow(self) -> pa.Schema:
        return to_arrow_schema(self.frame, timezone="UTC")

    def decode(self, records: pa.RecordBatch, watching: Watching | None = None) -> pa.RecordBatch:
        """The typed frame of records as the source gives them: of one partition, in its order."""
        values = records.column("value")
        parsed, reasons = self._parse(values)
        is_there = values.is_valid()
        value = self._shaped(parsed, records, is_there)
        reasons = self._checked(reasons, value, records, is_there)
        is_bad = reasons.is_valid()
        if reasons.null_count < len(reasons):
            value = _where(pc.invert(is_bad), value)
        columns = {
            VALUE: value,
            ERROR: reasons,
            RAW: self._raw(records, values.is_valid() if self.keeps_raw else is_bad),
            **{name: records.column(name) for name in ("key", "topic", "partition", "offset")},
            "timestamp": records.column("timestamp"),
        }
        if self.time is not None:
            columns[TIME] = self._times(value, records)
            if watching is None:
                columns[SPAN] = _span(columns[TIME], is_bad.true_count)
            else:
                bad, has_value = is_bad.true_count, value.is_valid()
                aside = watching.aside(
                    _part_of(records), records.column("offset"), columns[TIME], has_value, bad
                )
                columns |= {ASIDE: aside, VALUE: _where(aside.is_null(), value)}
        if self.packs:
            columns[PACKED] = pa.nulls(len(records), PACKED_TYPE)
        arrays = [_as(columns[field.name], field.type) for field in self._arrow]
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _shaped(
        self, parsed: pa.StructArray, records: pa.RecordBatch, is_there: pa.BooleanArray
    ) -> pa.StructArray:
        if self.shape == "json":
            return parsed
        if self.shape == "changelog":
            deleted = pc.if_else(is_there, "u", "d")
            before = pa.nulls(len(parsed), parsed.type)
            whole = pa.StructArray.from_arrays(
                [before, parsed, deleted], ["_before", "_after", "_op"]
            )
            said = pc.or_(is_there, pc.invert(_is_heartbeat(records)))
            return whole if pc.all(said).as_py() is not False else _where(said, whole)
        ms = pc.coalesce(child(child(parsed, "source"), "ts_ms"), child(parsed, "ts_ms"))
        changed = ms.cast(pa.timestamp("ms", "UTC")).cast(_INSTANT, safe=False)
        whole = pa.StructArray.from_arrays(
            [child(parsed, "before"), child(parsed, "after"), child(parsed, "op"), changed],
            ["_before", "_after", "_op", "_changed"],
        )
        return _where(is_there, whole)

    def _checked(
        self,
        reasons: pa.StringArray,
        value: pa.StructArray,
        records: pa.RecordBatch,
        is_there: pa.BooleanArray,
    ) -> pa.StringArray:
        """With the reasons why a record that could be read cannot be taken."""
        if self.shape == "debezium":
            no_op = pc.and_(is_there, child(value, "_op").is_null())
            reasons = _with_reason(reasons, no_op, "the value is no change event: no op")
        if self.shape == "changelog":
            keyless = records.column("key").is_null()
            reasons = _with_reason(reasons, keyless, "the record has no key")
        if self.time is not None and self.time != STAMP:
            timeless = pc.and_(is_there, _at(value, self.time).is_null())
            text = f"the event time {self.time} is missing or null"
            reasons = _with_reason(reasons, timeless, text)
            return self._in_time(reasons, value, records)
        return reasons

    def _in_time(
        self, reasons: pa.StringArray, value: pa.StructArray, records: pa.RecordBatch
    ) -> pa.StringArray:
        """With the reasons why a time cannot be the event time of a record."""
        assert self.time is not None
        said = _at(value, self.time)
        at, wrong = self._micros(said)
        wrong &= np.asarray(said.is_valid())
        stamp = np.asarray(_as(records.column("timestamp"), _INSTANT).cast(pa.int64()).fill_null(0))
        ahead = np.zeros(len(at), np.bool_)
        if self.max_future_us is not None:
            # What was written without a time says nothing.
            ahead = (at > stamp + self.max_future_us) & (stamp > 0) & np.asarray(said.is_valid())
        if not (wrong.any() or ahead.any()):
            return reasons
        found = np.full(len(at), None, object)
        for row in np.flatnonzero(ahead):
            found[row] = future(self.time, int(at[row] - stamp[row]), self.max_future_us or 0)
        for row in np.flatnonzero(wrong):
            found[row] = out_of_range(self.time, self._told(said[int(row)]), self.unit)
        return pc.coalesce(reasons, pa.array(found, pa.string(), from_pandas=True))

    def _told(self, said: pa.Scalar) -> str:
        """A time that is out of range, as it stands in the record."""
        if pa.types.is_integer(said.type):
            return f"{said.as_py()} {self.unit or SECONDS} since 1970"
        years = np.datetime64(said.cast(pa.int64()).as_py(), "us").astype("datetime64[Y]")
        return f"year {int(years.astype(np.int64)) + 1970}"

    def _micros(self, said: pa.Array) -> tuple[Any, Any]:
        """Times as microseconds, and which of them no calendar has; of these it is 0."""
        numbers = np.asarray(said.cast(pa.int64()).fill_null(0))
        times, parts = UNITS[self.unit or SECONDS] if pa.types.is_integer(said.type) else (1, 1)
        low, high = -(-FIRST_US * parts // times), LAST_US * parts // times
        wrong = (numbers < low) | (numbers > high)
        return np.where(wrong, 0, numbers) * times // parts, wrong

    def _raw(self, records: pa.RecordBatch, is_bad: pa.BooleanArray) -> pa.Array:
        """What a bad record was; of all of them where Spark may still find it bad."""
        kind = self._arrow.field(RAW).type
        if not is_bad.true_count:
            return pa.nulls(len(records), kind)
        names = records.schema.names
        headers = (
            records.column("headers") if "headers" in names else pa.nulls(len(records))
        )  # fmt: skip
        value = _where(is_bad, records.column("value"))
        parts = [value, _as(_where(is_bad, headers), kind.field("headers").type)]
        whole = pa.StructArray.from_arrays(parts, fields=list(kind))
        return _where(is_bad, whole)

    def _instants(self, said: pa.Array) -> pa.Array:
        if not pa.types.is_integer(said.type):
            return _as(said, _INSTANT)
        return pa.array(self._micros(said)[0], _INSTANT, mask=np.asarray(said.is_null()))

    def _times(self, value: pa.StructArray, records: pa.RecordBatch) -> pa.Array:
        assert self.time is not None
        stamp = _as(records.column("timestamp"), _INSTANT)
        at = stamp if self.time == STAMP else self._instants(_at(value, self.time))
        at = _where(value.is_valid(), at)
        if not records.column("value").null_count:
            return at
        beats = pc.and_(records.column("value").is_null(), _is_heartbeat(records))
        return pc.if_else(beats, stamp, at)


def _unwrapped(parsed: pa.StructArray) -> pa.StructArray:
    """Events without the `payload` that some of them may stand in."""
    fields = [each.name for each in parsed.type if each.name != "payload"]
    outer: pa.StructArray = pa.StructArray.from_arrays(
        [child(parsed, name) for name in fields], fields
    )
    inner = child(parsed, "payload")
    wrapped = child(inner, "op").is_valid()
    if wrapped.true_count:
        within = pa.StructArray.from_arrays([child(inner, name) for name in fields], fields)
        both = pa.concat_arrays([outer, within])
        at = np.arange(len(outer), dtype=np.int64)
        at[wrapped.to_numpy(zero_copy_only=False)] += len(outer)
        outer = both.take(pa.array(at))
    return outer


def out_of_range(time: str, told: str, unit: str | None) -> str:
    """Why a time outside of the years 1 to 9999 is no event time."""
    hint = f"numbers are read as {unit or SECONDS}, which time_unit changes"
    return f"the event time {time} is out of range: {told}; {hint}"


def future(time: str, ahead_us: int, most_us: int) -> str:
    """Why a time is too far ahead of its record's."""
    return (
        f"the event time {time} is {ahead_us // SECOND_US} s after its record was written, and "
        f"may be {most_us // SECOND_US} s (max_future)"
    )


def _part_of(records: pa.RecordBatch) -> tuple[str, int]:
    if not len(records):
        return "", -1
    return records.column("topic")[0].as_py(), records.column("partition")[0].as_py()


def _span(times: pa.Array, bad: int) -> pa.Array:
    """What there is to say of a span, in its first row."""
    said: dict[str, int | None] = {"least": None, "latest": None, "behind": None, "bad": bad}
    at = np.asarray(times.drop_null().cast(pa.int64()))
    if len(at):
        # Between times of long ago and of long to come there are more than fit.
        apart = (np.maximum.accumulate(at) - at).view(np.uint64)
        behind = min(int(apart.max()), np.iinfo(np.int64).max)
        said |= {"least": int(at.min()), "latest": int(at.max()), "behind": behind}
    kind = pa.struct([(name, pa.int64()) for name in SPAN_FIELDS])
    first = pa.array([said] if len(times) else [], kind)
    return pa.concat_arrays([first, pa.nulls(max(0, len(times) - 1), kind)])


def _with_reason(reasons: pa.StringArray, is_so: pa.BooleanArray, text: str) -> pa.StringArray:
    if not is_so.true_count:
        return reasons
    return pc.coalesce(reasons, pc.if_else(is_so, text, pa.scalar(None, pa.string())))


def _is_heartbeat(records: pa.RecordBatch) -> pa.BooleanArray:
    return pc.is_in(records.column("key"), value_set=pa.array(HEARTBEATS, pa.binary()))


def child(struct: pa.StructArray, name: str) -> pa.Array:
    """A field, null where the whole is. By its place: Arrow takes some names for paths."""
    return pc.struct_field(struct, [struct.type.get_field_index(name)])


def _at(struct: pa.StructArray, path: str) -> pa.Array:
    found: Any = struct
    for name in path.split("."):
        found = child(found, name)
    return found


def _where(keep: pa.BooleanArray, array: pa.Array) -> pa.Array:
    """The array, null where `keep` is false."""
    if keep.true_count == len(array):
        return array
    at = pc.if_else(keep, pa.array(np.arange(len(array), dtype=np.int64)), None)
    return array.take(at)


def _as(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else array.cast(kind)
