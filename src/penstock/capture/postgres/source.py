"""PostgreSQL as a source: check, set up, snapshot, stream, chunks, remove.

A position is `{"lsn": N, "system": ID}`: the place in the server's write-ahead log right behind the
last commit that was told, and the identity of the database cluster, so that a position is never
used on another server. All that was committed before the place has been told, all that is committed
behind it will be.

The slot's own position moves only by `confirm`. While the database is quiet, a heartbeat is written
into its log (`pg_logical_emit_message`, no table needed), so that the position moves even if only
other databases of the cluster are written to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from time import monotonic
from typing import Final

import psycopg

from penstock.capture.postgres import setup
from penstock.capture.postgres.assembly import Assembler, SourceBlocks
from penstock.capture.postgres.catalog import Catalog, TableInfo, chosen
from penstock.capture.postgres.checks import MIN_VERSION, server_checks, table_checks, unidentified
from penstock.capture.postgres.chunks import MARK, Chunker
from penstock.capture.postgres.connect import Connection, PostgresUrl, explained
from penstock.capture.postgres.decoders import Relation
from penstock.capture.postgres.options import PostgresOptions
from penstock.capture.postgres.pgoutput import (
    RelationMessage,
    TypeMessage,
    format_lsn,
    parse_lsn,
)
from penstock.capture.postgres.replication import Replication
from penstock.capture.postgres.snapshot import ChangedMeanwhileError, PostgresSnapshot
from penstock.capture.postgres.spool import Spool
from penstock.capture.source import (
    CaptureError,
    Check,
    ChunkRequest,
    DatabaseUnreachableError,
    Idle,
    Item,
    Part,
    Position,
    PositionLostError,
    Snapshot,
    Source,
    SourceSettings,
    SourceStatus,
    Table,
)

HEARTBEAT: Final = "penstock.heartbeat"
# How often the stream looks for tables that have been created since.
LOOK_EVERY_S: Final = 10.0
_RATE_SAMPLE_S: Final = 0.2
# A table that is rewritten or emptied in the instant in which a snapshot begins spoils it.
_SNAPSHOT_ATTEMPTS: Final = 10


class PostgresSource(Source):
    """One PostgreSQL database."""

    kind = "postgresql"

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings
        self._options = PostgresOptions.of(settings)
        self._url = PostgresUrl(settings.url)
        self._application = f"penstock capture {settings.name}"
        self._closed = threading.Event()
        self._replication: Replication | None = None
        self._system = ""
        self._database = ""
        self._wal_sample: tuple[float, int] | None = None
        self._confirmed = 0
        # Chosen tables that cannot be captured, and why.
        self._left_out: list[str] = []
        self._reached: int | None = None
        # Wrong URL, password or database: found here, before anything is changed.
        with self._connect() as connection:
            self._database = connection.info.dbname
            with explained("cannot read what the server is"):
                row = connection.execute(
                    "SELECT system_identifier::text FROM pg_catalog.pg_control_system()"
                ).fetchone()
            assert row is not None
            self._system = row[0]
            if connection.info.server_version < MIN_VERSION:
                raise CaptureError(
                    f"PostgreSQL {connection.info.server_version // 10000} is too old",
                    advice="Upgrade to PostgreSQL 14 or newer.",
                )
        self._blocks = SourceBlocks(settings.topic_prefix or settings.name, self._database)
        self._chunker = Chunker(
            self._url,
            self._application,
            self._options.publication,
            self._catalog,
            lambda table, ts_us: self._blocks.whole(
                table, self._reached or 0, ts_us=ts_us, snapshot="incremental"
            ),
        )

    def _connect(self) -> Connection:
        return self._url.connect(application=self._application)

    def _catalog(self, connection: Connection) -> Catalog:
        return Catalog(connection, self._database, self._options.modes)

    def _is_chosen(self, full_name: str) -> bool:
        return chosen(full_name, self.settings.include, self.settings.exclude)

    def _chosen_tables(self, connection: Connection) -> list[TableInfo]:
        return [
            info for info in self._catalog(connection).tables() if self._is_chosen(info.full_name)
        ]

    def _position(self, lsn: int) -> Position:
        return {"lsn": lsn, "system": self._system}

    def check(self) -> list[Check]:
        with self._connect() as connection:
            with explained("cannot check the database"):
                return [
                    *server_checks(connection, self._options),
                    *table_checks(connection, self._options, self._chosen_tables(connection)),
                ]

    def tables(self) -> list[Table]:
        with self._connect() as connection:
            with explained("cannot list the tables"):
                catalog = self._catalog(connection)
                known = setup.published(connection, self._options.publication)
                columns = self._published_columns(connection) if known is None else known
                return [
                    catalog.relation(info, columns.get(info.full_name)).table
                    for info in catalog.tables()
                    if self._is_chosen(info.full_name)
                    and (known is None or info.full_name in known)
                ]

    def _published_columns(self, connection: Connection) -> dict[str, set[str] | None]:
        known = setup.published(connection, self._options.publication)
        if known is not None:
            return known
        if connection.info.server_version < 180000:
            return {}
        # What our own publication will have.
        return {
            info.full_name: {c.name for c in info.columns if c.generated != "v"}
            for info in self._chosen_tables(connection)
        }

    def setup(self) -> None:
        """The publication, then the slot. A table that cannot be published is refused at first;
        in a capture that runs already it is left out, and `status` says so."""
        options = self._options
        with self._connect() as connection:
            with explained("cannot set up the capture"):
                tables = self._chosen_tables(connection)
                known = setup.published(connection, options.publication)
                has_slot = setup.slot_state(connection, options.slot) is not None
                if has_slot and known is not None:
                    tables = [info for info in tables if info.full_name in known]
                for check in (
                    *server_checks(connection, options),
                    *table_checks(connection, options, tables),
                ):
                    if check.required and not check.ok:
                        raise CaptureError(
                            f"{self._database} cannot be captured: {check.name}: {check.found}",
                            advice=check.remedy,
                        )
            if known is None:
                if has_slot:
                    raise PositionLostError(
                        f"the publication {options.publication} was dropped, and what was "
                        f"written since is not in the stream of the slot {options.slot}",
                        advice="Remove the capture and add it again; it takes a new snapshot.",
                    )
                setup.create_publication(connection, options, self.settings.name, tables)
            else:
                self._publish_new_tables(connection)
            if not has_slot:
                setup.create_slot(connection, options.slot, options.slot_timeout_ms)

    def _publish_new_tables(self, connection: Connection) -> list[str]:
        """Chosen tables that came later join the publication; those that cannot, and why."""
        known = setup.published(connection, self._options.publication)
        if known is None or self._options.all_tables:
            return []
        new = [info for info in self._chosen_tables(connection) if info.full_name not in known]
        if not new:
            return []
        if not setup.is_own(connection, self._options.publication):
            return [f"{info.full_name} is not in the publication" for info in new]
        problems = []
        for info in new:
            if unidentified(connection, info):
                problems.append(f"{info.full_name} has no replica identity")
                continue
            try:
                setup.add_tables(connection, self._options.publication, [info])
            except DatabaseUnreachableError:
                raise
            except CaptureError as error:
                problems.append(f"{info.full_name}: {error}")
        return problems

    def remove(self) -> list[str]:
        removed = []
        with self._connect() as connection:
            if setup.drop_slot(connection, self._options.slot):
                removed.append(f"replication slot {self._options.slot}")
            if setup.drop_publication(connection, self._options.publication):
                removed.append(f"publication {self._options.publication}")
        return removed

    def snapshot(self) -> Snapshot:
        for _ in range(_SNAPSHOT_ATTEMPTS - 1):
            with suppress(ChangedMeanwhileError):
                return self._take_snapshot()
        return self._take_snapshot()

    def _take_snapshot(self) -> Snapshot:
        snapshot = PostgresSnapshot(
            self._url,
            self._application,
            self._blocks,
            self._position,
            self.settings.snapshot_workers,
            self._options.slot_timeout_ms,
        )
        try:
            with self._connect() as connection:
                with explained("cannot take a snapshot"):
                    columns = self._published_columns(connection)
            snapshot.load(
                self._catalog,
                lambda info: (
                    self._is_chosen(info.full_name) and (not columns or info.full_name in columns)
                ),
                columns,
            )
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    def stream(self, position: Position) -> Iterator[Item]:
        lsn = _lsn_of(position)
        options = self._options
        with self._connect() as control:
            with explained("cannot begin to stream"):
                setup.check_position(
                    control, options.slot, lsn, position.get("system"), self._system
                )
                if setup.published(control, options.publication) is None:
                    raise PositionLostError(
                        f"the publication {options.publication} is gone",
                        advice="Remove the capture and add it again; it takes a new snapshot.",
                    )
                self._chunker.begin(control)
            spool = Spool(options.spool_memory_bytes, options.spool_max_bytes)
            replication = Replication(self._url, application=self._application)
            try:
                replication.start(
                    options.slot, options.publication, lsn, streaming=options.streaming
                )
                self._replication = replication
                catalog = self._catalog(control)
                assembler = Assembler(
                    lsn,
                    lambda message, types, before: self._describe(catalog, message, types, before),
                    catalog.mended,
                    self._blocks,
                    self._position,
                    spool=spool,
                )
                yield from self._run(control, replication, assembler)
            finally:
                self._replication = None
                replication.release()
                spool.close()

    def _describe(
        self,
        catalog: Catalog,
        message: RelationMessage,
        types: Mapping[int, TypeMessage],
        before: Relation | None,
    ) -> Relation | None:
        if not self._is_chosen(f"{message.schema}.{message.name}"):
            return None
        with explained("cannot read the catalog"):
            return catalog.streamed(message, types, before)

    def _run(
        self, control: Connection, replication: Replication, assembler: Assembler
    ) -> Iterator[Item]:
        idle_s = max(0.001, self.settings.idle_ms / 1000)
        heartbeat_s = self.settings.heartbeat_ms / 1000
        look_s = min(heartbeat_s, LOOK_EVERY_S) if heartbeat_s > 0 else LOOK_EVERY_S
        told_at = beat_at = looked_at = monotonic()
        while not self._closed.is_set():
            for item in assembler.feed(replication.frames(idle_s)):
                self._reached = assembler.lsn
                if isinstance(item, Part):
                    self._chunker.observe(item)
                    yield item
                    told_at = beat_at = monotonic()
                elif item.prefix == MARK:
                    chunk = self._chunker.marked(item.content)
                    if chunk is not None:
                        yield chunk
            if self._closed.is_set():
                return
            self._reached = assembler.lsn
            replication.reached(assembler.lsn)
            self._chunker.step()
            now = monotonic()
            # A server that shuts down waits for our word; so whoever confirms hears at once.
            asked = replication.reply_wanted and assembler.lsn > self._confirmed
            if asked or now - told_at >= idle_s:
                replication.reply_wanted = False
                yield Idle(self._position(assembler.lsn))
                told_at = monotonic()
            if now - looked_at >= look_s:
                looked_at = now
                with explained("cannot look for new tables"):
                    self._left_out = self._publish_new_tables(control)
            if heartbeat_s > 0 and now - beat_at >= heartbeat_s:
                beat_at = now
                with explained("cannot write a heartbeat"):
                    control.execute(
                        "SELECT pg_catalog.pg_logical_emit_message(false, %s, %s)",
                        (HEARTBEAT, self.settings.name),
                    )

    def ask(self, request: ChunkRequest) -> None:
        self._chunker.ask(request)
        replication = self._replication
        if replication is not None:
            replication.wake()

    def confirm(self, position: Position) -> None:
        lsn = _lsn_of(position)
        self._confirmed = max(self._confirmed, lsn)
        if self._replication is not None:
            self._replication.confirm(lsn)

    def status(self) -> SourceStatus:
        options = self._options
        with self._connect() as connection:
            with explained("cannot read the state of the slot"):
                row = connection.execute(
                    """SELECT pg_catalog.pg_current_wal_lsn()::text,
                              pg_catalog.pg_size_bytes(nullif(
                                  current_setting('max_slot_wal_keep_size'), '-1'))"""
                ).fetchone()
                state = setup.slot_state(connection, options.slot)
            assert row is not None
            now_lsn, limit = parse_lsn(row[0]), row[1]
            if state is None:
                return SourceStatus(
                    None, details={"slot": f"{options.slot} is not there", "wal_status": "lost"}
                )
            rate = self._wal_rate(connection, now_lsn)
        retained = now_lsn - state.restart_lsn if state.restart_lsn is not None else None
        lag = now_lsn - state.confirmed_lsn if state.confirmed_lsn is not None else None
        left = None
        if state.safe_wal_bytes is not None and rate > 0:
            left = max(0.0, state.safe_wal_bytes / rate)
        return SourceStatus(
            position=self._position(state.confirmed_lsn) if state.confirmed_lsn else None,
            retained_bytes=retained,
            retained_limit_bytes=limit,
            lag_bytes=lag,
            time_left_s=left,
            details={
                "slot": options.slot,
                "publication": options.publication,
                "wal_status": state.wal_status or "lost",
                "active": "yes" if state.active_pid is not None else "no",
                "confirmed": format_lsn(state.confirmed_lsn or 0),
                "wal_bytes_per_s": str(round(rate)),
                **({"left_out": "; ".join(self._left_out)} if self._left_out else {}),
            },
        )

    def _wal_rate(self, connection: Connection, lsn: int) -> float:
        """Bytes a second that the server writes, since the last call or over a moment."""
        now = monotonic()
        before = self._wal_sample or (now, lsn)
        if now - before[0] < _RATE_SAMPLE_S:
            self._closed.wait(before[0] + _RATE_SAMPLE_S - now)
            with explained("cannot read the state of the slot"):
                row = connection.execute("SELECT pg_catalog.pg_current_wal_lsn()::text").fetchone()
            assert row is not None
            now, lsn = monotonic(), parse_lsn(row[0])
        self._wal_sample = (now, lsn)
        return max(0.0, (lsn - before[1]) / max(now - before[0], 1e-6))

    def close(self) -> None:
        self._closed.set()
        replication = self._replication
        if replication is not None:
            replication.close()
        with suppress(psycopg.Error):
            self._chunker.close()


def _lsn_of(position: Position) -> int:
    lsn = position.get("lsn")
    if not isinstance(lsn, int) or lsn < 0:
        raise CaptureError(f"{dict(position)} is not a position of PostgreSQL")
    return lsn
