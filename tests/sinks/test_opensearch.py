"""OpenSearch passes the tests of all stores, on a real server."""

from __future__ import annotations

import datetime as dt
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import ConfigError
from penstock.sinks import (
    FencedError,
    Position,
    Refused,
    Schema,
    StoreError,
    StoreUnreachableError,
    open_sink,
)
from penstock.sinks.http import Answer
from penstock.sinks.opensearch import OpenSearchSink
from penstock.sinks.schema import json_field
from penstock.testing.opensearch import OpenSearch
from penstock.testing.sinks import Row, Store, changes, never, read
from tests.sinks.kit import StoreKit, new_name
from tests.waiting import eventually


@pytest.fixture
def server(opensearch: OpenSearch) -> OpenSearch:
    return opensearch


class TestOpenSearch(StoreKit):
    @pytest.fixture
    def store(self, server: OpenSearch) -> Store:
        return Store(f"opensearch+{server.url}/{new_name()}")


PRODUCTS = Schema.of(
    [
        pa.field("sku", pa.string()),
        pa.field("title", pa.string()),
        pa.field("status", pa.string()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("since", pa.timestamp("us", "UTC")),
        json_field("more"),
    ],
    "sku",
)


def products(server: OpenSearch, name: str = "", **options: object) -> OpenSearchSink:
    url = f"opensearch+{server.url}/{name or new_name()}"
    made = open_sink(url, {"keyword": "status", **options})
    assert isinstance(made, OpenSearchSink)
    return made


def asked(server: OpenSearch, path: str, body: object | None = None) -> Any:
    """What the server answers to anyone."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{server.url}/{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def product(sku: str, **more: object) -> Row:
    return {
        "sku": sku,
        "title": "Red Boots",
        "status": "on sale",
        "price": Decimal("19.90"),
        "since": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "more": '{"a":1}',
        **more,
    }


def test_documents_are_searched_by_anyone(server: OpenSearch) -> None:
    name = new_name()
    with products(server, name, bulk_rows=2) as sink:
        sink.open(PRODUCTS)
        rows = [product("a"), product("b", title="Green hat", price=Decimal("5.00")), product("c")]
        sink.apply(changes(PRODUCTS, rows, [], since=0, until=3), never)
        assert sink.search({"match": {"title": "hat"}}) == [rows[1]]
        for query, wanted in (
            ({"match": {"title": "boots"}}, ["a", "c"]),
            ({"term": {"status": "on sale"}}, ["a", "b", "c"]),
            ({"term": {"title.keyword": "Green hat"}}, ["b"]),
            ({"range": {"price": {"lt": 10}}}, ["b"]),
            ({"range": {"since": {"gte": "2026-01-01"}}}, ["a", "b", "c"]),
            # What we keep for ourselves is not found.
            ({"match_all": {}}, ["a", "b", "c"]),
        ):
            found = asked(server, f"{name}/_search", {"query": query, "sort": ["sku"]})
            assert [hit["_source"]["sku"] for hit in found["hits"]["hits"]] == wanted


def test_a_late_request_of_an_old_writer_changes_nothing(server: OpenSearch) -> None:
    """The old writer has looked, and writes when the new one has gone on: all of it is too late."""
    name = new_name()
    with products(server, name) as old, products(server, name) as new:
        old.open(PRODUCTS)
        first = changes(PRODUCTS, [product("a"), product("b")], [], since=0, until=2)
        old.apply(first, never)
        new.open(PRODUCTS)
        row = product("a", title="new")
        new.apply(changes(PRODUCTS, [row], [("b",)], since=2, until=4), never)
        assert old._write(first, PRODUCTS) == []
        with pytest.raises(FencedError):
            old.apply(changes(PRODUCTS, [], [("a",)], since=4, until=5), never)
        assert read(new) == [row]


def test_what_the_server_refuses_is_put_aside(server: OpenSearch) -> None:
    aside: list[Refused] = []
    with products(server) as sink:
        sink.open(PRODUCTS)
        long, fine = product("x" * 40_000), product("y" * 600)
        rows = [product("a"), long, fine]
        done = sink.apply(changes(PRODUCTS, rows, [], since=0, until=3), aside.extend)
        assert done.rows == 2
        assert [each.offset for each in aside] == [1]
        assert "immense" in aside[0].reason or "bytes" in aside[0].reason
        assert read(sink) == [product("a"), fine]
        sink.apply(changes(PRODUCTS, [], [("y" * 600,)], since=3, until=4), never)
        assert read(sink) == [product("a")]


def test_requests_at_the_same_time_keep_every_row_and_tell_which_were_refused(
    server: OpenSearch,
) -> None:
    aside: list[Refused] = []
    with products(server, bulk_rows=3, concurrency=4) as sink:
        sink.open(PRODUCTS)
        old = [product(f"old-{at:02}") for at in range(20)]
        sink.apply(changes(PRODUCTS, old, [], since=0, until=20), never)
        bad = {5, 17, 40}
        rows = [product(("x" * 40_000 if at in bad else "new") + f"-{at:02}") for at in range(50)]
        gone = [("x" * 40_000,), *((row["sku"],) for row in old[:10])]
        done = sink.apply(changes(PRODUCTS, rows, gone, since=20, until=81), aside.extend)
        assert {each.offset - 20 for each in aside} == bad
        assert {each.key[0] for each in aside} == {rows[at]["sku"] for at in bad}
        assert done.rows == 61 - len(bad)
        kept = [row for at, row in enumerate(rows) if at not in bad]
        assert sorted(read(sink), key=lambda row: str(row["sku"])) == [*kept, *old[10:]]


def test_requests_are_made_when_their_turn_comes_and_none_after_an_error(
    server: OpenSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    begun: list[int] = []
    ended: list[int] = []
    ahead: list[int] = []
    fails, both = threading.Event(), threading.Barrier(2)

    def bulk(begin: int, lines: Sequence[bytes]) -> list[tuple[int, str]]:
        begun.append(begin)
        if fails.is_set():
            # Both are on their way when one of them fails, and the other one goes on.
            both.wait(60)
            if begin == 0:
                raise StoreUnreachableError("away")
            eventually(lambda: len(made) == 3)
        ended.append(begin)
        return [(begin, "no")] if begin % 2 else []

    def requests() -> Iterator[tuple[int, list[bytes]]]:
        for number in range(20):
            made.append(number)
            ahead.append(len(made) - len(ended))
            yield number, [b""]

    with products(server, concurrency=2) as sink:
        monkeypatch.setattr(sink, "_bulk", bulk)
        assert sorted(sink._sent(requests())) == [(at, "no") for at in range(1, 20, 2)]
        assert max(ahead) <= 3
        for seen in (made, begun, ended):
            seen.clear()
        fails.set()
        with pytest.raises(StoreUnreachableError):
            list(sink._sent(requests()))
    assert (made, sorted(begun), ended) == ([0, 1, 2], [0, 1], [1])


def test_what_is_not_there_is_deleted_beside_a_row_that_is_refused(server: OpenSearch) -> None:
    """In one request: its answer tells of both, and only one of them is an error."""
    aside: list[Refused] = []
    with products(server) as sink:
        sink.open(PRODUCTS)
        rows = [product("a"), product("x" * 40_000), product("b")]
        done = sink.apply(changes(PRODUCTS, rows, [("c",)], since=0, until=4), aside.extend)
        assert done.rows == 3
        assert [each.offset for each in aside] == [1]
        assert read(sink) == [product("a"), product("b")]


def test_only_what_a_busy_server_did_not_take_is_sent_again(
    server: OpenSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside: list[Refused] = []
    sent: list[int] = []
    with products(server, bulk_rows=4, concurrency=1) as sink:
        sink.open(PRODUCTS)
        send = sink._asked

        def busy(method: str, path: str, *more: Any, **named: Any) -> Answer:
            answer = send(method, path, *more, **named)
            if "_bulk" not in path:
                return answer
            found = json.loads(answer.body)
            sent.append(len(found["items"]))
            if len(sent) == 2:
                # Of the request with rows 4 to 7, of which row 5 is refused.
                for at in (0, 3):
                    error = {"type": "rejected_execution_exception", "reason": "queue is full"}
                    found["items"][at]["index"] = {"status": 429, "error": error}
            return Answer(answer.status, json.dumps(found).encode())

        monkeypatch.setattr(sink, "_asked", busy)
        rows = [product(("x" * 40_000 if at == 5 else "new") + f"-{at:02}") for at in range(10)]
        done = sink.apply(changes(PRODUCTS, rows, [], since=0, until=10), aside.extend)
        assert sent == [4, 4, 2, 2]
        assert [each.offset for each in aside] == [5]
        assert done.rows == 9
        assert read(sink) == [row for at, row in enumerate(rows) if at != 5]


def test_the_rows_of_a_batch_are_found_only_when_all_of_it_is_there(server: OpenSearch) -> None:
    name = new_name()
    with products(server, name) as sink:
        sink.open(PRODUCTS)
        batch = changes(PRODUCTS, [product("a"), product("b")], [], since=0, until=2)
        # As of a writer that is killed before the position is kept.
        sink._version = 2
        assert sink._write(batch, PRODUCTS) == []
        assert sink.search({"match_all": {}}) == []
        sink.apply(batch, never)
        assert len(sink.search({"match_all": {}})) == 2


def test_nothing_is_left_of_what_was_replaced(server: OpenSearch) -> None:
    name = new_name()
    with products(server, name) as sink:
        sink.open(PRODUCTS)
        with sink.beside() as anew:
            anew.open(PRODUCTS)
            anew.apply(changes(PRODUCTS, [product("a")], [], since=0, until=1), never)
            anew.switch()
        assert len(asked(server, f"{name}*/_alias")) == 1
        assert read(sink) == [product("a")]
        sink.remove()
        assert asked(server, f"{name}*/_alias") == {}


def test_wrong_names_options_and_servers_are_told(server: OpenSearch) -> None:
    name = new_name()
    wrong_ones: list[tuple[str, dict[str, object]]] = [
        ("Upper", {}),
        ("_x", {}),
        ("x", {"colour": 1}),
        ("x", {"bulk_rows": 0}),
        ("x", {"concurrency": 0}),
    ]
    for wrong_name, wrong in wrong_ones:
        with pytest.raises(ConfigError):
            products(server, wrong_name, **wrong)
    with products(server, keyword="nothing") as sink, pytest.raises(ConfigError):
        sink.open(PRODUCTS)
    asked(server, f"{name}/_doc", {"a": 1})
    with products(server, name) as sink, pytest.raises(StoreError, match="not made"):
        sink.open(PRODUCTS)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        url = f"elasticsearch+http://u:geheim@127.0.0.1:{deaf.getsockname()[1]}/x"
        with open_sink(url) as lost, pytest.raises(StoreUnreachableError) as told:
            lost.position()
        assert "geheim" not in f"{told.value} {lost.target}"


def test_what_a_killed_writer_had_begun_is_taken_away(server: OpenSearch) -> None:
    name = new_name()
    with products(server, name) as sink:
        # Killed when the index was there, and had no alias yet.
        asked(server, f"{name}-0123abcd/_doc", {"a": 1})
        sink._orphan_s = -60.0
        sink.open(PRODUCTS)
        assert len(asked(server, f"{name}*/_alias")) == 1
        assert sink.position() is not None


def test_an_index_that_was_deleted_is_not_made_by_a_late_write(server: OpenSearch) -> None:
    name = new_name()
    with products(server, name) as sink:
        sink.open(PRODUCTS)
        first = changes(PRODUCTS, [product("a")], [], since=0, until=1)
        (index,) = sink._indexes(name)
        sink._asked("DELETE", f"/{index}")
        with pytest.raises(FencedError):
            sink._write(first, PRODUCTS)
        with pytest.raises(FencedError):
            sink.apply(first, never)
        assert asked(server, f"{name}*/_alias") == {}


def test_two_who_begin_at_once_end_with_one_index(server: OpenSearch) -> None:
    name = new_name()
    with ThreadPoolExecutor(4) as pool:
        sinks = [products(server, name) for _ in range(4)]
        for each in pool.map(lambda sink: sink.open(PRODUCTS), sinks):
            assert each == Position()
    fenced = 0
    for sink in sinks:
        try:
            sink.apply(changes(PRODUCTS, [product("a")], [], since=0, until=1), never)
        except FencedError:
            fenced += 1
        sink.close()
    assert fenced == 3
    assert len(asked(server, f"{name}*/_alias")) == 1
