"""Event time: which rows are late, and up to when everything is there.

**Late** is a row whose time is more than the allowed lateness before the latest of those that stand
*earlier in the same partition of the log*. Micro-batches play no part in it: however the log is cut
into them, live, after a failure or in a replay, the same rows are late.

**The watermark** is a time before which nothing more is expected: over all partitions of all timed
inputs the least of (latest time so far - lateness). It is that at the end of a micro-batch, and
never goes back. No row that is not late is before it: not in its own partition, and so not before
the least of all. A partition that has not had a record yet holds it back, since nobody knows what
will come; `BEGINNING` is the watermark then.

**Partitions that are added to a topic later** take part from their first record on. By then the
watermark may have passed what they say, and it does not go back: what was complete has been told.
So a row of theirs that is before the watermark of the micro-batches *before* is late as well, until
the partition has caught up. This is the one case in which it matters how far others had been read:
a replay from the start of the log knows all partitions from the first micro-batch on, waits for
each, and takes such rows. Whoever adds partitions and wants the answers of a replay rebuilds then.

What has to be remembered is one time for each partition of the log. It stands beside the state of
the operators, in versions like theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import sql
from penstock.spark.flows.durations import microseconds
from penstock.spark.reading.decoding import SPAN
from penstock.spark.state.files import Files, StateError

if TYPE_CHECKING:
    from penstock.spark.state.operator import Shard

TIME: Final = "_time"
# In plain batch: the watermark after all rows, the same in each.
END: Final = "_watermark_end"
# Of a row: the watermark of its partition at its place, microseconds.
BEFORE: Final = "_watermark"
LATE: Final = "_late"
# Whether that is of all partitions, and its own had not come so far.
BEHIND: Final = "_behind"
# The watermark before there is one: of the year 1, which is before anything and still a date.
BEGINNING: Final = -62_135_596_800_000_000
KEPT_VERSIONS: Final = 3
BLOCK_BITS: Final = 10
BLOCK: Final = 1 << BLOCK_BITS

# A topic and the number of a partition.
Part = tuple[str, int]


# ---- what is remembered ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """What a micro-batch has of one partition of one timed input, microseconds."""

    number: int
    part: Part
    least_us: int
    latest_us: int
    # By how much a row is at most behind one that stands before it, if that is known.
    behind_us: int | None = None

    @property
    def most_behind_us(self) -> int:
        return self.latest_us - self.least_us if self.behind_us is None else self.behind_us


@dataclass(frozen=True, slots=True)
class Times:
    """How far time has come: by the number of a timed input and its partitions."""

    # None where no record has come yet.
    latest_us: Mapping[int, Mapping[Part, int | None]] = field(default_factory=dict)
    watermark_us: int = BEGINNING

    def before(self, number: int) -> dict[Part, int]:
        """The latest times of an input, where there are any."""
        known = self.latest_us.get(number, {})
        return {part: at for part, at in known.items() if at is not None}

    def advanced(self, seen: Iterable[Seen], lateness_us: Mapping[int, int]) -> Times:
        """After a micro-batch."""
        latest = {number: dict(parts) for number, parts in self.latest_us.items()}
        for each in seen:
            parts = latest.setdefault(each.number, {})
            known = parts.get(each.part)
            parts[each.part] = each.latest_us if known is None else max(known, each.latest_us)
        marks = [
            BEGINNING if at is None else at - lateness_us[number]
            for number, parts in latest.items()
            for at in parts.values()
        ]
        return Times(latest, max(self.watermark_us, min(marks, default=BEGINNING)))

    def may_be_late(self, each: Seen, lateness_us: int) -> bool:
        """Whether any row of a partition in a micro-batch can be late."""
        known = self.before(each.number).get(each.part, each.latest_us)
        return each.least_us < max(known - lateness_us, each.latest_us - lateness_us,
                                   self.watermark_us)  # fmt: skip

    def may_any_be_late(self, blocks: Iterable[Seen], lateness_us: int) -> bool:
        """The same for one input in finer steps: pieces of its partitions, in their order.

        A micro-batch may be long, and its first rows far behind its last without being late.
        """
        reached: dict[Part, int] = {}
        for each in blocks:
            known = reached.get(each.part)
            if known is None:
                known = self.before(each.number).get(each.part, each.least_us)
            if each.least_us < max(known - lateness_us, self.watermark_us):
                return True
            if each.most_behind_us > lateness_us:
                return True
            reached[each.part] = max(known, each.latest_us)
        return False

    def as_json(self) -> bytes:
        inputs = [
            [number, [[*part, at] for part, at in sorted(parts.items())]]
            for number, parts in sorted(self.latest_us.items())
        ]
        return orjson.dumps({"inputs": inputs, "watermark_us": self.watermark_us})

    @classmethod
    def of(cls, data: bytes) -> Times:
        found = orjson.loads(data)
        latest = {
            int(number): {(str(topic), int(part)): at for topic, part, at in parts}
            for number, parts in found["inputs"]
        }
        return cls(latest, int(found["watermark_us"]))


class TimesFolder:
    """The versions of `Times` of a flow."""

    def __init__(self, folder: str) -> None:
        self._files = Files(folder)

    def _versions(self) -> list[int]:
        return sorted(
            int(name.removesuffix(".json"))
            for name in self._files.names()
            if name.endswith(".json")
        )  # fmt: skip

    def before(self, version: int) -> Times | None:
        """The newest before a version; None if there is none."""
        found = [each for each in self._versions() if each < version]
        if not found:
            return None
        name = f"{found[-1]}.json"
        try:
            return Times.of(bytes(self._files.read(name)))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"{self._files.folder}/{name} is damaged: {error}",
                advice="Rebuild the flow from the log, with `penstock flows reset`.",
            ) from error

    def write(self, version: int, times: Times) -> None:
        """Write a version, and forget those that nobody goes back to."""
        self._files.write(f"{version}.json", times.as_json())
        for old in [each for each in self._versions() if each < version][:-KEPT_VERSIONS]:
            self._files.remove(f"{old}.json")


# ---- frames ------------------------------------------------------------------------------


def seen_of(rows: DataFrame, number: int, *more: Column) -> DataFrame:
    """What a frame has of each partition: to be collected as `Seen`, and `more` with it."""
    topic, partition, _ = _position(rows)
    at = F.unix_micros(F.col(TIME))
    return (
        rows.groupBy(F.col(topic).alias("topic"), F.col(partition).alias("partition"))
        .agg(F.min(at).alias("least"), F.max(at).alias("latest"), *more)
        .withColumn("number", F.lit(number))
    )


def spans_of(rows: DataFrame, number: int) -> DataFrame:
    """The same for each span of a frame that the source has typed, as the source says itself."""
    wanted = {"begin": "offset", "number": str(number)}
    said = rows.where(f"{SPAN} IS NOT NULL")
    return sql.select(said, wanted, "topic", "partition", f"{SPAN}.*")


def blocks_of(rows: DataFrame, number: int, *more: Column) -> DataFrame:
    """The same for `BLOCK` records of a partition at a time."""
    topic, partition, offset = _position(rows)
    at = F.unix_micros(F.col(TIME))
    begin = F.shiftleft(F.shiftright(F.col(offset), BLOCK_BITS), BLOCK_BITS).alias("begin")
    return (
        rows.groupBy(F.col(topic).alias("topic"), F.col(partition).alias("partition"), begin)
        .agg(F.min(at).alias("least"), F.max(at).alias("latest"), *more)
        .withColumns({"behind": F.lit(None).cast("bigint"), "number": F.lit(number)})
    )


def with_late(
    rows: DataFrame,
    lateness_us: int,
    before: Mapping[Part, int],
    watermark_us: int = BEGINNING,
) -> DataFrame:
    """The same rows with `_watermark`, which they may not be before, and `_late`.

    It is that of their partition at their place, or that of all before the micro-batch if a
    partition that joined later has not come so far yet: then `_behind` is true.
    """
    topic, partition, offset = _position(rows)
    place = Window.partitionBy(topic, partition).orderBy(offset)
    earlier = F.max(F.unix_micros(F.col(TIME))).over(
        place.rowsBetween(Window.unboundedPreceding, -1)
    )
    if before:
        known = [
            item
            for (name, number), at in before.items()
            for item in (F.lit(f"{name}-{number}"), F.lit(at).cast("bigint"))
        ]
        start = F.create_map(*known)[F.concat_ws("-", F.col(topic), F.col(partition))]
        earlier = F.greatest(earlier, start)
    own = earlier - F.lit(lateness_us)
    told = F.lit(watermark_us).cast("bigint")
    behind = F.coalesce(own < told, F.lit(watermark_us != BEGINNING))
    marked = rows.withColumns({BEFORE: F.when(behind, told).otherwise(own), BEHIND: behind})
    late = F.unix_micros(F.col(TIME)) < F.col(BEFORE)
    return marked.withColumn(LATE, F.coalesce(late, F.lit(False)))


def _position(rows: DataFrame) -> tuple[str, str, str]:
    if "_offset" in rows.columns:
        return "_topic", "_partition", "_offset"
    return "topic", "partition", "offset"


def marked(
    df: DataFrame, *, time: str | Column, lateness: str = "0 seconds"
) -> tuple[DataFrame, DataFrame]:
    """Rows of topics with their event time, and those of them that are late: for plain batch.

    `df` has the columns `_topic`, `_partition` and `_offset`, or those that `format("penstock")`
    gives; `time` is a column of it. The first of the two frames has `_time`, and `_watermark_end`,
    the watermark after all rows, by which operators close what is complete. The second has the
    rows that a flow would put aside, with `_watermark`, that which they came too late for, and
    those whose time is null. The same rows are late as in a flow with the same lateness.
    """
    lateness_us = microseconds(lateness, "lateness")
    rows = df.withColumn(TIME, (F.col(time) if isinstance(time, str) else time).cast("timestamp"))
    if "_offset" not in df.columns:
        named = {name: F.col(name) for name in ("topic", "partition", "offset")}
        rows = rows.withColumns({f"_{name}": column for name, column in named.items()})
    ends = seen_of(rows, 0).where("latest is not null")
    end = ends.agg(F.timestamp_micros(F.min("latest") - F.lit(lateness_us)).alias(END))
    split = with_late(rows, lateness_us, {})
    timed = F.col(TIME).isNotNull()
    good = split.where(~F.col(LATE) & timed).drop(LATE, BEFORE, BEHIND).crossJoin(F.broadcast(end))
    late = split.where(F.col(LATE) | ~timed).drop(LATE, BEHIND)
    return good, late.withColumn(BEFORE, F.timestamp_micros(BEFORE))


def watermark_of(inputs: Mapping[str, pa.Table], shard: Shard) -> int | None:
    """The watermark for an operator, microseconds; None if nothing here has a time.

    In a flow it is that of the micro-batch. In plain batch it is what `marked` has written in each
    row, the least over all inputs; without that, everything there is is here.
    """
    if shard.watermark_us is not None:
        return shard.watermark_us
    found: list[int] = []
    for rows in inputs.values():
        if END in rows.column_names and len(rows):
            least: Any = pc.min(rows[END].cast(pa.timestamp("us", "UTC")).cast(pa.int64())).as_py()
            if least is not None:
                found.append(least)
    return min(found, default=None)


def corrected(occurred: str | Column, sent: str | Column, received: str | Column) -> Column:
    """When something happened by our clock, said by a device whose clock may be wrong.

    The device says when it happened and when it sent the message, by its own clock; we know when we
    received it. The difference of the last two is how wrong its clock is, and the way of the
    message with it, and is added: two events that the device saw a second apart stay so.
    """
    at, out, got = (
        F.unix_micros((F.col(each) if isinstance(each, str) else each).cast("timestamp"))
        for each in (occurred, sent, received)
    )
    return F.timestamp_micros(at + (got - out))
