"""Event time told by the tasks that read, so that it needs no job of its own in a micro-batch.

A task that reads partitions of the log reads each in order. Given how far time had come before the
micro-batch it tells by itself which rows are late, and at its end how far its partitions have come.
Tasks behind a shuffle begin when all before it have ended: there the operators find all that was
told, and with it the watermark. The driver finds the same afterwards.

    CHECKPOINT/penstock-time/now.json            the micro-batch that runs, and what was before it
    CHECKPOINT/penstock-time/BATCH-TASK.json     what a task has seen in it

What a task tells follows from the log and from what was before, so a task that is run again writes
the same. All of it may be lost between two micro-batches, and is not synced to the disk: the next
one begins by writing it anew, and `TimesFolder` keeps what counts.

**Whether all have told** is known by their number. Spark may leave tasks out, or end them early,
where it can show that their rows are of no use; then time has passed all the same, and a task of an
operator that finds it untold fails (`UnreadError`). The driver reads by itself and begins again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa

from penstock.spark.reading.decoding import ASIDE_TYPE, Typing
from penstock.spark.source.planning import Range
from penstock.spark.source.told import told as told_now
from penstock.spark.state.files import Files, StateError
from penstock.spark.state.packing import Packing
from penstock.spark.state.time import BEGINNING, Part, Seen, Times

# Beside the checkpoint's own folders.
FOLDER: Final = "penstock-time"
# The same of micro-batches whose plan is prepared once.
PREPARED: Final = "penstock-time-prepared"
_NOW: Final = "now.json"
_NEVER: Final = np.iinfo(np.int64).min


class UnreadError(StateError):
    """Not all tasks that read have told, or one too many of a micro-batch that was given up."""


@dataclass(frozen=True, slots=True)
class Now:
    """The micro-batch that runs."""

    batch_id: int
    # By the number of a stream.
    lateness_us: Mapping[int, int]
    # How far time had come before it.
    times: Times
    # What is sent of streams that are packed by shard, by their numbers.
    packings: Mapping[int, Packing] = field(default_factory=dict)
    shards: int = 0


@dataclass(slots=True)
class Told:
    """What a task has seen of one partition in a micro-batch."""

    topic: str
    partition: int
    # The first offset of the range that was read.
    start: int
    latest_us: int | None = None
    read: int = 0
    bad: int = 0
    late: int = 0
    # The first and last late one.
    late_at: tuple[int, int] | None = None
    # Of the stream in its flow.
    number: int = 0

    @property
    def part(self) -> Part:
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class Heard:
    """What all tasks of a micro-batch have told so far."""

    tasks: int
    parts: Sequence[Told]

    def after(self, now: Now) -> Times:
        """How far time has come."""
        seen = [
            Seen(each.number, each.part, each.latest_us, each.latest_us)
            for each in self.parts
            if each.latest_us is not None
        ]
        return now.times.advanced(seen, now.lateness_us)

    def of(self, number: int) -> list[Told]:
        """What was told of one stream."""
        return [each for each in self.parts if each.number == number]


@dataclass(frozen=True, slots=True)
class Watch:
    """The folder by which tasks and driver tell each other."""

    folder: str

    def begin(self, now: Now) -> None:
        """Before the tasks of a micro-batch run; what was told before, of any, is gone."""
        files = self._files
        for name in files.names():
            if name != _NOW:
                files.remove(name)
        said = {
            "batch_id": now.batch_id,
            "lateness_us": sorted(now.lateness_us.items()),
            "times": now.times.as_json().decode(),
            "packings": [[number, asdict(each)] for number, each in now.packings.items()],
            "shards": now.shards,
        }
        files.write(_NOW, orjson.dumps(said), durable=False)

    def now(self) -> Now:
        """What runs now, for a task."""
        found = orjson.loads(bytes(self._files.read(_NOW)))
        return Now(
            found["batch_id"],
            dict(found["lateness_us"]),
            Times.of(found["times"].encode()),
            {number: Packing.of(each) for number, each in found["packings"]},
            found["shards"],
        )

    def tell(
        self, now: Now, ranges: Sequence[Range], parts: Iterable[Told], number: int = 0
    ) -> None:
        """At the end of a task that has read these ranges of a stream."""
        read = [(*each.place, each.start) for each in ranges]
        task = sha256(repr((number, read)).encode())
        said = orjson.dumps([asdict(each) for each in parts])
        self._files.write(f"{now.batch_id}-{task.hexdigest()[:16]}.json", said, durable=False)

    def heard(self, batch_id: int) -> Heard:
        """All that was told of a micro-batch."""
        files = self._files
        names = [name for name in files.names() if name.startswith(f"{batch_id}-")]
        parts: dict[tuple[int, Part], Told] = {}
        for name in names:
            for each in orjson.loads(bytes(files.read(name))):
                late_at = each.pop("late_at")
                told = Told(**each, late_at=None if late_at is None else tuple(late_at))
                known = parts.get((told.number, told.part))
                # A task of a micro-batch before may still have run when this one began.
                if known is None or known.start < told.start:
                    parts[told.number, told.part] = told
        return Heard(len(names), list(parts.values()))

    @property
    def _files(self) -> Files:
        return Files(self.folder)


@dataclass(frozen=True, slots=True)
class Watermark:
    """That of a micro-batch, found out by a task of an operator when it begins."""

    watch: Watch
    batch_id: int
    # That read.
    tasks: int

    def __call__(self) -> int:
        now = self.watch.now()
        if now.batch_id != self.batch_id:
            raise StateError(
                f"this task is one of micro-batch {self.batch_id}, and {now.batch_id} runs by now",
                advice="Spark has given the task up: nothing needs to be done.",
            )
        heard = self.watch.heard(self.batch_id)
        if heard.tasks != self.tasks:
            raise UnreadError(
                f"{heard.tasks} tasks have told how far time has come, of {self.tasks}",
                advice="The micro-batch is begun again: nothing needs to be done.",
            )
        return heard.after(now).watermark_us


@dataclass(frozen=True, slots=True)
class ToldWatermark:
    """The same in a plan that is prepared once."""

    watch: Watch
    checkpoint: str

    def __call__(self) -> int:
        batch = told_now(self.checkpoint)
        return Watermark(self.watch, batch.batch_id, batch.timed)()


# ---- in the tasks that read --------------------------------------------------------------


def typed(
    typing: Typing, ranges: Sequence[Range], records: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Typed rows of a task whose source tells the time: in the order of each partition."""
    assert typing.watch is not None
    watch = Watch(typing.watch)
    now = watch.now()
    watching = Watching(now, {each.place: each.start for each in ranges}, typing.number)
    packing = now.packings.get(typing.number)
    for each in records:
        rows = typing.decode(each, watching)
        yield rows if packing is None else packing.packed(rows, now.shards)
    watch.tell(now, ranges, watching.told(), typing.number)


@dataclass(slots=True)
class Watching:
    """What a task knows of its partitions on the way through them."""

    now: Now
    starts: Mapping[Part, int]
    # Of the stream in its flow.
    number: int = 0
    _told: dict[Part, Told] = field(default_factory=dict)

    def told(self) -> list[Told]:
        return [self._of(part) for part in self.starts]

    def _of(self, part: Part) -> Told:
        return self._told.setdefault(part, Told(*part, self.starts[part], number=self.number))

    def aside(
        self,
        part: Part,
        offsets: pa.Array,
        times: pa.Array,
        has_value: pa.BooleanArray,
        bad: int,
    ) -> pa.Array:
        """For each of the next rows of a partition: null, or what it came too late for."""
        told = self._of(part)
        told.read += len(offsets)
        told.bad += bad
        known = self.now.times.before(self.number).get(part, _NEVER)
        reached = known if told.latest_us is None else max(known, told.latest_us)
        timed = np.asarray(times.is_valid())
        at = np.asarray(times.cast(pa.int64()).fill_null(_NEVER))
        if not timed.any():
            return pa.nulls(len(times), ASIDE_TYPE)
        latest = int(at.max())
        told.latest_us = latest if told.latest_us is None else max(told.latest_us, latest)
        before, behind = self._before(at, reached)
        late = (at < before) & timed & np.asarray(has_value)
        if not late.any():
            return pa.nulls(len(times), ASIDE_TYPE)
        where = np.asarray(offsets)[late]
        told.late += len(where)
        first = int(where[0]) if told.late_at is None else told.late_at[0]
        told.late_at = first, int(where[-1])
        arrays: list[Any] = [pa.array(before), pa.array(behind)]
        fields = list(ASIDE_TYPE)
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=pa.array(~late))

    def _before(self, at: Any, reached: int) -> tuple[Any, Any]:
        """What each row may not be before, and whether that is the watermark of all partitions.

        Nothing can be before `_NEVER`, which stands where nothing has come yet.
        """
        earlier = np.maximum.accumulate(np.concatenate([[reached], at[:-1]]))
        # What is so long ago that there is no time before it has no lateness either.
        lateness_us = self.now.lateness_us[self.number]
        own = np.where(earlier < _NEVER + lateness_us, _NEVER, earlier - lateness_us)
        mark = self.now.times.watermark_us
        # Before there is one, a partition that has not begun is not behind it.
        behind = (own < mark) & ((earlier != _NEVER) | (mark != BEGINNING))
        return np.where(behind, mark, own), behind
