"""MariaDB and MySQL as a source of changes.

Options (`SourceSettings.options`):
- `server_id`: the number under which the capture registers as a replica; made from its name.
- `gtid`: auto (by file and position on the server that told them, by GTID on another: the default),
  always, or never.
- `decimal`: precise, string, double. `unsigned_bigint`: long, precise. See `types`.
- `statements`: fail (the default) or skip, for changes that a session logged as statements.
- `query`: true has the statement in the source block (binlog_annotate_row_events of MariaDB,
  binlog_rows_query_log_events of MySQL).
- `held_max_bytes`: how much of one transaction is kept in memory before its end is seen.

Nothing is made in the database and nothing is kept there for the capture: the binlog expires as the
server is set up. A position whose binlog is gone is PositionLostError, never skipped over.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from time import monotonic
from typing import Any, Final

from penstock.capture.mysql.checks import checks
from penstock.capture.mysql.chunks import ChunkReader, Place, Ready
from penstock.capture.mysql.connection import (
    Address,
    Connection,
    Server,
    binlog_end,
    charsets_of,
    connect,
    explained,
    query,
    server_of,
    variables,
)
from penstock.capture.mysql.groups import HELD_MAX_BYTES, Assembler, Context
from penstock.capture.mysql.replication import BinlogTornError, Dump, force_close
from penstock.capture.mysql.schema import Chooser, disguised_columns, known_tables
from penstock.capture.mysql.snapshot import MysqlSnapshot, file_number
from penstock.capture.mysql.types import Modes
from penstock.capture.source import (
    CaptureError,
    Check,
    Chunk,
    ChunkRequest,
    Idle,
    Item,
    Position,
    PositionLostError,
    Snapshot,
    Source,
    SourceSettings,
    SourceStatus,
    Table,
)

_REQUESTS_MAX: Final = 1000
# Where the first event of a file of the binlog is.
_FILE_BEGIN: Final = 4
# How long chunks may be read one after the other before the stream is looked at again.
_CHUNKS_S: Final = 0.5
_CHOICES: Final = {
    "gtid": ("auto", "always", "never"),
    "decimal": ("precise", "string", "double"),
    "unsigned_bigint": ("long", "precise"),
    "statements": ("fail", "skip"),
    "query": ("false", "true"),
}
_NUMBERS: Final = {"server_id": (1, 2**32 - 2), "held_max_bytes": (1 << 16, 1 << 34)}


class MysqlSource(Source):
    """One MariaDB or MySQL server."""

    kind = "mysql"

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings
        self._address = Address.of(settings.url)
        self._options = _options(settings.options)
        self._modes = Modes(self._options["decimal"], self._options["unsigned_bigint"])
        self._chooser = Chooser(settings, self._address.database)
        # Stable over restarts: the server ends what is left of the connection before.
        made = 1_000_000_000 + zlib.crc32(settings.name.encode()) % 1_000_000_000
        self._replica_id = int(self._options.get("server_id") or made)
        self._name = settings.topic_prefix or settings.name
        self._lock = threading.Lock()
        self._asked: deque[ChunkRequest] = deque()
        self._dumps: list[Dump] = []
        self._closed = False
        self._confirmed: Position | None = None

    # -- what needs no stream ----------------------------------------------------------------------

    def check(self) -> list[Check]:
        return checks(self._address, self._chooser, self._modes, self._replica_id)

    def tables(self) -> list[Table]:
        connection = connect(self._address)
        try:
            with explained(self._address):
                known = known_tables(connection, self._chooser, self._modes)
        finally:
            connection.close()
        return [found.table for found in known]

    def setup(self) -> None:
        """Nothing is needed but what `check` looks at; the first that fails is told."""
        for check in self.check():
            if check.required and not check.ok:
                raise CaptureError(
                    f"{self._address} cannot be captured: {check.name} is {check.found}",
                    advice=check.remedy,
                )

    def remove(self) -> list[str]:
        """Nothing was made, so nothing is left."""
        return []

    def snapshot(self) -> Snapshot:
        return MysqlSnapshot(
            self._address,
            self._chooser,
            self._modes,
            name=self._name,
            kind=self.kind,
            workers=self.settings.snapshot_workers,
        )

    def ask(self, request: ChunkRequest) -> None:
        if len(self._asked) >= _REQUESTS_MAX:
            raise CaptureError(f"{_REQUESTS_MAX} chunks are asked for already")
        self._asked.append(request)

    def confirm(self, position: Position) -> None:
        self._confirmed = position

    def status(self) -> SourceStatus:
        connection = connect(self._address)
        try:
            with explained(self._address):
                return _status(connection, self._confirmed)
        finally:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            dumps, self._dumps = self._dumps, []
        for dump in dumps:
            dump.close()

    # -- the stream --------------------------------------------------------------------------------

    def stream(self, position: Position) -> Iterator[Item]:
        side = connect(self._address)
        try:
            with explained(self._address):
                server = server_of(side)
                start, gtid = self._start(side, server, position)
                assembler = Assembler(self._context(side, server), start)
            events = self._events(side, server, assembler, gtid)
            try:
                yield from self._items(events, assembler, server)
            finally:
                events.close()
        finally:
            force_close(side)

    def _events(
        self, side: Connection, server: Server, assembler: Assembler, gtid: str | None
    ) -> Generator[list[bytes], None, None]:
        """Events from where the assembler is; past the end of a file that a crash has torn."""
        idle_s = self.settings.idle_ms / 1000
        annotate = self._options["query"] == "true"
        file, at = assembler.file, assembler.at
        while True:
            dump = self._dump(server, self._replica_id)
            try:
                dump.start(file, at, gtid=gtid, annotate=annotate)
                yield from dump.events(idle_s)
                return
            except BinlogTornError as error:
                assembler.torn(error)
                with explained(self._address):
                    following = _file_after(side, assembler.file)
                if following is None:
                    raise
                file, at, gtid = following, _FILE_BEGIN, None
            finally:
                self._forget(dump)

    def _items(
        self, events: Iterator[list[bytes]], assembler: Assembler, server: Server
    ) -> Iterator[Item]:
        idle_s = self.settings.idle_ms / 1000
        reader = ChunkReader(
            self._address, server, self._chooser, self._modes, self._name, self.kind
        )
        waiting: list[Ready] = []
        asked, told = self._asked, monotonic()
        try:
            for messages in events:
                for raw in messages:
                    found = assembler.feed(raw)
                    if found is not None:
                        for part in found:
                            if waiting:
                                waiting[0].see(part)
                            yield part
                        told = monotonic()
                    if (asked or waiting) and assembler.at_boundary:
                        yield from self._chunks(reader, assembler, waiting)
                if not assembler.at_boundary:
                    continue
                yield from self._chunks(reader, assembler, waiting)
                if not messages or monotonic() - told > idle_s:
                    told = monotonic()
                    yield Idle(assembler.position)
        finally:
            reader.close()

    def _chunks(
        self, reader: ChunkReader, assembler: Assembler, waiting: list[Ready]
    ) -> Iterator[Chunk]:
        """Between transactions: the chunk that belongs here; and the next one is read."""
        here = Place.of(assembler.file, assembler.at)
        if waiting and waiting[0].place <= here:
            ready = waiting.pop()
            if ready.spoiled:
                self._asked.appendleft(ready.chunk.request)
            else:
                yield ready.finished()
        until = monotonic() + _CHUNKS_S
        while self._asked and not waiting and monotonic() < until:
            ready = reader.read(self._asked.popleft(), assembler.position)
            if ready.place <= here or ready.chunk.problem:
                yield ready.chunk
            else:
                waiting.append(ready)

    def _context(self, side: Connection, server: Server) -> Context:
        def table_now(database: str, name: str) -> Table | None:
            with explained(self._address):
                found = known_tables(side, self._chooser, self._modes, (database, name))
            return found[0].table if found else None

        return Context(
            name=self._name,
            kind=self.kind,
            chooses=self._chooser,
            charsets=charsets_of(side),
            modes=self._modes,
            table_now=table_now,
            reread=lambda file, at: self._reread(server, file, at),
            skip_statements=self._options["statements"] == "skip",
            held_max_bytes=int(self._options.get("held_max_bytes") or HELD_MAX_BYTES),
            server=server.uid,
        )

    def _reread(self, server: Server, file: str, at: int) -> Iterator[bytes]:
        # As another replica: the same number would end the stream.
        dump = self._dump(server, self._replica_id + 1)
        try:
            dump.start(file, at, gtid=None)
            for messages in dump.events(1.0):
                yield from messages
        finally:
            self._forget(dump)

    def _dump(self, server: Server, number: int) -> Dump:
        dump = Dump(self._address, server, number)
        with self._lock:
            self._dumps.append(dump)
            if self._closed:
                dump.close()
        return dump

    def _forget(self, dump: Dump) -> None:
        with self._lock:
            if dump in self._dumps:
                self._dumps.remove(dump)
        dump.dispose()

    def _start(
        self, side: Connection, server: Server, position: Position
    ) -> tuple[dict[str, Any], str | None]:
        """Where to go on, and by which GTID if not by place."""
        start = dict(position)
        if server.is_mariadb and "types" not in start and not start.get("gtid"):
            start["types"] = disguised_columns(side, self._chooser)
        if not isinstance(start.get("file"), str) or not isinstance(start.get("pos"), int):
            raise PositionLostError(f"{dict(position)} is not a position in a binlog")
        mode, gtid = self._options["gtid"], str(start.get("gtid") or "")
        moved = start.get("server") not in (None, server.uid)
        if server.is_mariadb and gtid and not moved and mode != "always":
            # A server that was set up anew has other transactions at the same place.
            found = _gtid_at(side, start)
            moved = bool(found) and set(found.split(",")) != set(gtid.split(","))
        if mode == "always" or (moved and mode == "auto"):
            if not gtid:
                raise PositionLostError(
                    f"{self._address} is another server than the one the position is of, and the"
                    " position has no GTID"
                )
            if start.get("xa"):
                raise PositionLostError(
                    "an XA transaction was prepared on another server and is not yet committed"
                )
            return start, gtid
        if moved:
            raise PositionLostError(
                f"{self._address} is another server ({server.uid}) than the one the position is of"
                f" ({start.get('server')}), or was set up anew",
                advice="Set the option gtid=auto to go on by GTID, or take a new snapshot.",
            )
        if not gtid and server.is_mariadb:
            start["gtid"] = _gtid_at(side, start)
        return start, None


def _file_after(side: Connection, file: str) -> str | None:
    """The file of the binlog that follows one."""
    names = [str(row[0]) for row in query(side, "SHOW BINARY LOGS")]
    later = [name for name in names if file_number(name) > file_number(file)]
    return min(later, key=file_number, default=None)


def _gtid_at(side: Connection, place: Mapping[str, Any]) -> str:
    """MariaDB's GTID position at a place of the binlog; empty if there is no such place."""
    found = query(side, "SELECT BINLOG_GTID_POS(%s, %s)", (place["file"], place["pos"]))
    return str(found[0][0] or "")


def _options(given: Mapping[str, str]) -> dict[str, str]:
    unknown = set(given) - set(_CHOICES) - set(_NUMBERS)
    if unknown:
        raise CaptureError(
            f"unknown options: {', '.join(sorted(unknown))}",
            advice=f"Known are {', '.join(sorted([*_CHOICES, *_NUMBERS]))}.",
        )
    options = {name: choices[0] for name, choices in _CHOICES.items()} | dict(given)
    for name, choices in _CHOICES.items():
        if options[name] not in choices:
            raise CaptureError(
                f"option {name} is {options[name]!r}", advice=f"It may be {', '.join(choices)}."
            )
    for name, (low, high) in _NUMBERS.items():
        value = options.get(name)
        if value is not None and not (value.isdigit() and low <= int(value) <= high):
            raise CaptureError(
                f"option {name} is {value!r}", advice=f"It must be a number from {low} to {high}."
            )
    return options


def _status(connection: Connection, confirmed: Position | None) -> SourceStatus:
    server = server_of(connection)
    file, at, gtid = binlog_end(connection, server)
    known = variables(connection)
    expiry = known.get("binlog_expire_logs_seconds") or known.get("expire_logs_days", "0")
    details = {"end": f"{file}:{at}", "gtid": gtid, "binlog expiry": expiry}
    lag = None
    if confirmed is not None and confirmed.get("server") in (None, server.uid):
        first, last = file_number(str(confirmed["file"])), file_number(file)
        sizes = {
            file_number(str(row[0])): int(row[1]) for row in query(connection, "SHOW BINARY LOGS")
        }
        if first == last:
            lag = max(0, at - int(confirmed["pos"]))
        elif first in sizes:
            between = sum(size for number, size in sizes.items() if first < number < last)
            lag = max(0, sizes[first] - int(confirmed["pos"])) + between + at
        else:
            details["lost"] = f"{confirmed['file']} is no longer there"
    return SourceStatus(confirmed, lag_bytes=lag, details=details)
