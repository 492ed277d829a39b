"""Frames of the replication stream to committed transactions.

The server sends a transaction when it has been committed: BEGIN, its changes, COMMIT. A large one
it may send earlier, in blocks between those of others; these go to the spool until their commit
comes. Either way the order is that of the commits, and the place of a commit in the server's log
is the position that it leads to.

Nothing here reads or writes anything: what the catalog knows of a table comes by `describe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import orjson

import penstock
from penstock.capture.blocks import ROWS_MIN, Block, Several
from penstock.capture.postgres import pgoutput
from penstock.capture.postgres.decoders import Relation, StaleError
from penstock.capture.postgres.pgoutput import MalformedError, RelationMessage, TypeMessage
from penstock.capture.postgres.rows import BYTES_MAX, ROW_BYTES_MAX
from penstock.capture.postgres.spool import Spool
from penstock.capture.source import (
    CREATE,
    DELETE,
    TRUNCATE,
    UNAVAILABLE,
    UPDATE,
    Change,
    Part,
    Position,
    Row,
    Table,
)

# Messages that captures write for themselves; nobody else sees them.
OWN_PREFIX: Final = "penstock."
PART_CHANGES: Final = 5000
PART_BYTES: Final = 8 << 20
# A transaction's own messages are kept until its end; more is not a use of messages.
MESSAGES_MAX: Final = 10_000
_NAMES_MAX: Final = 10_000

_new: Final = tuple.__new__
_KEEPALIVE, _DATA = ord("k"), ord("w")
_INSERT, _UPDATE, _DELETE = ord("I"), ord("U"), ord("D")
_BEGIN, _COMMIT, _RELATION, _TYPE = ord("B"), ord("C"), ord("R"), ord("Y")
_TRUNCATE, _MESSAGE, _ORIGIN = ord("T"), ord("M"), ord("O")
_START, _STOP, _STREAM_COMMIT, _ABORT = ord("S"), ord("E"), ord("c"), ord("A")
_ROWS: Final = frozenset((_INSERT, _UPDATE, _DELETE))
_NEW, _KEY, _OLD = ord("N"), ord("K"), ord("O")

Describe = Callable[[RelationMessage, Mapping[int, TypeMessage], Relation | None], Relation | None]


@dataclass(frozen=True, slots=True)
class Mark:
    """A message of ours, where it stands in the stream."""

    prefix: str
    content: bytes


class SourceBlocks:
    """Puts Debezium's source block together: most of it once for a table and a transaction."""

    def __init__(self, server: str, database: str) -> None:
        self._start = b'{"version":%b,"connector":"postgresql","name":%b,"ts_ms":' % (
            orjson.dumps(penstock.__version__),
            orjson.dumps(server),
        )
        self._database = orjson.dumps(database)
        self._names: dict[Table, bytes] = {}

    def parts(
        self, table: Table, *, ts_us: int, xid: int | None, last_commit: int | None, snapshot: str
    ) -> tuple[bytes, bytes]:
        """What stands before the position's first and its second mention."""
        before = b'\\"%d\\"' % last_commit if last_commit else b"null"
        head = b'%b%d,"snapshot":"%b","db":%b,"sequence":"[%b,\\"' % (
            self._start,
            ts_us // 1000,
            snapshot.encode(),
            self._database,
            before,
        )
        name = self._names.get(table)
        if name is None:
            if len(self._names) >= _NAMES_MAX:
                self._names.clear()
            name = self._names[table] = b'"schema":%b,"table":%b' % (
                orjson.dumps(table.schema),
                orjson.dumps(table.name),
            )
        tail = b'\\"]","ts_us":%d,"ts_ns":%d,%b,"txId":%b,"lsn":' % (
            ts_us,
            ts_us * 1000,
            name,
            b"%d" % xid if xid is not None else b"null",
        )
        return head, tail

    def whole(self, table: Table, lsn: int, *, ts_us: int, snapshot: str) -> bytes:
        """The block of a row that was read and not changed."""
        head, tail = self.parts(table, ts_us=ts_us, xid=None, last_commit=None, snapshot=snapshot)
        return b'%b%d%b%d,"xmin":null}' % (head, lsn, tail, lsn)


class Assembler:
    """Feed it frames, and it yields the parts of committed transactions, and our own marks."""

    def __init__(
        self,
        start_lsn: int,
        describe: Describe,
        mend: Callable[[Relation, StaleError], Relation],
        blocks: SourceBlocks,
        position: Callable[[int], Position],
        *,
        spool: Spool | None = None,
        part_changes: int = PART_CHANGES,
    ) -> None:
        # Everything before it has been told.
        self.lsn = start_lsn
        self._start_lsn = start_lsn
        self._describe = describe
        self._mend = mend
        self._blocks = blocks
        self._position = position
        self.spool = Spool() if spool is None else spool
        self._part_changes = part_changes
        # By the four bytes that stand for it in messages; None: not to be captured.
        self._relations: dict[bytes, Relation | None] = {}
        self._types: dict[int, TypeMessage] = {}
        self._last_commit: int | None = None
        # The transaction whose changes come now, in or from the spool; 0: none.
        self._xid = 0
        self._ts_us = 0
        self._stamp: object = None
        # Blocks that came before these changes, and lists before and between them.
        self._earlier: list[list[Change] | Block] = []
        self._earlier_count = 0
        self._changes: list[Change] = []
        # What the changes of the present part took in the stream.
        self._bytes = 0
        self._messages: list[tuple[str, bytes]] = []
        self._marks: list[Mark] = []
        self._is_first = True
        # The transaction whose block is being streamed; 0: none.
        self._block = 0

    def feed(self, frames: Iterable[bytes]) -> Iterator[Part | Mark]:
        """Take frames, padded; what they complete."""
        try:
            batch = frames if isinstance(frames, list) else list(frames)
            # Before this one, frames need not be looked at: a block has them.
            done = alone = 0
            for at, frame in enumerate(batch):
                if at < done:
                    continue
                kind = frame[pgoutput.MESSAGE_AT] if frame[0] == _DATA else 0
                if self._block:
                    if kind == _STOP:
                        self._block = 0
                        continue
                    if kind and kind != _ORIGIN:
                        self._keep(frame)
                        continue
                if kind in (_INSERT, _UPDATE, _DELETE):
                    if at >= alone:
                        done = at + self._add_block(batch, at)
                        # After a row that no block takes, the next ones are not tried at once.
                        alone = done if done > at else at + ROWS_MIN
                    if done <= at:
                        self._add(kind, frame)
                    if self._is_full():
                        yield self._part(self.lsn, is_last=False)
                elif kind == _BEGIN:
                    begin = pgoutput.begin(frame)
                    self._open(begin.xid, begin.commit_ts_us)
                elif kind == _COMMIT:
                    commit = pgoutput.commit(frame)
                    if not self._xid:
                        raise MalformedError("a COMMIT without a BEGIN in the stream")
                    yield from self._close(commit.commit_lsn, commit.end_lsn)
                elif kind:
                    yield from self._control(kind, frame)
                else:
                    self._keepalive(frame)
        except IndexError as error:
            raise MalformedError("a frame of the replication stream is cut short") from error

    def _keepalive(self, frame: bytes) -> None:
        if frame[0] != _KEEPALIVE:
            raise MalformedError(f"a frame of the unknown kind {frame[0]} in the stream")
        wal_end = pgoutput.keepalive(frame).wal_end
        # Inside of a transaction the end of the log says nothing about what we have seen.
        if not self._xid and wal_end > self.lsn:
            self.lsn = wal_end

    def _keep(self, frame: bytes) -> None:
        """A message of a block: it names its transaction or savepoint, which ours do not."""
        at = pgoutput.BODY_AT
        subxid = int.from_bytes(frame[at : at + 4])
        if len(frame) < at + 4 + len(pgoutput.PAD):
            raise MalformedError("a streamed message is cut short")
        self.spool.add(self._block, subxid, frame[:at] + frame[at + 4 :])

    def _control(self, kind: int, frame: bytes) -> Iterator[Part | Mark]:
        if kind == _START:
            self._block = pgoutput.stream_start(frame)
        elif kind == _STREAM_COMMIT:
            yield from self._unspool(pgoutput.stream_commit(frame))
        elif kind == _ABORT:
            self.spool.abort(*pgoutput.stream_abort(frame))
        else:
            yield from self._other(kind, frame)

    def _other(self, kind: int, frame: bytes) -> Iterator[Part | Mark]:
        """What stands in a transaction besides rows."""
        if kind == _RELATION:
            self._relation(frame)
        elif kind == _TYPE:
            named = pgoutput.type_name(frame)
            self._types[named.oid] = named
        elif kind == _TRUNCATE:
            self._truncate(frame)
        elif kind == _MESSAGE:
            yield from self._message(frame)
        elif kind != _ORIGIN:
            raise MalformedError(f"a message of the unknown kind {kind} in the stream")

    def _open(self, xid: int, ts_us: int) -> None:
        if self._xid:
            raise MalformedError("a BEGIN inside of a transaction in the replication stream")
        if not xid:
            raise MalformedError("a transaction without a number in the replication stream")
        self._xid = xid
        self._ts_us = ts_us
        self._stamp = object()
        self._is_first = True

    def _close(self, commit_lsn: int, end_lsn: int) -> Iterator[Part | Mark]:
        marks, self._marks = self._marks, []
        # The server does not send what we have; should it, it is told only once.
        known = end_lsn <= self._start_lsn
        if not known:
            self.lsn = max(self.lsn, end_lsn)
            self._last_commit = commit_lsn
            if self._changes or self._earlier or self._messages or not self._is_first:
                yield self._part(self.lsn, is_last=True)
        self._xid = 0
        self._take_changes()
        self._messages = []
        yield from marks

    def _unspool(self, commit: pgoutput.StreamCommit) -> Iterator[Part | Mark]:
        self._open(commit.xid, commit.commit_ts_us)
        if commit.end_lsn <= self._start_lsn:
            self.spool.forget(commit.xid)
        for frame in self.spool.take(commit.xid):
            kind = frame[pgoutput.MESSAGE_AT]
            if kind in (_INSERT, _UPDATE, _DELETE):
                self._add(kind, frame)
                if self._is_full():
                    yield self._part(self.lsn, is_last=False)
            else:
                yield from self._other(kind, frame)
        yield from self._close(commit.commit_lsn, commit.end_lsn)

    def _part(self, lsn: int, *, is_last: bool) -> Part:
        part = Part(
            str(self._xid),
            self._take_changes(),
            self._position(lsn),
            self._ts_us,
            self._is_first,
            is_last,
            self._messages,
        )
        self._messages = []
        self._is_first = False
        return part

    def _is_full(self) -> bool:
        count = len(self._changes) + self._earlier_count
        return count >= self._part_changes or self._bytes > PART_BYTES

    def _take_changes(self) -> Sequence[Change]:
        """The changes of the present part; there are none afterwards."""
        changes, self._changes = self._changes, []
        earlier, self._earlier = self._earlier, []
        self._bytes = self._earlier_count = 0
        if not earlier:
            return changes
        return Several([*earlier, changes]) if changes else Several(earlier)

    def _relation(self, frame: bytes) -> None:
        message = pgoutput.relation(frame)
        at = pgoutput.BODY_AT
        name = frame[at : at + 4]
        self._relations[name] = self._describe(message, self._types, self._relations.get(name))

    def _truncate(self, frame: bytes) -> None:
        for name in pgoutput.truncate(frame):
            relation = self._known(name)
            if relation is not None:
                lsn = int.from_bytes(frame[1:9])
                self._changes.append(
                    Change(
                        relation.table,
                        TRUNCATE,
                        None,
                        None,
                        self._source(relation, lsn),
                        self._ts_us,
                    )
                )

    def _message(self, frame: bytes) -> Iterator[Part | Mark]:
        message = pgoutput.logical_message(frame)
        own = message.prefix.startswith(OWN_PREFIX)
        if message.transactional:
            if not self._xid:
                raise MalformedError("a message outside of its transaction")
            if own:
                self._marks.append(Mark(message.prefix, message.content))
            else:
                self._messages.append((message.prefix, message.content))
                if len(self._messages) >= MESSAGES_MAX:
                    yield self._part(self.lsn, is_last=False)
            return
        # Its place is the end of its record.
        if message.lsn <= self._start_lsn:
            return
        self.lsn = max(self.lsn, message.lsn)
        if own:
            yield Mark(message.prefix, message.content)
        else:
            yield Part(
                "",
                [],
                self._position(self.lsn),
                int.from_bytes(frame[17:25], signed=True) + pgoutput.EPOCH_2000_US,
                messages=[(message.prefix, message.content)],
            )

    def _known(self, name: bytes) -> Relation | None:
        if not self._xid:
            raise MalformedError("a change outside of a transaction in the replication stream")
        try:
            return self._relations[name]
        except KeyError:
            raise MalformedError("a change of a table that the stream did not describe") from None

    def _source(self, relation: Relation, lsn: int) -> bytes:
        if relation.stamp is not self._stamp:
            relation.stamp = self._stamp
            relation.head, relation.tail = self._blocks.parts(
                relation.table,
                ts_us=self._ts_us,
                xid=self._xid,
                last_commit=self._last_commit,
                snapshot="false",
            )
        return b'%b%d%b%d,"xmin":null}' % (relation.head, lsn, relation.tail, lsn)

    def _add_block(self, frames: list[bytes], at: int) -> int:
        """Many changes of one table at once, from a frame on; how many were taken."""
        name = frames[at][26:30]
        relation = self._relations.get(name)
        if relation is None or relation.blocks is None or not self._xid:
            return 0
        room = self._part_changes - len(self._changes) - self._earlier_count
        last = min(len(frames), at + room)
        end, size = at, 0
        while end < last and size < BYTES_MAX:
            frame = frames[end]
            if frame[0] != _DATA or frame[25] not in _ROWS or frame[26:30] != name:
                break
            if len(frame) > ROW_BYTES_MAX:
                break
            size += len(frame)
            end += 1
        if end - at < ROWS_MIN:
            return 0
        if relation.stamp is not self._stamp:
            self._source(relation, 0)
        pieces = (relation.head, relation.tail, b',"xmin":null}')
        block = relation.blocks.block(frames[at:end], pieces, self._ts_us)
        taken = len(block)
        if taken:
            if self._changes:
                self._earlier.append(self._changes)
                self._earlier_count += len(self._changes)
                self._changes = []
            self._earlier.append(block)
            self._earlier_count += taken
            self._bytes += size if taken == end - at else sum(map(len, frames[at : at + taken]))
        return taken

    def _add(self, kind: int, frame: bytes) -> None:
        """One change of one row."""
        name = frame[26:30]
        relation = self._relations.get(name)
        if relation is None or not self._xid:
            self._known(name)
            return
        while True:
            try:
                if kind == _INSERT:
                    if frame[30] != _NEW:
                        raise MalformedError("an INSERT without a row in the replication stream")
                    op, before, after = CREATE, None, relation.row(frame, 31)
                elif kind == _UPDATE:
                    op = UPDATE
                    before, after = _update(relation, frame)
                else:
                    op, after = DELETE, None
                    if frame[30] not in (_KEY, _OLD):
                        raise MalformedError("a DELETE without a row in the replication stream")
                    before, _ = relation.first(frame, 31)
                break
            except StaleError as error:
                relation = self._relations[name] = self._mend(relation, error)
        lsn = int.from_bytes(frame[1:9])
        if relation.stamp is self._stamp:
            source = b'%b%d%b%d,"xmin":null}' % (relation.head, lsn, relation.tail, lsn)
        else:
            source = self._source(relation, lsn)
        self._bytes += len(frame)
        self._changes.append(_new(Change, (relation.table, op, before, after, source, self._ts_us)))


def _update(relation: Relation, frame: bytes) -> tuple[Row | None, Row]:
    kind = frame[30]
    if kind == _NEW:
        return None, relation.row(frame, 31)
    if kind not in (_KEY, _OLD):
        raise MalformedError("an UPDATE without a row in the replication stream")
    before, at = relation.first(frame, 31)
    if frame[at] != _NEW:
        raise MalformedError("an UPDATE without a new row in the replication stream")
    after = relation.row(frame, at + 1)
    if kind == _OLD and UNAVAILABLE in after:
        # With full identity the old row has what the new one left out.
        after = tuple(
            old if new is UNAVAILABLE else new for old, new in zip(before, after, strict=True)
        )
    return before, after
