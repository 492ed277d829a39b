"""The broker as a whole: one event loop that owns the connections and all partitions.

Everything that touches state runs on the loop: handlers, appends, reads. What would block it runs
elsewhere and reports back: syncs on the committer's threads, the archive on the executor's,
compaction in a child process. `start` opens the data directory, replays the metadata, opens the
partitions and listens, in this order; `stop` goes back the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import struct
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from penstock.broker.apis import produce, produce_single
from penstock.broker.apis.context import Endpoint, RequestContext
from penstock.broker.catalog import PRODUCER_ID_BLOCK, ApiError, Catalog
from penstock.broker.committer import Committer
from penstock.broker.config import BrokerConfig
from penstock.broker.connection import Connection
from penstock.broker.coordination import Coordination
from penstock.broker.fetch_sessions import FetchSessions
from penstock.broker.heap import heap_trimmer
from penstock.broker.internal_topics import InternalTopics
from penstock.broker.lag.positions import GroupPositions
from penstock.broker.lag.watch import LagWatch
from penstock.broker.metadata_log import MetadataLog
from penstock.broker.metrics.http import MetricsServer
from penstock.broker.metrics.metering import Traffic
from penstock.broker.open_files import raise_file_limit, share_out
from penstock.broker.overload import Overload
from penstock.broker.quotas import ClientQuota, Enforcement
from penstock.broker.receive_buffer import BufferPool
from penstock.broker.recompression import Recompression
from penstock.broker.shares.service import Queues
from penstock.broker.slot import Slot
from penstock.broker.telemetry import ClientTelemetry
from penstock.broker.topics import Topics
from penstock.broker.upkeep.care import Counters
from penstock.broker.upkeep.housekeeping import Housekeeping
from penstock.broker.waiting import ReadWaiters, SyncWaiters
from penstock.errors import ConfigError, PenstockError, StorageError, WireError
from penstock.log.archive import open_archive
from penstock.log.clock import Clock, SystemClock
from penstock.log.disk import Disk
from penstock.log.partition import Partition
from penstock.log.store import LogStore
from penstock.wire import Message, api, decode_request_header, decoder, encoder, response_header
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.api_versions import ApiVersionsResponse

log = logging.getLogger(__name__)

_API_VERSIONS = 18
_PRODUCE = b"\0\0"
_CORRELATION = struct.Struct(">i")
_SWEEP_INTERVAL_S = 10.0
_WARNING_PAUSE_S = 10.0
_STOP_PATIENCE_S = 2.0
# So many connections that have gone are worth giving memory back for.
_MANY_DISMISSED = 500


class Broker:
    """One running broker."""

    loop: asyncio.AbstractEventLoop
    committer: Committer

    def __init__(
        self, config: BrokerConfig, *, disk: Disk | None = None, clock: Clock | None = None
    ) -> None:
        from penstock.broker.apis.table import ENDPOINTS

        self.config = config
        self.clock = clock or SystemClock()
        self.store = LogStore(config.data, disk, self.clock)
        self.catalog = Catalog(config)
        self.endpoints: Mapping[int, Endpoint] = ENDPOINTS
        self.sync_waiters = SyncWaiters()
        self.read_waiters = ReadWaiters()
        self.fetch_sessions = FetchSessions(
            config.limits.max_fetch_sessions, clock=lambda: self.clock.now_ms() / 1000
        )
        self.buffer_pool = BufferPool(config.limits.max_buffered_bytes, self._shrink_connections)
        self.round = produce.ProduceRound()
        self.leader_epoch = 0
        self.now_ms = 0
        self.port = config.port
        self.connections: set[Connection] = set()
        # Fewer than configured, if the process may not have so many open files.
        self._max_connections = config.limits.max_connections
        self.traffic = Traffic()
        self.telemetry = ClientTelemetry()
        self.metadata_log = MetadataLog(self.store, self.catalog, self.sync_waiters)
        self.topics = Topics(self)
        self.partition = self.topics.partition
        self.coordination = Coordination(self)
        self.queues = Queues(self)
        self.overload = Overload(self)
        self.recompression = Recompression(self)
        self.lag_watch = LagWatch(self, GroupPositions(self.coordination, self.catalog))
        # What connections call for each of their frames; quotas, where there are any, come first.
        self.dispatch: Callable[[Connection, memoryview], None] = self.dispatch_plain
        self.enforcement = Enforcement(self, self.coordination.quotas)
        self.internal_topics = InternalTopics(self)
        self._warn_again_at = 0.0
        self._producer_ids = range(0)
        self._producer_id_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dismissed = asyncio.Event()
        self._dismissed_lately = 0
        self._server: asyncio.Server | None = None
        self.housekeeping: Housekeeping | None = None
        self.metrics_server = (
            MetricsServer(self, config.metrics_host, config.metrics_port)
            if config.metrics_port is not None
            else None
        )
        self._sweeper: asyncio.TimerHandle | None = None

    # ---- life ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Open everything and listen; ready for clients on return."""
        self.loop = asyncio.get_running_loop()
        if self.metrics_server is not None:
            await self.metrics_server.start()
        try:
            await self._open()
        except BaseException:
            if self.metrics_server is not None:
                await self.metrics_server.stop()
            raise
        self.lag_watch.start()
        if self.metrics_server is not None:
            self.metrics_server.ready = True

    async def _open(self) -> None:
        shares = share_out(raise_file_limit(), self.config.limits.max_connections)
        self.store.most_open_logs, self._max_connections = shares
        archive = open_archive(self.config.archive) if self.config.archive else None
        self.store.open()
        try:
            self.committer = Committer(self.on_synced)
            self.sync_waiters.attach(self.committer)
            self.metadata_log.open()
            if not self.store.was_clean:
                self.metadata_log.commit_at_start(self.catalog.raise_leader_epoch())
            self.leader_epoch = self.catalog.counter("leader-epoch")
            self.coordination.open()
            if not self.metadata_log.partition.damaged:
                self.store.remove_strays(
                    {topic.name: topic.id for topic in self.catalog.topics.values()},
                    self.metadata_log.deleted,
                )
            for topic in self.catalog.topics.values():
                self.topics.load(topic)
            self.store.forget_states()
            self.coordination.start()
            await self.coordination.markers.recover()
            self.housekeeping = Housekeeping(
                self.store,
                archive=archive,
                interval_ms=self.config.housekeeping_interval_ms,
                request_sync=self.committer.request,
                release_waiters=self.sync_waiters.release,
                on_removed=self.overload.made_room,
            )
            self._server = await self.loop.create_server(
                lambda: Connection(self), self.config.host, self.config.port, backlog=1024
            )
        except OSError as error:
            # Nothing has happened yet: the next start need not recover from this one.
            self.coordination.stop()
            await self.committer.close()
            self.store.close()
            raise ConfigError(
                f"cannot listen on {self.config.host}:{self.config.port}: {error.strerror}",
                advice="Choose another address with --listen, or stop what uses this one.",
            ) from error
        except BaseException:
            self.coordination.stop(keep=False)
            self.store.abandon()
            raise
        self.port = self._server.sockets[0].getsockname()[1]
        self.housekeeping.start()
        for partition in self.store.partitions.values():
            self.overload.follow(partition)
        self.recompression.follow(self.store.partitions.values(), fresh=True)
        if self.store.leftovers:
            # What a deletion left that the last stop has interrupted.
            _ = self.loop.run_in_executor(None, self.store.erase, self.store.leftovers)
        self._sweeper = self.loop.call_later(_SWEEP_INTERVAL_S, self._sweep)

    async def stop(self) -> bool:
        """Finish what is under way and sync everything; whether the directory is left clean."""
        if self._server is not None:
            self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._stop_watching()
        self.overload.stop()
        self.recompression.stop()
        # Clients that go on sending would keep it from ever coming to an end.
        for connection in list(self.connections):
            connection.stop_reading()
        # Members that wait for others to join would keep it waiting.
        self.coordination.groups.dismiss_all()
        if self.housekeeping is not None:
            await self.housekeeping.stop()
        # Deletions would take their time: the next start goes on with them.
        self.store.stop_erasing()
        await self._finish_tasks()
        self.queues.rounds.stop()
        self.coordination.stop()
        for partition in self.store.partitions.values():
            self.committer.request(partition)
        await self.committer.close()
        await self._part_with_clients()
        return self.store.close()

    async def _stop_watching(self) -> None:
        if self.metrics_server is not None:
            await self.metrics_server.stop()
        await self.lag_watch.stop()

    async def _finish_tasks(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_PATIENCE_S)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _part_with_clients(self) -> None:
        """Let answers that the last sync released go out; cut off who does not take them."""
        await asyncio.sleep(0)
        for connection in list(self.connections):
            connection.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_PATIENCE_S):
                while self.connections:
                    await self._dismissed.wait()
                    self._dismissed.clear()
        for connection in list(self.connections):
            connection.close()

    async def crash(self) -> None:
        """Let everything drop, as a killed process would; for tests."""
        assert self._server is not None
        assert self.housekeeping is not None
        self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._stop_watching()
        self.recompression.stop()
        self.queues.rounds.stop()
        self.coordination.stop(keep=False)
        await self.housekeeping.stop()
        await self.committer.close()
        for connection in list(self.connections):
            connection.close()
        self.store.abandon()

    @property
    def advertised(self) -> tuple[str, int]:
        """Where clients are told to connect to."""
        host = self.config.advertised_host or self.config.host
        return host, self.config.advertised_port or self.port

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background that the broker waits for when it stops."""
        _ = self.task(work)

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """The same, to be waited for."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_failure)
        return task

    def warn_now_and_then(self, doing: str, error: Exception) -> None:
        """Log what every request of some client may meet, without filling the log with it."""
        now = self.loop.time()
        if now >= self._warn_again_at:
            self._warn_again_at = now + _WARNING_PAUSE_S
            log.warning("%s: %s%s", doing, error, _advice_of(error))

    # ---- connections ---------------------------------------------------------------------

    def admit(self, connection: Connection) -> bool:
        if len(self.connections) >= self._max_connections:
            self.traffic.refused += 1
            return False
        self.traffic.connections += 1
        self.connections.add(connection)
        return True

    def dismiss(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._dismissed_lately += 1
        self.telemetry.disconnected(connection)
        self._dismissed.set()

    def _shrink_connections(self) -> None:
        """Take back the grown receive buffers that are not in use."""
        for connection in self.connections:
            connection.shrink()

    def _sweep(self) -> None:
        """Close connections that have been silent too long; give back buffers not in use."""
        now = self.loop.time()
        limit_s = self.config.limits.max_idle_ms / 1000
        request_limit_s = self.config.limits.max_request_ms / 1000
        for connection in list(self.connections):
            silent_s = now - connection.last_active
            arriving_since = connection.incomplete_since
            if silent_s > limit_s:
                connection.close("idle")
            elif arriving_since is not None and now - arriving_since > request_limit_s:
                connection.close("a request takes too long to arrive")
            elif silent_s > _SWEEP_INTERVAL_S:
                connection.shrink()
        self.buffer_pool.release_unused()
        self._give_memory_back()
        self._sweeper = self.loop.call_later(_SWEEP_INTERVAL_S, self._sweep)

    def _give_memory_back(self) -> None:
        """Once many connections are gone, what they took is the system's again."""
        if self._dismissed_lately >= _MANY_DISMISSED and (trim := heap_trimmer()) is not None:
            self._dismissed_lately = 0
            _ = self.loop.run_in_executor(None, trim)

    # ---- requests ------------------------------------------------------------------------

    def dispatch_plain(self, connection: Connection, frame: memoryview) -> None:
        """Answer one request; WireError if it is not one that can be answered."""
        if frame[:2] == _PRODUCE:
            known = connection.targets.find(frame)
            if known is not None:
                (correlation_id,) = _CORRELATION.unpack_from(frame, 4)
                produce_single.stage(self, connection, *known, correlation_id)
                return
        self.dispatch_in_full(connection, frame)

    def dispatch_in_full(
        self,
        connection: Connection,
        frame: memoryview,
        throttle_ms: int = 0,
        quota: ClientQuota | None = None,
    ) -> None:
        """Answer a request that is not recognised by its bytes, or whose client must slow down."""
        key, version, correlation_id, client_id, at = decode_request_header(frame, 0)
        endpoint = self.endpoints.get(key)
        if endpoint is None:
            raise WireError(f"there is no API {key} here")
        context = RequestContext(
            key, version, correlation_id, client_id, connection, throttle_ms, quota
        )
        if not endpoint.min_version <= version <= endpoint.max_version:
            self._refuse_version(context)
            self.traffic.count(key)
            return
        if endpoint.hot is not None:
            endpoint.hot(self, frame, at, context)
            self.traffic.count(key)
            return
        assert endpoint.handler is not None
        # Bytes may follow: librdkafka sends some after a Metadata request, and Kafka takes it.
        request, _ = decoder(api(key).request, version)(frame, at)
        self.traffic.count(key)
        slot = connection.open_slot()
        try:
            outcome = endpoint.handler(self, request, context)
            if inspect.isawaitable(outcome):
                self.spawn(self._answer_later(slot, context, outcome))
            else:
                self._answer(slot, context, outcome)
        except Exception as error:
            self._apologise(slot, context, error)

    def _refuse_version(self, context: RequestContext) -> None:
        """A client that asks ApiVersions too new a question is told, in the oldest form."""
        if context.api_key != _API_VERSIONS:
            name = api(context.api_key).name
            raise WireError(f"version {context.version} of {name} is not supported")
        table = self.endpoints[_API_VERSIONS]
        assert table.handler is not None
        response = table.handler(self, None, context)
        assert isinstance(response, ApiVersionsResponse)
        response.error_code = ErrorCode.UNSUPPORTED_VERSION
        context.version = 0
        self._answer(context.connection.open_slot(), context, response)

    async def _answer_later(
        self, slot: Slot, context: RequestContext, outcome: Awaitable[Message]
    ) -> None:
        try:
            self._answer(slot, context, await outcome)
        except Exception as error:
            self._apologise(slot, context, error)

    def _answer(self, slot: Slot, context: RequestContext, response: Message) -> None:
        if context.throttle_ms and hasattr(response, "throttle_time_ms"):
            response.throttle_time_ms = context.throttle_ms
        if code := getattr(response, "error_code", 0):
            self.traffic.errors[context.api_key, code] += 1
        body = encoder(type(response), context.version)(response)
        header = response_header(context.api_key, context.version, context.correlation_id)
        slot.answer((header, body))

    def _apologise(self, slot: Slot, context: RequestContext, error: Exception) -> None:
        """A handler failed: say why, in the response if it has a place for it."""
        entry = api(context.api_key)
        code = ErrorCode.UNKNOWN_SERVER_ERROR
        if isinstance(error, ApiError):
            code = error.code
        elif isinstance(error, StorageError):
            # Of a coordinator: clients ask again.
            self.warn_now_and_then(f"answering {entry.name}", error)
            code = ErrorCode.COORDINATOR_NOT_AVAILABLE
        else:
            log.error("answering %s v%d: %r", entry.name, context.version, error, exc_info=error)
        response: Any = entry.response()
        if not hasattr(response, "error_code"):
            context.connection.close("the request could not be answered")
            return
        response.error_code = code
        self._answer(slot, context, response)

    def finish_round(self) -> None:
        """Write what the requests of this network read have staged."""
        round_ = self.round
        if round_.writes or round_.unwritten:
            self.round = produce.ProduceRound()
            produce.finish_round(self, round_)

    def on_synced(self, partition: Partition) -> None:
        """What can be read of the partition has changed: tell those who wait for it."""
        self.sync_waiters.release(partition)
        self.read_waiters.wake(partition)
        if self.overload.guards:
            self.overload.synced(partition)

    # ---- partitions ----------------------------------------------------------------------

    @property
    def housekeeping_counters(self) -> Counters | None:
        return self.housekeeping.counters if self.housekeeping is not None else None

    def failures(self) -> list[str]:
        """What keeps the broker as a whole from working: its own topics cannot be written."""
        own = (self.metadata_log.partition, self.coordination.journal.partition)
        return [f"{part.id}: {part.failure}" for part in own if part.failure is not None]

    def needed_from(self, group: str, topic: str, number: int) -> int | None:
        """The first offset of a partition that a group still needs; None if it has said nothing."""
        known = self.coordination.groups.get(group)
        if known is not None and known.kind == "share":
            found = self.catalog.topics.get(topic)
            shares = self.coordination.shares
            return shares.start_offset(group, str(found.id), number) if found is not None else None
        return self.coordination.groups.committed(group, topic, number)

    async def make_room(self, partition: Partition) -> None:
        """Remove now what retention does not keep."""
        assert self.housekeeping is not None
        await self.housekeeping.relieve(partition)

    # ---- producer ids --------------------------------------------------------------------

    async def next_producer_id(self) -> int:
        async with self._producer_id_lock:
            if not self._producer_ids:
                await self.metadata_log.commit(self.catalog.reserve_producer_ids)
                end = self.catalog.counter("producer-id")
                self._producer_ids = range(end - PRODUCER_ID_BLOCK, end)
            first, self._producer_ids = self._producer_ids[0], self._producer_ids[1:]
            return first


def _advice_of(error: Exception) -> str:
    return f". {error.advice}" if isinstance(error, PenstockError) and error.advice else ""


def log_failure(task: asyncio.Task[None]) -> None:
    """Nobody awaits a task in the background: say what went wrong with it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("in the background: %r", error, exc_info=error)
