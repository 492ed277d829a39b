"""Event time told by the tasks that read, so that it needs no job of its own in a micro-batch.

A task that reads partitions of the log reads each in order. Given how far time had come before the
micro-batch it tells by itself which rows are late, and at its end how far its partitions have come.
Tasks behind a shuffle begin when all before it have ended: there the operators find all that was
told, and with it the watermark. The driver finds the same afterwards.

    CHECKPOINT/penstock-time/now.json            the micro-batch that runs, and what was before it
    CHECKPOINT/penstock-time/BATCH-TASK.json     what a task has seen in it

What a task tells follows from the log and from what was before, so a task that is run again writes
the same. All of it may be lost between two micro-batches: `TimesFolder` keeps what counts.

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
from penstock.spark.state.files import Files, StateError
from penstock.spark.state.time import BEGINNING, Part, Seen, Times

# Beside the checkpoint's own folders.
FOLDER: Final = "penstock-time"
# The one input of a flow whose source tells its time.
INPUT: Final = 0
_NOW: Final = "now.json"
_NEVER: Final = np.iinfo(np.int64).min


class UnreadError(StateError):
    """Not all tasks that read have told, or one too many of a micro-batch that was given up."""


def is_unread(error: BaseException | None) -> bool:
    """Whether that is why a micro-batch failed, as far as can be seen from what Spark says."""
    while error is not None:
        if UnreadError.__name__ in str(error):
            return True
        error = error.__cause__
    return False


@dataclass(frozen=True, slots=True)
class Now:
    """The micro-batch that runs."""

    batch_id: int
    lateness_us: int
    # How far time had come before it.
    times: Times


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
            Seen(INPUT, each.part, each.latest_us, each.latest_us)
            for each in self.parts
            if each.latest_us is not None
        ]
        return now.times.advanced(seen, {INPUT: now.lateness_us})


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
            "lateness_us": now.lateness_us,
            "times": now.times.as_json().decode(),
        }
        files.write(_NOW, orjson.dumps(said))

    def now(self) -> Now:
        """What runs now, for a task."""
        found = orjson.loads(bytes(self._files.read(_NOW)))
        return Now(
            found["batch_id"], found["lateness_us"], Times.of(found["times"].encode())
        )  # fmt: skip

    def tell(self, now: Now, ranges: Sequence[Range], parts: Iterable[Told]) -> None:
        """At the end of a task that has read these ranges."""
        task = sha256(repr([(*each.place, each.start) for each in ranges]).encode())
        said = orjson.dumps([asdict(each) for each in parts])
        self._files.write(f"{now.batch_id}-{task.hexdigest()[:16]}.json", said)

    def heard(self, batch_id: int) -> Heard:
        """All that was told of a micro-batch."""
        files = self._files
        names = [name for name in files.names() if name.startswith(f"{batch_id}-")]
        parts: dict[Part, Told] = {}
        for name in names:
            for each in orjson.loads(bytes(files.read(name))):
                late_at = each.pop("late_at")
                told = Told(**each, late_at=None if late_at is None else tuple(late_at))
                known = parts.get(told.part)
                # A task of a micro-batch before may still have run when this one began.
                if known is None or known.start < told.start:
                    parts[told.part] = told
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


# ---- in the tasks that read --------------------------------------------------------------


def typed(
    typing: Typing, ranges: Sequence[Range], records: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Typed rows of a task whose source tells the time: in the order of each partition."""
    assert typing.watch is not None
    watch = Watch(typing.watch)
    now = watch.now()
    watching = Watching(now, {each.place: each.start for each in ranges})
    for each in records:
        yield typing.decode(each, watching)
    watch.tell(now, ranges, watching.told())


@dataclass(slots=True)
class Watching:
    """What a task knows of its partitions on the way through them."""

    now: Now
    starts: Mapping[Part, int]
    _told: dict[Part, Told] = field(default_factory=dict)

    def told(self) -> list[Told]:
        for part, start in self.starts.items():
            self._told.setdefault(part, Told(*part, start))
        return list(self._told.values())

    def aside(
        self,
        part: Part,
        offsets: pa.Array,
        times: pa.Array,
        has_value: pa.BooleanArray,
        bad: int,
    ) -> pa.Array:
        """For each of the next rows of a partition: null, or what it came too late for."""
        told = self._told.setdefault(part, Told(*part, self.starts[part]))
        told.read += len(offsets)
        told.bad += bad
        known = self.now.times.before(INPUT).get(part, _NEVER)
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
        least = _NEVER + self.now.lateness_us
        own = np.where(earlier < least, _NEVER, earlier - self.now.lateness_us)
        mark = self.now.times.watermark_us
        # Before there is one, a partition that has not begun is not behind it.
        behind = (own < mark) & ((earlier != _NEVER) | (mark != BEGINNING))
        return np.where(behind, mark, own), behind
