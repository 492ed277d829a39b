"""Events joined with the table that a changelog keeps: latest rows, or those of the event's time.

    @flow(inputs=[SALES, RATES], output=topic("taxed"))
    def taxed(sales, rates):
        return enrich(sales, rates, on={"country": "code"}, columns=["rate"], version="as_of")

The changes are a stream like the events, `stream(TOPIC, debezium="...")`, and the table is kept as
state in shards by the columns of `on`, which say which row an event belongs to. At most one row of
the table has their values at a time; where several do, the one that changed last counts. A row that
is deleted, or gets other values, takes its own place with it: if another row has that place already
(by the key of its record), it stays. What had to give way is forgotten until it changes again.

**latest** answers at once, with the table as the log has delivered it up to and including this
micro-batch. Whether a change was there before an event therefore depends on how fast both topics
are read, and a replay may answer otherwise. It is right where the newest is what is wanted.

**as_of** answers with the row that was valid at the event's own time, and the same in every replay:
an event waits until the watermark has passed its time, so that all changes up to then are known.
A change counts from its own time on (`_time` if the stream of changes declares one, otherwise the
time of the record), of several at the same time the last in the log; or from the time in the column
`valid_from`, whichever is later: what was written after an event never changes its answer. With
`valid_from` the row with the latest such time counts, so that a table of rates by day of validity
can be joined; a deletion ends the validity of its row, and of no later one; which row it was, a
tombstone says by its key. In a flow both streams must have a time, so that the watermark speaks for
both. Kept are one row for each key, and what is newer than the watermark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa
from pyspark.sql import types as T  # noqa: N812

from penstock.spark import sql
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.joins.enriching import (
    ANYBODY,
    AT,
    FROM,
    GONE,
    KNOWN,
    OWNER,
    TIME,
    WATERMARK,
    AsOf,
    Latest,
    Shape,
    kept_name,
    key_name,
    sent_name,
)
from penstock.spark.places import before
from penstock.spark.state import Operator, Planning, apply, current
from penstock.spark.state.applying import Direct
from penstock.spark.state.schemas import PLAIN_KEY, arrow_schema, is_nested

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Version = Literal["latest", "as_of"]
How = Literal["left", "inner"]

STAMP: Final = "_timestamp"
AFTER: Final = "_after"
BEFORE: Final = "_before"
KEY: Final = "_key"
_PLACES: Final = ("_topic", "_partition", "_offset")


def enrich(
    events: DataFrame,
    changes: DataFrame,
    *,
    on: Mapping[str, str] | Sequence[str] | str,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    how: How = "left",
    version: Version = "latest",
    valid_from: str | None = None,
    name: str | None = None,
) -> DataFrame:
    """Events with columns of the row that they belong to.

    `on` maps columns of the events to columns of the table; a name alone means the same in both.
    `columns` are those of the table that are wanted, all but those of `on` if not given, or a
    mapping of them to the names that they shall have. With how="left" an event that has no row
    keeps nulls in their place, with "inner" it is left out. For `version` and `valid_from` see the
    module.
    """
    where = before()
    pairs = _pairs(on)
    row = _row_type(changes, where)
    _check_columns(events, row, pairs, version, valid_from, where)
    wanted = _wanted(row, columns, pairs, where)
    clashing = sorted(set(wanted.values()) & set(events.columns))
    if clashing:
        raise DeclarationError(
            f"{where}enrich: the events have a column {clashing[0]!r} already",
            advice=f'Give it another name, as in columns={{"{clashing[0]}": "other"}}.',
        )
    _check_version(changes, how, version, where)
    keys = _key_columns(events, row, pairs, where)
    told = _changes(changes, row, pairs, list(wanted), [kind for _, kind in keys], valid_from)
    sent = sql.select(
        events,
        {sent_name(each): sql.quoted(each) for each in events.columns}
        | {key_name(at): column for at, (column, _) in enumerate(keys)},
    )
    out = T.StructType(
        [T.StructField(each.name, each.dataType, True) for each in events.schema.fields]
        + [T.StructField(new, row[old].dataType, True) for old, new in wanted.items()]
    )
    names = tuple(key_name(at) for at in range(len(keys)))
    shape = Shape(
        tuple(events.columns),
        tuple(wanted.items()),
        names,
        how == "inner",
        _kept(told, names, list(wanted)),
        arrow_schema(out),
    )
    operator: Operator = Latest(shape)
    if version == "as_of":
        everything = current() is None and WATERMARK not in events.columns
        operator = AsOf(shape, everything)
    taken = {sent_name(each): each for each in events.columns}
    taken |= {key_name(at): mine for at, mine in enumerate(pairs)}
    return apply(
        {"events": sent, "changes": told},
        operator,
        key=names,
        schema=out,
        name=name,
        direct={"events": Direct(events, taken)},
        waits=version == "as_of",
    )


def _kept(changes: DataFrame, keys: Sequence[str], columns: Sequence[str]) -> pa.Schema:
    """What the state keeps of each row."""
    names = [*keys, *(kept_name(each) for each in columns), FROM, OWNER]
    fields = [T.StructField(each, changes.schema[each].dataType, True) for each in names]
    return arrow_schema(T.StructType(fields))


def _pairs(on: Mapping[str, str] | Sequence[str] | str) -> dict[str, str]:
    if isinstance(on, str):
        return {on: on}
    return dict(on) if isinstance(on, Mapping) else {each: each for each in on}


def _row_type(changes: DataFrame, where: str) -> T.StructType:
    found = changes.schema[AFTER].dataType if AFTER in changes.columns else None
    if not isinstance(found, T.StructType) or BEFORE not in changes.columns:
        raise DeclarationError(
            f"{where}enrich: the second frame is no stream of changes: it has no structs "
            f"{BEFORE!r} and {AFTER!r}",
            advice='Declare it as stream("TOPIC", debezium="id long, name string").',
        )
    return found


def _check_columns(
    events: DataFrame,
    row: T.StructType,
    pairs: Mapping[str, str],
    version: Version,
    valid_from: str | None,
    where: str,
) -> None:
    if not pairs:
        raise DeclarationError(
            f"{where}enrich: on= names no column",
            advice='Say which columns belong together, as in on={"customer_id": "id"}.',
        )
    for mine, theirs in pairs.items():
        _check_there(mine, events.columns, "the events have", where)
        _check_there(theirs, row.names, "the table has", where)
    if valid_from is not None:
        _check_there(valid_from, row.names, "the table has", where)
        if version != "as_of":
            raise DeclarationError(
                f'{where}enrich: valid_from= is for version="as_of"',
                advice='With version="latest" the row that changed last counts.',
            )
        if not isinstance(row[valid_from].dataType, T.TimestampType | T.DateType):
            raise DeclarationError(
                f"{where}enrich: the table's column {valid_from!r}, which says from when a row "
                f"is valid, is {row[valid_from].dataType.simpleString()}, not a time",
                advice="Declare it as timestamp or date.",
            )
    if version == "as_of" and TIME not in events.columns:
        raise DeclarationError(
            f"{where}enrich: the events have no time, and the row of their time is wanted",
            advice='Say which column is their time, as in stream("TOPIC", ..., time="at").',
        )


def _check_version(changes: DataFrame, how: How, version: Version, where: str) -> None:
    if how not in {"left", "inner"} or version not in {"latest", "as_of"}:
        raise DeclarationError(
            f"{where}enrich: how={how!r}, version={version!r} is not known",
            advice='how is "left" or "inner", version is "latest" or "as_of".',
        )
    if version == "as_of" and TIME not in changes.columns and isinstance(current(), Planning):
        raise DeclarationError(
            f"{where}enrich: the stream of changes has no time, so that nobody can say when all "
            "changes up to the time of an event are there",
            advice='Give it one, such as that of its records: stream("TOPIC", ..., '
            'time="_timestamp").',
        )


def _check_there(name: str, names: Sequence[str], what: str, where: str) -> None:
    if name not in names:
        raise DeclarationError(
            f"{where}enrich: {what} no column {name!r}; there are "
            f"{', '.join(each for each in names if not each.startswith('_'))}"
        )


def _wanted(
    row: T.StructType,
    columns: Sequence[str] | Mapping[str, str] | None,
    pairs: Mapping[str, str],
    where: str,
) -> dict[str, str]:
    if columns is None:
        return {each: each for each in row.names if each not in pairs.values()}
    found = dict(columns) if isinstance(columns, Mapping) else {each: each for each in columns}
    for each in found:
        _check_there(each, row.names, "the table has", where)
    return found


def _key_columns(
    events: DataFrame, row: T.StructType, pairs: Mapping[str, str], where: str
) -> list[tuple[str, str]]:
    """The key as columns of the events, in SQL, and the types that both sides have it in."""
    found = []
    for mine, theirs in pairs.items():
        left, right = events.schema[mine].dataType, row[theirs].dataType
        column = sql.quoted(mine)
        if is_nested(left):
            raise DeclarationError(
                f"{where}enrich: {mine!r} is {left.simpleString()}, not a plain value",
                advice=PLAIN_KEY,
            )
        if isinstance(left, T.IntegralType) and isinstance(right, T.IntegralType):
            found.append((f"CAST({column} AS bigint)", "bigint"))
        elif left == right:
            found.append((column, left.simpleString()))
        else:
            raise DeclarationError(
                f"{where}enrich: {mine!r} of the events is {left.simpleString()}, and {theirs!r} "
                f"of the table is {right.simpleString()}: they are never equal",
                advice="Cast the column of the events to the type of the table's.",
            )
    return found


def _changes(
    changes: DataFrame,
    row: T.StructType,
    pairs: Mapping[str, str],
    wanted: Sequence[str],
    kinds: Sequence[str],
    valid_from: str | None,
) -> DataFrame:
    """What the state needs of each change: key, columns, whether the row is gone, and times.

    A row whose key has changed is gone from its old one: two rows come of it.
    """
    known = f"coalesce({', '.join(each for each in (TIME, STAMP) if each in changes.columns)})"
    keys = list(zip(pairs.values(), kinds, strict=True))
    after = [f"CAST({AFTER}.{sql.quoted(each)} AS {kind})" for each, kind in keys]
    before = [f"CAST({BEFORE}.{sql.quoted(each)} AS {kind})" for each, kind in keys]
    # A tombstone has only its key.
    lost = [_from_key(changes, each, kind, alone=len(keys) == 1) for each, kind in keys]
    start_new, start_old = known, known
    if valid_from is not None:
        in_key = _start_in_key(changes, valid_from)
        start_new, start_old = (
            f"coalesce(CAST({each}.{sql.quoted(valid_from)} AS timestamp), {others})"
            for each, others in ((AFTER, known), (BEFORE, f"{in_key}, {known}"))
        )
    own = [f"{AFTER}.{sql.quoted(each)}" for each in wanted]
    owner = _owner(changes)
    new = _entry(after, own, wanted, "false", start_new, owner)
    # Null, and of the same type.
    nothing = [f"if(false, {each}, null)" for each in own]
    old_key = [f"coalesce({mine}, {key})" for mine, key in zip(before, lost, strict=True)]
    # A record whose own key has changed with the row does not say whose the old one was.
    in_keys = [_from_key(changes, each, kind, alone=False) for each, kind in keys]
    renamed = " OR ".join(f"{mine} <> {key}" for mine, key in zip(before, in_keys, strict=True))
    old = _entry(old_key, nothing, wanted, "true", start_old, f"if({renamed}, {ANYBODY}L, {owner})")
    moved = [
        f"({mine} IS NOT NULL AND NOT {mine} <=> {theirs})"
        for mine, theirs in zip(before, after, strict=True)
    ]
    if valid_from is not None:
        # What was to be valid later on, and is not any more.
        moved.append(f"({start_old} > {known} AND NOT {start_old} <=> {start_new})")
    entries = (
        f"CASE WHEN {AFTER} IS NULL THEN array({old}) "
        f"WHEN {' OR '.join(moved)} THEN array({old}, {new}) ELSE array({new}) END"
    )
    places = [each for each in _PLACES if each in changes.columns]
    told = sql.select(changes, {"_e": f"explode({entries})", KNOWN: known}, *places)
    counts = f"greatest(coalesce(_e.{FROM}, {KNOWN}), {KNOWN})"
    return sql.select(told, {AT: counts}, "_e.*", KNOWN, *places)


def _entry(
    key: Sequence[str], columns: Sequence[str], names: Sequence[str], gone: str, start: str,
    owner: str,
) -> str:  # fmt: skip
    fields = {key_name(at): each for at, each in enumerate(key)}
    fields |= {kept_name(own): each for each, own in zip(columns, names, strict=True)}
    fields |= {GONE: gone, FROM: start, OWNER: owner}
    return f"struct({', '.join(f'{text} AS {sql.quoted(name)}' for name, text in fields.items())})"


def _owner(changes: DataFrame) -> str:
    """Which row of which table it is."""
    if KEY not in changes.columns:
        return f"{ANYBODY}L"
    return f"xxhash64({', '.join(each for each in (_PLACES[0], KEY) if each in changes.columns)})"


def _start_in_key(changes: DataFrame, valid_from: str) -> str:
    """From when the row of a tombstone was valid, if its key says so as a date or a time."""
    text = _from_key(changes, valid_from, "string", alone=False)
    said = f"{AFTER} IS NULL AND {text} RLIKE '^[0-9]{{4}}-'"
    return f"CASE WHEN {said} THEN try_cast({text} AS timestamp) END"


def _from_key(changes: DataFrame, name: str, kind: str, *, alone: bool) -> str:
    """A column of the record's key, which is JSON, maybe beside its schema, or the column alone."""
    if KEY not in changes.columns:
        return f"CAST(null AS {kind})"
    text, own = f"CAST({KEY} AS string)", name.replace("\\", "\\\\").replace('"', '\\"')
    found = ", ".join(
        f'get_json_object({text}, "{path}")' for path in (f"$.payload['{own}']", f"$['{own}']")
    )
    found = f"coalesce({found})"
    if alone:
        found = f"CASE WHEN startswith({text}, '{{') THEN {found} ELSE {text} END"
    return f"try_cast({found} AS {kind})"
