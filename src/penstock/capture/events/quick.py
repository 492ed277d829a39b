"""The short way for plain tables in JSON: a whole envelope by one formatting of bytes.

Most tables need nothing but their rows as they come: no filter, no mask, nothing to fill in. For
these the envelope of each operation is one template, made for the Table object, with a place for
each column. What is out of the ordinary (a change of the key, a truncate, an unavailable value)
goes the long way, through the composer, change by change, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.capture.events.batch import Batch
from penstock.capture.events.encoding import Moment
from penstock.capture.source import UNAVAILABLE, Change, Fragment, Row

AddAll = Callable[[Sequence[Change], Batch], int]
Rows = Callable[[Sequence[Row], Fragment], list[bytes]]


def envelope(head: bytes, before: bytes, after: bytes, op: bytes, tail: bytes) -> bytes:
    """A template; `head` opens the object, `before` and `after` are templates of rows, or null."""
    return (
        head
        + b'"before":'
        + before
        + b',"after":'
        + after
        + b',"source":%b,"transaction":null,"op":"'
        + op
        + b'",%b'
        + tail
    )


def quick_rows(head: bytes, row: bytes, tail: bytes, op: bytes, moment: Moment) -> Rows:
    """A function that makes the values of rows of a snapshot."""
    template = envelope(head, b"null", row, op, tail)

    def values(rows: Sequence[Row], source: Fragment) -> list[bytes]:
        stamp = moment.json
        return [template % (*row, source, stamp) for row in rows]

    return values


def quick_changes(
    topic: str,
    head: bytes,
    row: bytes,
    tail: bytes,
    key: Callable[[Row], bytes],
    key_of: Callable[[Row], Row],
    moment: Moment,
    slow: Callable[[Change, Batch], int],
    *,
    tombstones: bool,
) -> AddAll:
    """A function that adds changes of one keyed table to a batch."""
    null = b"null"
    created = envelope(head, null, row, b"c", tail)
    updated = envelope(head, row, row, b"u", tail)
    updated_blind = envelope(head, null, row, b"u", tail)
    deleted = envelope(head, row, null, b"d", tail)

    def add_all(changes: Sequence[Change], batch: Batch) -> int:
        run = batch.run(topic)
        add_key, add_value = run.keys.append, run.values.append
        stamp = moment.json
        count = 0
        for change in changes:
            _, op, before, after, source, _ = change
            if op == "c" and after is not None:
                value = created % (*after, source, stamp)
                add_key(key(after))
                add_value(value)
                count += 1
            elif (
                op == "u"
                and after is not None
                and UNAVAILABLE not in after
                and (before is None or key_of(before) == key_of(after))
            ):
                add_key(key(after))
                add_value(
                    updated_blind % (*after, source, stamp)
                    if before is None
                    else updated % (*before, *after, source, stamp)
                )
                count += 1
            elif op == "d" and before is not None:
                old_key = key(before)
                add_key(old_key)
                add_value(deleted % (*before, source, stamp))
                if tombstones:
                    add_key(old_key)
                    add_value(None)
                count += 1
            else:
                count += slow(change, batch)
                run = batch.run(topic)
                add_key, add_value = run.keys.append, run.values.append
        return count

    return add_all
