"""A capture: one database into the log, for as long as nobody stops it.

    config = CaptureConfig.from_mapping("shop", {"url": "postgresql://localhost/shop"})
    Capture(config, "127.0.0.1:9092").run(stop)

It runs in *sessions*. A session takes the capture over (a transactional id in the log, so that an
older process that still believes it runs it can write nothing more), reads where the log says it
stands, opens the database, takes a snapshot if there is no position yet, and streams from the
position on. Whatever goes wrong ends the session; if it may go right later (the database or the
broker is away), the next session begins after a pause, at the position that the log has. Nothing of
a session is kept in memory for the next one. An outage is told in a line when it begins and in one
when it is over, however many sessions were tried meanwhile.

A database that this process has never reached may be a mistake in its address: there is a second
session only if it `waits`.

Two threads: this one reads the database, the other one writes the log (`deliverer`).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

from penstock.capture.delivery import commands
from penstock.capture.delivery.commands import PAUSE, STOP, Commands
from penstock.capture.delivery.config import (
    ALWAYS,
    INITIAL_ONLY,
    NO_DATA,
    WHEN_NEEDED,
    CaptureConfig,
)
from penstock.capture.delivery.deliverer import Deliverer, SnapshotEnd, TablesThere, Work
from penstock.capture.delivery.emptying import Emptying
from penstock.capture.delivery.handover import Handover, HandoverClosedError
from penstock.capture.delivery.incremental import Incremental
from penstock.capture.delivery.listening import Listener, Publisher
from penstock.capture.delivery.metering import (
    FAILED,
    PAUSED,
    RETRYING,
    SNAPSHOT,
    STARTING,
    STOPPED,
    STREAMING,
    CaptureStatus,
    Meter,
    TableStatus,
)
from penstock.capture.delivery.reading import Interrupted, read_snapshot, weight_of
from penstock.capture.delivery.schemas import SchemaTopic
from penstock.capture.delivery.state import DONE, State
from penstock.capture.delivery.writing import Log, MakeWriter, make_writer
from penstock.capture.events.changes import Events
from penstock.capture.events.settings import AVRO
from penstock.capture.events.table_schemas import SchemaVersion
from penstock.capture.source import (
    CaptureError,
    DatabaseBusyError,
    DatabaseUnreachableError,
    PositionLostError,
    Source,
    SourceSettings,
)
from penstock.client.connection import Cluster
from penstock.client.errors import OutcomeUnknownError
from penstock.client.table_schemas import SCHEMAS_TOPIC, PublishedSchemas
from penstock.errors import PenstockError

_LOGGER = logging.getLogger(__name__)

OpenSource = Callable[[SourceSettings], Source]
OpenCluster = Callable[[], Cluster]

# A session that has lasted so long was a good one: the next pause is a short one again.
_GOOD_SESSION_S = 60.0
# A pause is not so long that nothing is told meanwhile.
_WORD_S = 3.0
# The status tells the schemas of so many tables, and so much of what has changed in one.
_TABLES_MAX = 50
_CHANGES_MAX = 200
# How often the database is asked how it sees us.
_DATABASE_STATUS_S = 10.0


def _open_source(settings: SourceSettings) -> Source:
    from penstock.capture.sources import open_source

    return open_source(settings)


class Capture:
    """Runs one capture."""

    def __init__(
        self,
        config: CaptureConfig,
        bootstrap: str | OpenCluster,
        *,
        open_source: OpenSource = _open_source,
        make_writer: MakeWriter = make_writer,
        waits: bool = True,
    ) -> None:
        """`waits`: also for a database that has not been there yet since the start."""
        self.config = config
        self._open_cluster: OpenCluster = (
            (lambda: Cluster(bootstrap, client_id=config.transactional_id))
            if isinstance(bootstrap, str)
            else bootstrap
        )
        self._open_source = open_source
        self._make_writer = make_writer
        self.meter = Meter()
        self._stop = threading.Event()
        self._state_name = STARTING
        self._kind = ""
        self._error: BaseException | None = None
        self._attempts = 0
        self._waits = waits
        # Whether the database was reached in this process.
        self._connected = False
        # What went wrong first, and when, since it last went well.
        self._trouble: PenstockError | None = None
        self._trouble_since = 0.0
        self._state = State()
        self._deliverer: Deliverer | None = None
        self._events_now: Events | None = None
        self._database: dict[str, object] = {}
        self._publisher: Publisher | None = None
        # A snapshot is taken although there is a position.
        self._wants_snapshot = config.snapshot.mode == ALWAYS

    # ---- running -------------------------------------------------------------------------

    def run(self, stop: threading.Event | None = None) -> None:
        """Run until stopped; an error that will not go away by itself is raised."""
        self._stop = stop or threading.Event()
        with self._open_cluster() as telling:
            self._publisher = Publisher(telling, self.config.name)
            try:
                self._run()
                self._become(STOPPED)
            except Exception as error:
                self._error = error
                self._become(FAILED)
                raise
            finally:
                self._publisher.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                if self._session() == STOP:
                    return
                self._attempts = 0
            except PositionLostError as error:
                if self.config.snapshot.mode != WHEN_NEEDED or self._wants_snapshot:
                    raise
                # After a pause: a database that loses every position must not keep us busy.
                self._wants_snapshot = True
                self._pause_after(error)
            except PenstockError as error:
                if not error.retriable and not isinstance(error, OutcomeUnknownError):
                    raise
                if not self._may_wait(error):
                    raise
                if time.monotonic() - began > _GOOD_SESSION_S:
                    self._attempts = 0
                self._pause_after(error)

    def _may_wait(self, error: PenstockError) -> bool:
        is_away = isinstance(error, DatabaseUnreachableError)
        if isinstance(error, DatabaseBusyError) or not is_away:
            return True
        return self._connected or self._waits

    def _pause_after(self, error: PenstockError) -> None:
        settings = self.config.delivery
        pause_ms = min(settings.retry_ms * 2 ** min(self._attempts, 20), settings.retry_max_ms)
        self._attempts += 1
        self._error = error
        self._tell_trouble(error)
        _LOGGER.debug("capture %s: try %d in %d ms: %s",
                      self.config.name, self._attempts + 1, pause_ms, error)  # fmt: skip
        self._become(RETRYING)
        until = time.monotonic() + pause_ms / 1_000 * random.uniform(0.8, 1.2)
        while (left_s := until - time.monotonic()) > 0:
            if self._stop.wait(min(left_s, _WORD_S)):
                return
            # Who says nothing is taken for ended.
            self._tell_now_and_then()

    def _tell_trouble(self, error: PenstockError) -> None:
        """One line when it begins, or becomes another kind of trouble."""
        before, self._trouble = self._trouble, error
        if before is None:
            self._trouble_since = time.monotonic()
        if type(before) is not type(error):
            _LOGGER.warning("capture %s: %s; trying again until it works", self.config.name, error)

    def _recovered(self) -> None:
        """One line when it is over."""
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            _LOGGER.warning(
                "capture %s: %s again, after %.0f s",
                self.config.name,
                self._state_name,
                time.monotonic() - self._trouble_since,
            )

    # ---- a session -----------------------------------------------------------------------

    def _session(self) -> str:
        """One life of the capture; why it ended: "stop", "pause" or "snapshot"."""
        config = self.config
        self._become(STARTING)
        with ExitStack() as stack:
            cluster = stack.enter_context(self._open_cluster())
            writer = self._make_writer(cluster, config)
            stack.callback(_quietly, lambda: writer.close(drop=True))
            log = Log(config, cluster, writer)
            state = self._state = log.start()
            listener = Listener(cluster, config.name)
            stack.callback(listener.close)
            if state.paused and self._wait_paused(log, listener, state) == STOP:
                return STOP
            source = stack.enter_context(self._open_source(config.source))
            self._kind = source.kind
            if state.position is None:
                _check(source)
            source.setup()
            self._connected = True
            emptying = self._emptying(log)
            events = self._events_now = self._events(log, source, emptying)
            stack.callback(events.close)
            tables = source.tables()
            events.introduce(tables)
            deliverer = self._deliverer = Deliverer(
                config,
                log,
                events,
                state,
                self.meter,
                ask=source.ask,
                listener=listener,
                tell=self._tell_now_and_then,
                known_tables=tables,
                emptying=emptying,
            )
            self._prepare(deliverer, source)
            return deliverer.wish or self._deliver(source, deliverer)

    def _prepare(self, deliverer: Deliverer, source: Source) -> None:
        """What is done before anything is read: hear what was said, look for new tables."""
        deliverer.control()
        if deliverer.wish == commands.SNAPSHOT:
            # It is taken now.
            deliverer.wish = ""
        state = deliverer.state
        if state.snapshot == DONE and self.config.snapshot.new_tables:
            for table in source.tables():
                if table.full_name not in state.tables:
                    deliverer.discover(table.full_name)

    def _emptying(self, log: Log) -> Emptying:
        def complain(text: str) -> None:
            if self._deliverer is not None:
                self._deliverer.commands.complain(text)

        return Emptying(
            self.config,
            log,
            tell=self._tell_now_and_then,
            is_over=self._stop.is_set,
            complain=complain,
        )

    def _events(self, log: Log, source: Source, emptying: Emptying) -> Events:
        settings = self.config.events
        topic: SchemaTopic | None = None
        if settings.format == AVRO or settings.publish_schemas:
            topic = SchemaTopic(
                log.cluster, lambda: log.topics.ensure(SCHEMAS_TOPIC, compacted=True)
            )
        return Events(
            settings,
            source.kind,
            partitions=log.topics.partitions,
            registry=None if topic is None else topic.registry,
            read=log.read,
            folder=self.config.state_dir,
            emptier=emptying,
            publish=None if topic is None else topic.publish,
            schema=PublishedSchemas(log.cluster).by_id,
            altered=self._tell_altered,
        )

    def _tell_altered(self, table: SchemaVersion) -> None:
        _LOGGER.info(
            "capture %s: table %s has changed: %s; its events in %s have schema version %d (id %d) "
            "from here on",
            self.config.name,
            table.table,
            table.changes,
            table.topic,
            table.version,
            table.id,
        )

    def _wait_paused(self, log: Log, listener: Listener, state: State) -> str:
        """Wait until somebody resumes or stops it; what else is said is kept for later."""
        self._become(PAUSED)
        self._recovered()
        incremental = Incremental(state, self.config.snapshot)
        orders = Commands(self.config, state, incremental, state.tables)
        wait_s = self.config.delivery.control_ms / 1_000
        while not self._stop.wait(wait_s):
            heard, state.signals = listener.hear(state.signals)
            wish = PAUSE
            for signal in heard:
                wish = orders.obey(signal, wish)
            if heard:
                log.commit(state)
            if wish == STOP:
                return STOP
            if not state.paused:
                return ""
            self._tell_now_and_then()
        return STOP

    def _deliver(self, source: Source, deliverer: Deliverer) -> str:
        """Read on this thread what the other one delivers."""
        handover: Handover[Work] = Handover(self.config.delivery.buffer_bytes)
        failure: list[BaseException] = []

        def deliver() -> None:
            try:
                deliverer.run(handover)
            except BaseException as error:
                failure.append(error)
            finally:
                handover.close()

        thread = threading.Thread(
            target=deliver, name=f"penstock-capture-{self.config.name}", daemon=True
        )
        thread.start()
        try:
            self._read(source, deliverer, handover)
        except HandoverClosedError:
            pass
        finally:
            handover.end()
            thread.join()
        if failure:
            raise failure[0]
        if deliverer.confirmed is not None:
            source.confirm(deliverer.confirmed)
        return deliverer.wish or STOP

    def _read(self, source: Source, deliverer: Deliverer, handover: Handover[Work]) -> None:
        def is_over() -> bool:
            return self._stop.is_set() or bool(deliverer.wish)

        state = deliverer.state
        position = state.position
        if position is None or state.snapshot != DONE or self._wants_snapshot:
            try:
                position = self._snapshot(source, deliverer, handover, is_over)
            except Interrupted:
                return
            self._wants_snapshot = False
        if self.config.snapshot.mode == INITIAL_ONLY:
            return
        self._become(STREAMING)
        confirmed = None
        look_at = 0.0
        for item in source.stream(position):
            self._recovered()
            handover.put(item, weight_of(item))
            if (now := time.monotonic()) >= look_at:
                look_at = now + _DATABASE_STATUS_S
                self._look_at(source, handover)
            if deliverer.confirmed is not confirmed:
                confirmed = deliverer.confirmed
                if confirmed is not None:
                    source.confirm(confirmed)
            if is_over():
                return
        if not is_over():
            raise CaptureError(f"capture {self.config.name}: the stream has ended by itself")

    def _snapshot(
        self,
        source: Source,
        deliverer: Deliverer,
        handover: Handover[Work],
        is_over: Callable[[], bool],
    ) -> dict[str, object]:
        """Take the snapshot of all tables; the position at which the stream goes on."""
        self._become(SNAPSHOT)
        with source.snapshot() as snapshot:
            self._recovered()
            position = dict(snapshot.position)
            if self.config.snapshot.mode == NO_DATA and deliverer.state.position is None:
                names = [table.full_name for table in snapshot.tables]
                handover.put(SnapshotEnd(position, names))
            else:
                read_snapshot(
                    snapshot,
                    handover,
                    workers=self.config.source.snapshot_workers,
                    where=self.config.snapshot.where,
                    is_over=is_over,
                )
        return position

    def _look_at(self, source: Source, handover: Handover[Work]) -> None:
        """Ask the database how far behind it sees us, and which tables there are: one that came
        with all its rows before it was captured tells nothing by itself. Not knowing does no harm.
        """
        try:
            self._database = asdict(source.status())
            if self.config.snapshot.new_tables:
                tables = source.tables()
                handover.put(TablesThere(tables), sum(len(item.columns) for item in tables) * 100)
        except PenstockError as error:
            _LOGGER.info("capture %s: %s", self.config.name, error)

    # ---- telling -------------------------------------------------------------------------

    def status(self) -> CaptureStatus:
        """How it goes, as far as this process knows."""
        deliverer = self._deliverer
        error = self._error if self._state_name in {RETRYING, FAILED} else None
        problem = deliverer.commands.latest_problem() if deliverer is not None else None
        position = self._state.position
        return CaptureStatus(
            name=self.config.name,
            state=self._state_name,
            kind=self._kind,
            ts_ms=time.time_ns() // 1_000_000,
            told_every_ms=self.config.delivery.status_ms,
            position=None if position is None else dict(position),
            lag_ms_p50=self.meter.lag_ms(0.5),
            lag_ms_p99=self.meter.lag_ms(0.99),
            changes_per_s=self.meter.changes_per_s(),
            changes=self.meter.changes,
            events=self._state.events,
            snapshot=deliverer.progress() if deliverer is not None else None,
            database=self._database,
            unfilled=self._unfilled(),
            attempts=self._attempts,
            error=str(error) if error else (problem.text if problem else ""),
            problem_ms=problem.ts_ms if problem and not error else 0,
            advice=error.advice if isinstance(error, PenstockError) else "",
            **self._tables(),
        )

    def _tables(self) -> dict[str, Any]:
        """Which schemas the tables have, for the status; those of some tables if there are many."""
        events = self._events_now
        known = [] if events is None else list(events.schemas.values())
        told = tuple(
            TableStatus(item.table, item.topic, item.version, item.id, item.changes[:_CHANGES_MAX])
            for item in known[-_TABLES_MAX:]
        )
        return {"tables": told, "table_count": len(known)}

    def _unfilled(self) -> int:
        return 0 if self._deliverer is None else self._deliverer.unfilled

    def _become(self, state: str) -> None:
        # Trouble is told once, and whoever raises an error has it told.
        if state not in {self._state_name, FAILED} and self._trouble is None:
            _LOGGER.info("capture %s: %s", self.config.name, state)
        self._state_name = state
        if self._publisher is not None and state != STARTING:
            self._publisher.tell(self.status)

    def _tell_now_and_then(self) -> None:
        if self._publisher is not None and self._publisher.is_due(self.config.delivery.status_ms):
            self._publisher.tell(self.status)


def _check(source: Source) -> None:
    """CaptureError unless the database can be captured; nothing was changed in it."""
    failed = [item for item in source.check() if item.required and not item.ok]
    if failed:
        raise CaptureError(
            "; ".join(f"{item.name}: {item.found}" for item in failed),
            advice="; ".join(item.remedy for item in failed if item.remedy),
        )


def _quietly(step: Callable[[], None]) -> None:
    with suppress(PenstockError, OSError):
        step()
