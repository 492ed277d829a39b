"""Webhooks pass the tests of all stores, and reach a receiver that fails at random."""

from __future__ import annotations

import datetime as dt
import json
import random
import socket
import sqlite3
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from standardwebhooks import Webhook

from penstock.errors import ConfigError
from penstock.sinks import (
    Changes,
    NotReadableError,
    Position,
    Refused,
    Schema,
    StoreError,
    StoreUnreachableError,
    open_sink,
)
from penstock.sinks.contract import ORIGIN
from penstock.sinks.webhook import NotForWebhooksError, WebhookSink, _messages, _Sent
from penstock.testing.sinks import PLACE, SIMPLE, TOPIC, Store, changes, never
from tests.sinks.kit import StoreKit

TAKEN = -1
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Receiver:
    """A server that fails as told, and remembers what it has taken."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.chance = random.Random(1)
        self.failing = 0.0
        # Of those that fail: 0 is no answer, TAKEN none though it was taken.
        self.statuses = [0, 500, 503]
        self.status: dict[int, int] = {}
        self.taken: list[dict[str, Any]] = []
        self.tries: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = receiver.received(dict(self.headers), body)
                if status <= 0:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", "4")
                self.end_headers()
                self.wfile.write(b"said")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"webhook+http://127.0.0.1:{self.server.server_port}/hooks"

    def received(self, headers: dict[str, str], body: bytes) -> int:
        # Raises if it is not signed as it should be, which the client sees as no answer.
        event: dict[str, Any] = Webhook(SECRET).verify(body, headers)
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            number = event["data"]["id"]
            self.tries[headers["webhook-id"]] += 1
            fails = self.chance.random() < self.failing
            status = self.status.get(number, 200)
            if fails:
                status = self.chance.choice(self.statuses)
            if status in {200, TAKEN}:
                self.taken.append({"id": headers["webhook-id"], **event})
            self.at_once -= 1
        return status

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


class TestWebhook(StoreKit):
    @pytest.fixture
    def store(self, receiver: Receiver, tmp_path: Path) -> Store:
        options = {"secret": SECRET, "state": f"{tmp_path}/state.db"}
        return Store(receiver.url, options, frozenset({"switch"}))


def options(tmp_path: Path, **more: object) -> dict[str, object]:
    return {"secret": SECRET, "state": f"{tmp_path}/state.db", "pause_max_s": 1, **more}


def test_all_arrive_in_the_order_of_each_key(receiver: Receiver, tmp_path: Path, seed: int) -> None:
    receiver.chance.seed(seed)
    receiver.failing = 0.2
    chance = random.Random(seed)
    sent: dict[int, list[tuple[str, str | None]]] = defaultdict(list)
    with open_sink(receiver.url, options(tmp_path, attempts=30), name="orders") as sink:
        at = 0
        sink.open(SIMPLE)
        for batch in range(5):
            numbers = chance.sample(range(20), 12)
            rows = [{"id": number, "name": f"b{batch}"} for number in numbers[:8]]
            gone = [(number,) for number in numbers[8:]]
            made = changes(SIMPLE, rows, gone, since=at, until=at + 12)
            assert sink.apply(made, never).rows == 12
            at += 12
            for number in numbers[:8]:
                sent[number].append(("orders.upserted", f"b{batch}"))
            for number in numbers[8:]:
                sent[number].append(("orders.deleted", None))
    got: dict[int, list[tuple[str, str | None]]] = defaultdict(list)
    seen: set[str] = set()
    for event in receiver.taken:
        # A request whose answer was lost is sent again, with the same id.
        if event["id"] not in seen:
            seen.add(event["id"])
            got[event["data"]["id"]].append((event["type"], event["data"].get("name")))
    assert got == sent
    assert seen == {f"{TOPIC}-0-{offset}" for offset in range(at)}
    assert receiver.taken[0]["timestamp"] == "2026-01-01T00:00:00.000000Z"
    assert receiver.most_at_once <= 8


def test_what_is_not_taken_is_put_aside(receiver: Receiver, tmp_path: Path) -> None:
    receiver.status = {2: 422, 4: 500}
    aside: list[Refused] = []
    with open_sink(receiver.url, options(tmp_path, attempts=2)) as sink:
        sink.open(SIMPLE)
        rows = [{"id": number, "name": "x"} for number in range(5)]
        done = sink.apply(changes(SIMPLE, rows, [], since=0, until=5), aside.extend)
        assert done.rows == 3
        assert [(each.key, each.offset) for each in aside] == [((2,), 2), ((4,), 4)]
        assert "422 said" in aside[0].reason
        assert receiver.tries[f"{TOPIC}-0-2"] == 2
        assert sink.position() == Position({PLACE: 5})


def test_a_receiver_that_is_down_keeps_the_sink_waiting(receiver: Receiver, tmp_path: Path) -> None:
    receiver.status = {3: 503}
    rows = [{"id": number, "name": "x"} for number in range(5)]
    made = changes(SIMPLE, rows, [], since=0, until=5)
    with open_sink(receiver.url, options(tmp_path, attempts=2, concurrency=1)) as sink:
        sink.open(SIMPLE)
        with pytest.raises(StoreUnreachableError, match="503"):
            sink.apply(made, never)
        assert sink.position() == Position()
    receiver.status = {}
    with open_sink(receiver.url, options(tmp_path)) as sink:
        sink.open(SIMPLE)
        assert sink.apply(made, never).rows == 5
    # What was delivered before is not sent again.
    assert sorted(event["data"]["id"] for event in receiver.taken) == list(range(5))


Log = list[tuple[int, str | None]]


def cut(log: Log, since: int, until: int) -> Changes:
    """A batch of a log of changes: the last change of each key; None is a deletion."""
    last = {log[at][0]: at for at in range(since, until)}
    puts = [at for at in last.values() if log[at][1] is not None]
    gone = [at for at in last.values() if log[at][1] is None]
    made = changes(SIMPLE, [{"id": log[at][0], "name": log[at][1]} for at in puts],
                   [(log[at][0],) for at in gone], since=since, until=until)  # fmt: skip
    return replace(made, upserted_at=_at(puts), deleted_at=_at(gone))


def _at(offsets: list[int]) -> pa.Table:
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    return pa.Table.from_pylist(
        [{"topic": TOPIC, "partition": 0, "offset": at, "timestamp": moment} for at in offsets],
        schema=ORIGIN,
    )


def seen_once(receiver: Receiver) -> list[tuple[int, int]]:
    """Keys and offsets as a receiver sees them that remembers ids."""
    events = {event["id"]: event["data"]["id"] for event in receiver.taken}
    return [(key, int(name.rpartition("-")[2])) for name, key in events.items()]


@pytest.mark.parametrize("ending", ["failure", "kill"])
@pytest.mark.parametrize("status", [503, TAKEN])
def test_a_retry_may_be_smaller_than_the_batch_that_failed(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, ending: str
) -> None:
    log: Log = [(1, "old"), (3, "old"), (1, "new"), (2, "x"), (3, "new")]
    receiver.status = {2: status}
    with open_sink(receiver.url, options(tmp_path, attempts=1, concurrency=1)) as sink:
        sink.open(SIMPLE)
        if ending == "kill":
            monkeypatch.setattr(WebhookSink, "_remember", lambda *_: None)
        with pytest.raises(StoreUnreachableError):
            sink.apply(cut(log, 0, 5), never)
        monkeypatch.undo()
    receiver.status = {}
    with open_sink(receiver.url, options(tmp_path, attempts=1, concurrency=1)) as sink:
        assert sink.open(SIMPLE) == Position()
        assert sink.apply(cut(log, 0, 2), never).rows == 2
        assert sink.position() == Position({PLACE: 2})
        sink.apply(cut(log, 2, 5), never)
        assert sink.position() == Position({PLACE: 5})
    # What was surely not sent is, and nothing that is older than what may have arrived.
    before = [(1, 2), *([(2, 3)] if status == TAKEN else [])]
    after = [(2, 3), (3, 4)] if status != TAKEN else [(3, 4)]
    older = [(3, 1)] if ending == "failure" else []
    assert seen_once(receiver) == [*before, *older, *after]
    with closing(sqlite3.connect(tmp_path / "state.db")) as state:
        assert state.execute("SELECT count(*) FROM sent").fetchone() == (0,)


def test_what_may_have_arrived_is_not_forgotten_by_a_second_failure(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: Log = [(1, "old"), (2, "x"), (1, "new")]
    with open_sink(receiver.url, options(tmp_path, attempts=1, concurrency=1)) as sink:
        sink.open(SIMPLE)
        receiver.status = {1: TAKEN}
        monkeypatch.setattr(WebhookSink, "_remember", lambda *_: None)
        with pytest.raises(StoreUnreachableError):
            sink.apply(cut(log, 0, 3), never)
        monkeypatch.undo()
        # Now the change of key 1 is not begun.
        receiver.status = {2: 503}
        with pytest.raises(StoreUnreachableError):
            sink.apply(cut(log, 0, 3), never)
        receiver.status = {}
        sink.apply(cut(log, 0, 1), never)
        sink.apply(cut(log, 1, 3), never)
    assert seen_once(receiver) == [(2, 1), (1, 2)]


def test_however_the_log_is_cut_receivers_end_with_the_last_change(
    receiver: Receiver, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    log: Log = [
        (chance.randrange(6), None if chance.random() < 0.2 else f"n{at}") for at in range(120)
    ]
    receiver.chance.seed(seed)
    receiver.failing, receiver.statuses = 0.15, [0, 503, TAKEN]
    remember = WebhookSink._remember
    at = 0
    while at < len(log):
        # Killed, it remembers only what it wrote down before.
        forgets = chance.random() < 0.3
        monkeypatch.setattr(WebhookSink, "_remember", (lambda *_: None) if forgets else remember)
        with open_sink(receiver.url, options(tmp_path, attempts=1)) as sink:
            assert sink.open(SIMPLE) == (Position({PLACE: at}) if at else Position())
            until = min(len(log), at + chance.randint(1, 20))
            try:
                sink.apply(cut(log, at, until), never)
                at = until
            except StoreUnreachableError:
                continue
    seen = seen_once(receiver)
    for key in range(6):
        offsets = [offset for each, offset in seen if each == key]
        assert offsets == sorted(offsets)
        assert offsets[-1:] == [at for at, change in enumerate(log) if change[0] == key][-1:]


def test_of_two_partitions_the_time_decides() -> None:
    """A key that has moved: what was written earlier does not follow what was written later."""
    here = _Sent("t-0-9", "1", "t", 0, 9, time_us=20)
    there = _Sent("t-1-3", "1", "t", 1, 3, time_us=30)
    assert there.is_later_than(here)
    assert not here.is_later_than(there)
    assert replace(here, offset=10, time_us=0).is_later_than(here)


def test_nobody_there_and_gone_for_good(receiver: Receiver, tmp_path: Path) -> None:
    made = changes(SIMPLE, [{"id": 1, "name": "x"}], [], since=0, until=1)
    receiver.status = {1: 410}
    with open_sink(receiver.url, options(tmp_path)) as sink:
        sink.open(SIMPLE)
        with pytest.raises(StoreError, match="410"):
            sink.apply(made, never)
        with pytest.raises(NotReadableError):
            sink.scan()
        with pytest.raises(NotForWebhooksError):
            sink.beside()
    with socket.socket() as deaf:
        # Bound and not listening: nobody else gets the port, and nobody answers.
        deaf.bind(("127.0.0.1", 0))
        url = f"webhook+http://127.0.0.1:{deaf.getsockname()[1]}/hooks"
        with open_sink(url, options(tmp_path, attempts=1, timeout_s=5)) as sink:
            sink.open(SIMPLE)
            with pytest.raises(StoreUnreachableError):
                sink.apply(made, never)


def test_wrong_options_are_told(tmp_path: Path) -> None:
    for wrong in ({"secret": "short"}, {"secret": "whsec_%%%"}, {"attempts": 0}, {"colour": 1}):
        with pytest.raises(ConfigError):
            open_sink("webhook+http://localhost/x", wrong)
    with open_sink("webhook+http://localhost/x", {"state": f"{tmp_path}/bad.db"}) as sink:
        (tmp_path / "bad.db").write_bytes(b"no database, but something else" * 100)
        with pytest.raises(StoreError):
            sink.open(SIMPLE)
    assert json.dumps(sink.target) == '"webhook+http://localhost/x"'


def test_rows_of_one_place_have_ids_of_their_own() -> None:
    """All rows of a flow's batch stand at the same place: each must be delivered."""
    schema = Schema.of([pa.field("id", pa.int64())], "id")
    batch = changes(schema, [{"id": 1}, {"id": 2}], [(3,)], since=0, until=1)
    one = pa.concat_tables([batch.upserted_at.slice(0, 1)] * 2)
    batch = replace(batch, upserted_at=one, deleted_at=one.slice(0, 1))
    ids = [each.id for each in _messages(batch, schema, "row")]
    assert len(set(ids)) == 3
    # Sent again, they are the same.
    assert [each.id for each in _messages(batch, schema, "row")] == ids
    alone = changes(schema, [{"id": 1}], [], since=7, until=8)
    assert [each.id for each in _messages(alone, schema, "row")] == ["kit.changes-0-7"]
