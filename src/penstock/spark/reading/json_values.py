r"""JSON values by a schema, in Spark's own parser, with its traps closed.

`from_json` alone is too forgiving for data that must not be lost: it stops after the first value
and ignores what follows, takes a top-level array apart, turns text that is not UTF-8 into other
text, wraps a byte of 200 to -56, makes 1e400 infinite, and gives nulls for an empty value. Here

- the value is parsed inside `{"_":[VALUE],"end":1}`: what follows the first value, cut text,
  arrays and scalars at the top and empty values all show up as an error or as a list that has not
  exactly one element;
- one way around that is left, text that closes the list and opens another, `{}],"x":[...`: values
  that could be such are looked at once more, as a field of an object;
- what the schema says must not be null, must not: at any depth, missing or null alike.

- a decimal has all of its digits: Spark would round 1.239 to two of them.

Spark's rules stay where they lose nothing: a string field takes any JSON value as its text,
a decimal may stand in quotes, a timestamp may be a whole number of seconds, of two fields of the
same name the last one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.reading.frame import (
    ERROR,
    VALUE,
    Check,
    ReadingError,
    Tombstones,
    check_input,
    check_names,
    finish,
)
from penstock.spark.reading.json_records import SHOWN_MAX

# What Java's parser takes for a number, in quotes or not; and infinities in quotes.
_WORD: Final = "NaN|INF|Infinity"
_INFINITY: Final = r'"[+-]?(?:INF|Infinity)"'
_LIST, _END, _CORRUPT = "_", "end", "_corrupt"
_TEXT: Final = "_penstock_text"
_PARSED: Final = "_penstock_parsed"
# What the checks here rely on; a user's options cannot change them.
_FIXED: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": _CORRUPT,
    "allowSingleQuotes": "false",
    # In quotes, as Spark writes them; without quotes they are refused below.
    "allowNonNumericNumbers": "true",
    "allowComments": "false",
}
# A half of a surrogate pair alone is no character: Spark would make it a question mark. Escapes are
# taken one after the other, from the left, pairs as one: only so is it seen what a backslash means.
_WHOLE_ESCAPE: Final = (
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89a-fA-F])|[^u])"
)


def json(
    df: DataFrame,
    schema: T.StructType | str,
    *,
    into: str | None = None,
    tombstones: Tombstones = "drop",
    options: Mapping[str, str] | None = None,
    metrics: str = "reading",
    check: Check | None = None,
    keeps_raw: bool = False,
) -> DataFrame:
    """Read the values of a topic's frame as JSON objects of this schema.

    The schema is a `StructType` or DDL text; fields that are NOT NULL must be there. The answer
    has the schema's fields as columns (or one struct column, with `into`), the position of each
    record, and `_error` and `_raw` for those that could not be read: see `good`, `dead_letters`
    and `routed`. Null values are left out, kept as rows with `_tombstone` true, or errors. The
    counts `records`, `dead_letters` and `tombstones` are in the query's observed metrics under the
    name that `metrics` says. `options` are those of Spark's `from_json`, for formats of dates.
    `check` gives a further reason, from the parsed value, why a record cannot be taken.
    """
    check_input(df, tombstones)
    wanted = T.StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(wanted, T.StructType) or not wanted.fields:
        raise ReadingError("the schema has no fields", advice="Name one, or use raw().")
    fields = [field.name for field in wanted.fields]
    check_names(fields, into)
    asked = wide_type(wanted)
    wrapper = T.StructType(
        [
            T.StructField(_LIST, T.ArrayType(asked)),
            T.StructField(_END, T.IntegerType()),
            T.StructField(_CORRUPT, T.StringType()),
        ]
    )
    wrapped = F.concat(F.lit(f'{{"{_LIST}":['), F.col(_TEXT), F.lit(f'],"{_END}":1}}'))
    steps = df.withColumn(_TEXT, F.col(VALUE).cast("string"))
    steps = steps.withColumn(_PARSED, F.from_json(wrapped, wrapper, {**(options or {}), **_FIXED}))
    steps = steps.withColumn(ERROR, _error(wanted, tombstones))
    parsed = F.get(F.col(_PARSED)[_LIST], F.lit(0))
    if asked != nullable(wanted):
        parsed = parsed.cast(nullable(wanted))
    return finish(
        steps,
        parsed=parsed,
        fields=fields,
        into=into,
        tombstones=tombstones,
        metrics=metrics,
        check=check,
        keeps_raw=keeps_raw,
    )


def _error(schema: T.StructType, tombstones: Tombstones) -> Column:
    """The reason why a record cannot be read, null if it can; the first that holds."""
    text, parsed = F.col(_TEXT), F.col(_PARSED)
    rows = parsed[_LIST]
    row = F.get(rows, F.lit(0))
    is_corrupt = parsed[_CORRUPT].isNotNull() | parsed[_END].isNull()
    is_odd = rows.isNull() | (F.size(rows) != 1) | row.isNull()
    reason = F.when(text.isNull(), F.lit("the value is null") if tombstones == "error" else None)
    reason = reason.when(~F.is_valid_utf8(text), F.lit("the value is not UTF-8"))
    reason = reason.when(is_corrupt | is_odd, _why_not_read(schema))
    word = text.rlike(_WORD) & _count(text).isNull()
    reason = reason.when(word, F.lit("the value is not valid JSON"))
    # As a field of an object instead: no text can close both a list and an object.
    field = F.json_array_length(F.concat(F.lit('[{"":'), text, F.lit("}]")))
    slipped = text.rlike(r"\}\s*\]\s*,") & ~F.coalesce(field == 1, F.lit(False))
    reason = reason.when(slipped, F.lit("the value is not one JSON object"))
    escaped = text.contains(r"\ud") | text.contains(r"\uD")
    # Without all other escapes, the only ones that are left are halves.
    halved = F.regexp_replace(text, _WHOLE_ESCAPE, "").contains(r"\u")
    reason = reason.when(escaped & halved, F.lit("the value has half a surrogate pair"))
    found = [
        F.when(condition, _with_value(message, field))
        for field in schema.fields
        for condition, message in problems(
            row[field.name], field.dataType, field.name, required=not field.nullable
        )
    ]
    return reason.otherwise(F.coalesce(*found)) if found else reason


def _with_value(message: str, field: T.StructField) -> Column:
    """A reason, with what was found where that is not of its type."""
    if message != _not_of_type(field.name, field.dataType) or set("']") & set(field.name):
        return F.lit(message)
    return F.concat(F.lit(message), _found(F.col(_TEXT), field.name))


def _not_of_type(path: str, kind: T.DataType) -> str:
    return f"field {path} is not {kind.simpleString()}"


def _count(text: Column) -> Column:
    """How many JSON values a text has; null if it is not JSON."""
    return F.json_array_length(F.concat(F.lit("["), text, F.lit("]")))


def _why_not_read(schema: T.StructType) -> Column:
    """What is wrong with a text that the parser refused; evaluated for those only."""
    text, row = F.col(_TEXT), F.get(F.col(_PARSED)[_LIST], F.lit(0))
    reason = F.when(F.trim(text) == "", F.lit("the value is empty"))
    reason = reason.when(_count(text).isNull(), F.lit("the value is not valid JSON"))
    reason = reason.when(_count(text) != 1, F.lit("the value is not one JSON object"))
    reason = reason.when(~F.ltrim(text).rlike(r"^\s*\{"), F.lit("the JSON value is not an object"))
    for field in schema.fields:
        if "'" in field.name or "]" in field.name:
            continue  # no path leads there
        there = F.get_json_object(text, f"$['{field.name}']").isNotNull()
        message = _not_of_type(field.name, field.dataType)
        told = F.concat(F.lit(message), _found(text, field.name))
        reason = reason.when(there & row[field.name].isNull(), told)
    return reason.otherwise(F.lit("the value does not fit the schema"))


def _found(text: Column, name: str) -> Column:
    """What a field has in the place of what it should be, as `json_records.shown` tells it."""
    value = F.try_variant_get(F.try_parse_json(text), f"$['{name}']", "variant")
    json_text = F.to_json(value)
    cut = F.concat(F.substring(json_text, 1, SHOWN_MAX), F.lit("..."))
    shown = F.when(json_text.startswith("{"), F.lit("an object"))
    shown = shown.when(json_text.startswith("["), F.lit("a list"))
    shown = shown.when(F.length(json_text) > SHOWN_MAX, cut).otherwise(json_text)
    return F.coalesce(F.concat(F.lit(": "), shown), F.lit(""))


def problems(
    value: Column, kind: T.DataType, path: str, *, required: bool
) -> list[tuple[Column, str]]:
    """Conditions under which a parsed value is not what the schema says, each with its reason."""
    found: list[tuple[Column, str]] = []
    if required:
        found.append((value.isNull(), f"field {path} is missing or null"))
    if isinstance(kind, T.ByteType):
        found.append(((value < -128) | (value > 127), f"field {path} is out of range"))
    elif isinstance(kind, T.FloatType | T.DoubleType):
        too_large = (F.abs(value) == float("inf")) & ~F.col(_TEXT).rlike(_INFINITY)
        found.append((too_large, f"field {path} is out of range"))
    elif isinstance(kind, T.DecimalType):
        rounded = value.try_cast(kind)
        differs = value.isNotNull() & (rounded.isNull() | (rounded != value))
        found.append((differs, _not_of_type(path, kind)))
    elif isinstance(kind, T.StructType):
        for field in kind.fields:
            inner = problems(
                value[field.name],
                field.dataType,
                f"{path}.{field.name}",
                required=not field.nullable,
            )
            found += [(value.isNotNull() & condition, message) for condition, message in inner]
    elif isinstance(kind, T.ArrayType):
        found += _of_elements(value, kind.elementType, f"{path}[]", required=not kind.containsNull)
    elif isinstance(kind, T.MapType):
        values = F.map_values(value)
        needed = not kind.valueContainsNull
        found += _of_elements(values, kind.valueType, f"{path}{{}}", required=needed)
    return found


def _of_elements(
    values: Column, kind: T.DataType, path: str, *, required: bool
) -> list[tuple[Column, str]]:
    """The same for the elements of an array, or the values of a map."""
    known = problems(F.lit(None), kind, path, required=required)
    return [
        (F.exists(values, _test(kind, path, required, number)), message)
        for number, (_, message) in enumerate(known)
    ]


def _test(kind: T.DataType, path: str, required: bool, number: int) -> Callable[[Column], Column]:
    """The condition of one problem, for Spark to put its own element into."""

    def is_so(element: Column) -> Column:
        condition, _ = problems(element, kind, path, required=required)[number]
        return F.coalesce(condition, F.lit(False))

    return is_so


def wide_type(kind: T.DataType) -> T.DataType:
    """The type to parse as: the parser wraps bytes around, so they are read as shorts, and rounds
    decimals, so they are read with as many digits as there can be."""
    if isinstance(kind, T.ByteType):
        return T.ShortType()
    if isinstance(kind, T.DecimalType):
        return T.DecimalType(38, 38 - (kind.precision - kind.scale))
    if isinstance(kind, T.StructType):
        return T.StructType([T.StructField(f.name, wide_type(f.dataType)) for f in kind.fields])
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(wide_type(kind.elementType))
    if isinstance(kind, T.MapType):
        return T.MapType(wide_type(kind.keyType), wide_type(kind.valueType))
    return kind


def nullable(kind: T.DataType) -> T.DataType:
    """The same type where everything may be null, as casts want it."""
    if isinstance(kind, T.StructType):
        return T.StructType([T.StructField(f.name, nullable(f.dataType)) for f in kind.fields])
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(nullable(kind.elementType))
    if isinstance(kind, T.MapType):
        return T.MapType(nullable(kind.keyType), nullable(kind.valueType))
    return kind
