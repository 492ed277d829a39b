"""Derived stores: tables, indexes and caches that are kept in step with a topic of the log.

**What a sink is.** A sink holds one table: rows of a `Schema` whose key says which row is which.
It is derived: whatever is in it can be thrown away and made again from the log. Nobody else writes
to it.

**What it is given.** `apply` takes `Changes`: rows to put in (`upserts`), keys to take out
(`deletes`), at most one of either for each key (the last change of the key counts, whoever calls
has seen to it), and the `Position` in the log up to which the store is right afterwards: the next
offset to read, for each partition. Types are exactly those of the schema, which allows few enough
for every store to know them all (see `schema`).

**Exactly once in effect.** Rows and position become visible together, in one transaction. A store
that has none writes the rows first, in a way that does no harm if done twice, and then the
position. So whatever was killed at whatever moment: opened again, the store says in `position()`
from where to read, and reading again from there makes it right. Nothing else remembers a position.
- Changes up to a position that the store has already reached are a repetition: nothing is done.
- Changes that begin after the store's position leave a gap, those that go back in some partition
  would bring back old rows: both are an `OutOfStepError`, and nothing is done. (Changes that begin
  before the store's position and end after it are welcome: the rows are put in once more.)
- The ids of topics in the position are kept with it: offsets of one topic mean nothing in another.

**One writer.** `open` makes the caller the writer. Whoever was it before finds out at his next
`apply` with a `FencedError`, in the same transaction that would have written. Reading (`position`,
`scan`, `wait_for`, `stored_schema`) needs no `open` and fences nobody.

**What does not fit is put aside**, never dropped in silence and never in the way of the rest: a row
that the store cannot take (a text with NUL where the database has none, a number out of range) is
handed to `aside` as `Refused`, with its key, its place in the log and the reason, *before* the
position moves. `aside` makes it durable, so a row may be put aside twice and not be lost; the
store keeps what it had under the key. More than `MAX_REFUSED` in one go is an error instead: then
it is not the rows that are wrong.

**Evolution.** `open` with a schema that has more columns adds them, empty in old rows. Columns that
the schema does not have any more stay, empty in new rows. A number may become wider. Anything else
(another key, another type) is a `SchemaChangedError`: build the store anew.

**Building anew.** `beside()` is a sink for the same table under another name, to be filled from the
start of the log while the old one is still kept and read. Its `switch()` puts it in the place of
the old one in one step, position included, and removes the old one. Asked again after a kill,
`beside()` finds what was begun.

**Rows that lapse.** A store with a time to live (`lifetime_s`) has a row until so long after the
time of its last record, by the store's own clock (`now_s`), whenever it was written: so a rebuild
brings nothing back, and whoever compares knows what must be there.

**Read your own writes.** `wait_for(position, timeout_s)` returns when the store has reached it.

**Reading for comparison.** `scan(low, high)` gives the rows ordered by key (text by its UTF-8
bytes, numbers and times by their value), from `low` (included) to `high` (not included), all
columns, types as in `stored_schema()`.

**Errors** are `SinkError`s; `retriable` says whether the same call may succeed later by itself.

`open_sink("sqlite:///shop.db?table=orders")` makes a sink from a URL; `penstock.testing.sinks` has
the tests that each kind of store passes.
"""

from __future__ import annotations

from penstock.sinks.contract import (
    MAX_REFUSED,
    Applied,
    Aside,
    Changes,
    Key,
    Position,
    Refused,
    Sink,
)
from penstock.sinks.errors import (
    FencedError,
    MissingPackageError,
    NotReachedError,
    NotReadableError,
    OutOfStepError,
    SchemaChangedError,
    SinkError,
    StoreError,
    StoreUnreachableError,
    TooManyRefusedError,
)
from penstock.sinks.schema import Schema
from penstock.sinks.stores import Address, open_sink

__all__ = [
    "MAX_REFUSED",
    "Address",
    "Applied",
    "Aside",
    "Changes",
    "FencedError",
    "Key",
    "MissingPackageError",
    "NotReachedError",
    "NotReadableError",
    "OutOfStepError",
    "Position",
    "Refused",
    "Schema",
    "SchemaChangedError",
    "Sink",
    "SinkError",
    "StoreError",
    "StoreUnreachableError",
    "TooManyRefusedError",
    "open_sink",
]
