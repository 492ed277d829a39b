"""Webhooks pass the tests of all stores, and reach a receiver that fails at random."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from standardwebhooks import Webhook

from penstock.errors import ConfigError
from penstock.sinks import (
    NotReadableError,
    Position,
    Refused,
    Schema,
    StoreError,
    StoreUnreachableError,
    open_sink,
)
from penstock.sinks.webhook import NotForWebhooksError, _messages
from penstock.testing.sinks import PLACE, SIMPLE, TOPIC, SinkKit, Store, changes, never

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Receiver:
    """A server that fails as told, and remembers what it has taken."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.chance = random.Random(1)
        self.failing = 0.0
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
                if status == 0:
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
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
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
                status = self.chance.choice([0, 500, 503])
            if status == 200:
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


class TestWebhook(SinkKit):
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
