r"""JSON values by a schema, decoded into Arrow columns where they are fetched.

The rules are those of `json_values`, which has Spark's own parser do the work; this does it in
the task that fetched the records, ten times as fast. Two ways lead to the same answer:

- in bulk, by Arrow's reader, over the values as lines. Between two values is `}`, a newline, `{`:
  that is legal JSON only outside of everything, so a block that can be read and has as many rows
  as values has one object per value;
- one by one (`json_records`), for what Arrow refuses and Spark takes, and to say why a record is
  bad. What Arrow takes and Spark reads otherwise (NaN, a zero with a sign, times without seconds,
  floats beyond their range, half a surrogate pair, zero bytes, what is not UTF-8) is seen before
  or after and goes there too.

So **what becomes of a record depends on that record alone**, never on its neighbours. A block in
which much is odd is not cut into pieces forever: the rest of it is read one by one.

Where this differs from `json_values`, on purpose:

- Text that is not JSON is "not valid JSON", also where Spark would name a field of it (single
  quotes, a bracket too many); more than 500 levels are "nested too deep" (Spark: 998).
- Of two fields of the same name only the last one is looked at; Spark wants all of them to fit.
- A number of seconds beyond the range of timestamps is refused, Spark wraps it around; so are
  times of day without a date, which Spark takes for today's, and dates in digits that are not a
  year, which Spark takes for days since 1970.
- A number with a fraction is a moment, too, to the microsecond; Spark takes whole ones alone.
- A decimal has all of its digits, however many zeros stand behind them.
- In a zone with a name, years beyond 9999 are refused; names of fields may be of any length.
- A double that becomes text has the fewest digits that are enough, as from Java 19 on; a float
  is rounded from the double nearest to its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Context, Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.reading.json_lines import Mask, Rows, could_be_lines
from penstock.spark.reading.json_records import SECONDS, UNITS, Records
from penstock.spark.reading.json_times import Column, days_of_column, micros_of_column

# A block is read at once: large enough that the cost of a call does not count.
BLOCK_ROWS: Final = 16_384
BLOCK_BYTES: Final = 16 << 20
# A block that cannot be read is cut into pieces of these sizes; the last are read one by one.
_PIECES: Final = (512, 64)
# Odd records that are looked for in a block: a few, and one of so many that went well.
_ODD_FREE, _ODD_SHARE = 4, 32

_PLAIN: Final[dict[type[T.DataType], pa.DataType]] = {
    T.StringType: pa.string(),
    T.BooleanType: pa.bool_(),
    T.ByteType: pa.int8(),
    T.ShortType: pa.int16(),
    T.IntegerType: pa.int32(),
    T.LongType: pa.int64(),
    T.FloatType: pa.float32(),
    T.DoubleType: pa.float64(),
    T.TimestampType: pa.timestamp("us", "UTC"),
    T.DateType: pa.date32(),
}
# What Arrow's reader is asked for where it has rules of its own.
_ASKED: Final[dict[type[T.DataType], pa.DataType]] = {
    T.FloatType: pa.float64(),
    T.TimestampType: pa.string(),
    T.DateType: pa.string(),
}
# The byte that a value of these types begins with, and numbers that are none of theirs.
_STARTS: Final[dict[type[T.DataType], str]] = {
    T.BooleanType: r"[^tfn\s]",
    T.ByteType: r"(?:[^-0-9n\s]|-?[0-9]+[.eE]|-?[0-9]{3})",
    T.ShortType: r"(?:[^-0-9n\s]|-?[0-9]+[.eE]|-?[0-9]{5})",
    T.IntegerType: r"(?:[^-0-9n\s]|-?[0-9]+[.eE]|-?[0-9]{10})",
    T.LongType: r"(?:[^-0-9n\s]|-?[0-9]+[.eE]|-?[0-9]{19})",
    T.FloatType: r"[^-0-9n\s]",
    T.DoubleType: r"[^-0-9n\s]",
    T.DecimalType: r"[^-0-9n\s]",
    T.StructType: r"[^{n\s]",
    T.ArrayType: r"[^\[n\s]",
}
# Where more than this share of a block seems odd, the guess was wrong.
_SEEMS_ODD: Final = 0.25
_DIGITS: Final = Context(prec=38)
_ROW: Final = re.compile(r" in row (\d+)$")


def is_supported(schema: T.StructType) -> bool:
    """Whether values of this schema can be decoded here; if not, Spark's parser must do it."""
    return _is_supported(schema)


def _is_supported(kind: T.DataType) -> bool:
    if isinstance(kind, T.StructType):
        names = [field.name for field in kind.fields]
        unique = len(set(names)) == len(names) > 0
        return unique and all(_is_supported(field.dataType) for field in kind.fields)
    if isinstance(kind, T.ArrayType):
        return _is_supported(kind.elementType)
    if isinstance(kind, T.StringType):
        return type(kind) is T.StringType and kind == T.StringType()
    return isinstance(kind, T.DecimalType) or type(kind) in _PLAIN


def _plain(kind: T.DataType) -> pa.DataType:
    if isinstance(kind, T.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    return _PLAIN[type(kind)]


def _arrow(kind: T.DataType, plain: Callable[[T.DataType], pa.DataType]) -> pa.DataType:
    """The Arrow type of a type; everything may be null."""
    if isinstance(kind, T.StructType):
        return pa.struct([pa.field(f.name, _arrow(f.dataType, plain)) for f in kind.fields])
    if isinstance(kind, T.ArrayType):
        return pa.list_(pa.field("element", _arrow(kind.elementType, plain)))
    return plain(kind)


def _oddities(kind: T.DataType, starts: Mapping[type[T.DataType], str]) -> list[str]:
    """Patterns of fields whose values cannot be of their types."""
    if isinstance(kind, T.ArrayType):
        return _oddities(kind.elementType, starts)
    if not isinstance(kind, T.StructType):
        return []
    found: list[str] = []
    for field in kind.fields:
        start = starts.get(type(field.dataType), r'[^"n\s]')
        if "\\" not in field.name:  # it would end the quotation
            found.append(rf'\Q"{field.name}"\E\s*:\s*{start}')
        found += _oddities(field.dataType, starts)
    return found


class JsonColumns:
    """Decodes JSON values of one schema; `is_supported` must have said yes to it.

    What a capture writes, `captured`, has a few rules of its own: a decimal is a whole number
    without quotes, "NaN", "Infinity" and "-Infinity" are such floats, and the reason names the
    field inside of a struct.
    """

    def __init__(
        self, schema: T.StructType, unit: str | None = None, *, captured: bool = False
    ) -> None:
        """`unit` is what timestamps that are numbers count, if it is known that they are.

        Otherwise they are expected to be texts; a number is then one of seconds.
        """
        self._schema = schema
        self._unit = unit
        self._captured = captured
        self.arrow: pa.StructType = _arrow(schema, _plain)
        given = dict(_ASKED)
        starts = dict(_STARTS)
        if not captured:
            # A number, or its text.
            starts[T.DecimalType] = r'[^-0-9n"\s]'
        if unit is not None:
            given[T.TimestampType] = pa.int64()
            starts[T.TimestampType] = _STARTS[T.LongType]
        asked = _arrow(schema, lambda kind: given.get(type(kind)) or _plain(kind))
        self._options = pj.ParseOptions(
            explicit_schema=pa.schema(list(asked)), unexpected_field_behavior="ignore"
        )
        self._records = Records(schema, unit or SECONDS, captured=captured)
        self._oddities = "|".join(sorted(set(_oddities(schema, starts)))).encode()

    def __reduce__(self) -> tuple[Callable[..., JsonColumns], tuple[Any, ...]]:
        return _again, (self._schema, self._unit, self._captured)

    def parse(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        """The records, and why those that are null and have a value could not be read."""
        rows: list[pa.StructArray] = []
        reasons: list[pa.StringArray] = []
        start = 0
        while start < len(values):
            block = values.slice(start, BLOCK_ROWS)
            while len(block) > 1 and block.nbytes > BLOCK_BYTES:
                block = block.slice(0, len(block) // 2)
            found, why = self._block(block)
            rows.append(found)
            reasons.append(why)
            start += len(block)
        if len(rows) == 1:
            return rows[0], reasons[0]
        if not rows:
            return pa.array([], self.arrow), pa.array([], pa.string())
        return pa.concat_arrays(rows), pa.concat_arrays(reasons)

    def _block(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        count = len(values)
        lines = pc.binary_join_element_wise(values, b"", b"\n")
        there = np.asarray(values.is_valid())
        plain = there & could_be_lines(lines)
        where = np.flatnonzero(plain)
        parts = self._read_many(lines if len(where) == count else lines.filter(pa.array(plain)))
        if len(parts) == 1 and len(parts[0][0]) == count:
            return parts[0][1], pa.nulls(count, pa.string())
        places = [where[taken] for taken, _ in parts]
        columns = [found for _, found in parts]
        slow = there.copy()
        for place in places:
            slow[place] = False
        return self._together(values, places, columns, np.flatnonzero(slow))

    def _together(
        self, values: pa.BinaryArray, places: list[Rows], columns: list[pa.StructArray], slow: Rows
    ) -> tuple[pa.StructArray, pa.StringArray]:
        """All rows in their order: what was read in bulk, and the rest read one by one."""
        read = self._records.read
        answers = [read(value) for value in values.take(pa.array(slow)).to_pylist()]
        columns = [*columns, pa.array([row for row, _ in answers], self.arrow)]
        every = pa.concat_arrays(columns)
        # Null values have no row to take: they stay null.
        order = np.full(len(values), -1, np.int64)
        order[np.concatenate([*places, slow])] = np.arange(len(every))
        rows = every.take(pa.array(order, mask=order < 0))
        reasons = np.full(len(values), None, object)
        reasons[slow] = [why for _, why in answers]
        return rows, pa.array(reasons, pa.string(), from_pandas=True)

    def _read_many(self, lines: pa.BinaryArray) -> list[tuple[Rows, pa.StructArray]]:
        """What can be read in bulk, with the places of the rows among the lines."""
        if not len(lines):
            return []
        table, row = self._read(lines)
        if table is not None:
            return [self._finish(table, np.arange(len(lines)))]
        odd = self._seem_odd(lines)
        if row is not None:
            odd[row] = True
        places = np.flatnonzero(~odd)
        parts = self._read_others(lines.take(pa.array(places)))
        return [(places[taken], found) for taken, found in parts]

    def _seem_odd(self, lines: pa.BinaryArray) -> Mask:
        """Lines in which a value is not of its field's type, by its looks: a guess, as names can
        mean other things elsewhere, but one that saves to find them one after the other."""
        found = np.array(pc.match_substring_regex(lines, self._oddities))
        return found if found.mean() <= _SEEMS_ODD else np.zeros(len(lines), np.bool_)

    def _read_others(self, lines: pa.BinaryArray) -> list[tuple[Rows, pa.StructArray]]:
        """The same for lines of which some may still be odd, though they do not seem so."""
        places = np.arange(len(lines))
        odd: list[int] = []
        at = 0
        table = None
        while at < len(lines):
            table, row = self._read(lines.slice(at))
            if table is not None or row is None:
                break
            odd.append(at + row)
            at += row + 1
            if len(odd) > _ODD_FREE + at // _ODD_SHARE:
                places = places[:at]
                break
        if not odd and table is not None:
            return [self._finish(table, places)]
        places = np.setdiff1d(places, odd, assume_unique=True)
        return self._read_pieces(lines, places, (BLOCK_ROWS, *_PIECES) if odd else _PIECES)

    def _read_pieces(
        self, lines: pa.BinaryArray, places: Rows, sizes: tuple[int, ...]
    ) -> list[tuple[Rows, pa.StructArray]]:
        """The same for lines of which some cannot be read, nobody knows which."""
        parts: list[tuple[Rows, pa.StructArray]] = []
        failed = 0
        for start in range(0, len(places), sizes[0]):
            piece = places[start : start + sizes[0]]
            table, _ = self._read(lines.take(pa.array(piece)))
            if table is not None:
                parts.append(self._finish(table, piece))
                continue
            failed += 1
            if len(sizes) > 1 and failed <= _ODD_FREE + start // sizes[0] // 2:
                parts += self._read_pieces(lines, piece, sizes[1:])
        return parts

    def _read(self, lines: pa.BinaryArray) -> tuple[pa.Table | None, int | None]:
        """The lines as a table; or nothing, and the row that is to blame if that is known."""
        _, where, data = lines.buffers()
        ends = np.frombuffer(where, np.int32)[lines.offset : lines.offset + len(lines) + 1]
        size = int(ends[-1] - ends[0])
        options = pj.ReadOptions(use_threads=False, block_size=size + 1)
        try:
            table = pj.read_json(
                pa.BufferReader(data.slice(int(ends[0]), size)),
                read_options=options,
                parse_options=self._options,
            )
        except pa.ArrowInvalid as error:
            row = _ROW.search(str(error))
            # Two objects in a value shift the rows: then it is one too many in the end.
            return None, min(int(row[1]), len(lines) - 1) if row else None
        return (table, None) if table.num_rows == len(lines) else (None, None)

    def _finish(self, table: pa.Table, places: Rows) -> tuple[Rows, pa.StructArray]:
        """A table with the right types, without the rows that must be looked at once more."""
        suspect = np.zeros(len(places), np.bool_)
        columns = [
            _finished(
                _one(table.column(number)),
                field.dataType,
                None,
                suspect,
                needed=None if field.nullable else np.True_,
                unit=self._unit,
            )
            for number, field in enumerate(self._schema.fields)
        ]
        rows = pa.StructArray.from_arrays(columns, fields=list(self.arrow))
        if not suspect.any():
            return places, rows
        return places[~suspect], rows.filter(pa.array(~suspect))


def _again(schema: T.StructType, unit: str | None, captured: bool) -> JsonColumns:
    return JsonColumns(schema, unit, captured=captured)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _finished(
    found: pa.Array,
    kind: T.DataType,
    owner: Rows | None,
    suspect: Mask,
    *,
    needed: Any,
    unit: str | None,
) -> pa.Array:
    """A column as Arrow read it, with its right type; marks the rows that it may have misread.

    `owner` is the row that each element belongs to, if not its own; `needed` says which elements
    must not be null, None if all may.
    """

    def mark(which: Any) -> None:
        if which.any():
            suspect[which if owner is None else owner[which]] = True

    if not len(found):
        return pa.array([], _arrow(kind, _plain))
    if needed is not None and found.null_count:
        mark(np.asarray(found.is_null()) & needed)
    if isinstance(kind, T.StructType):
        there = np.asarray(found.is_valid()) if found.null_count else np.True_
        children = [
            _finished(
                found.field(number),
                field.dataType,
                owner,
                suspect,
                needed=None if field.nullable else there,
                unit=unit,
            )
            for number, field in enumerate(kind.fields)
        ]
        target = _arrow(kind, _plain)
        return pa.Array.from_buffers(target, len(found), found.buffers()[:1], children=children)
    if isinstance(kind, T.ArrayType):
        parents = np.asarray(pc.list_parent_indices(found))
        inner = _finished(
            found.values,
            kind.elementType,
            parents if owner is None else owner[parents],
            suspect,
            needed=None if kind.containsNull else np.True_,
            unit=unit,
        )
        target = _arrow(kind, _plain)
        return pa.Array.from_buffers(target, len(found), found.buffers()[:2], children=[inner])
    if isinstance(kind, T.FloatType | T.DoubleType):
        return _floats(found, kind, mark)
    if isinstance(kind, T.DecimalType):
        # Arrow counts the digits that stand there, before it adds zeros.
        most = Decimal(10**kind.precision - 1).scaleb(-kind.scale, _DIGITS)
        fits = pc.less_equal(pc.abs(found), pa.scalar(most, found.type))
        mark(~np.asarray(pc.fill_null(fits, True)))
        return found
    if isinstance(kind, T.TimestampType) and unit is not None:
        return _counted(found, unit, mark)
    if isinstance(kind, T.TimestampType):
        return _times(found, micros_of_column, _PLAIN[T.TimestampType], pa.int64(), mark)
    if isinstance(kind, T.DateType):
        return _times(found, days_of_column, _PLAIN[T.DateType], pa.int32(), mark)
    return found


def _floats(found: pa.Array, kind: T.DataType, mark: Callable[[Any], None]) -> pa.Array:
    """Marks what is infinite as a float, and zeros with a sign: Spark knows -0 from -0.0."""
    numbers = np.frombuffer(found.buffers()[1], np.float64)[: len(found)]
    if isinstance(kind, T.FloatType):
        with np.errstate(over="ignore"):
            numbers = numbers.astype(np.float32)
    odd = np.isinf(numbers) | ((numbers == 0) & np.signbit(numbers))
    if found.null_count:
        odd &= np.asarray(found.is_valid())
    mark(odd)
    if not isinstance(kind, T.FloatType):
        return found
    buffers = [found.buffers()[0], pa.py_buffer(numbers)]
    return pa.Array.from_buffers(pa.float32(), len(found), buffers)


def _counted(found: pa.Array, unit: str, mark: Callable[[Any], None]) -> pa.Array:
    """Timestamps from numbers of a unit; marks those that are too large."""
    times, parts = UNITS[unit]
    numbers = np.asarray(found.fill_null(0))
    most = np.iinfo(np.int64).max // times
    mark((numbers > most) | (numbers < -most))
    with np.errstate(over="ignore"):
        micros = numbers // parts if parts > 1 else numbers * times
    buffers = [found.buffers()[0] if not found.offset else None, pa.py_buffer(micros)]
    kind = _PLAIN[T.TimestampType]
    if buffers[0] is None and found.null_count:
        return pa.array(micros, mask=np.asarray(found.is_null())).cast(kind)
    return pa.Array.from_buffers(kind, len(found), buffers)


def _times(
    found: pa.Array,
    read: Callable[[pa.StringArray], Column],
    kind: pa.DataType,
    stored: pa.DataType,
    mark: Callable[[Any], None],
) -> pa.Array:
    numbers, fits = read(found)
    if found.null_count:
        fits |= np.asarray(found.is_null())
    mark(~fits)
    plain = numbers.astype(stored.to_pandas_dtype())
    buffers = [found.buffers()[0], pa.py_buffer(plain)]
    return pa.Array.from_buffers(kind, len(found), buffers)
