"""Settings from a table: what is taken, and how the rest is refused."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.events.settings import Hash, OutboxSettings, Placement
from penstock.errors import ConfigError

FULL = r"""
url = "postgresql://localhost/shop"
include = ["public.*"]
exclude = ["public.secret*"]
prefix = "my-shop"
format = "json"
schemas = true
publish_schemas = false
tombstones = false
skip = ["none"]
unavailable = "fill"
transaction_metadata = true
partitions = 4
replication = 3
snapshot = "when_needed"
snapshot_workers = 4
snapshot_new_tables = false
transactions = false
codec = "zstd"
state_dir = "/tmp"

[options]
slot = "mine"
streaming = true
spool = 5

[keys]
"public.events" = ["source", "number"]
"public.one" = "a"

[columns]
exclude = ["*.password"]
mask = { "*.phone" = 8, "*.name" = "hidden" }
hash = { "*.email" = { algorithm = "SHA-256", salt = "pepper" }, "*.ssn" = "salt" }
truncate = { "*.note" = 100 }

[filters]
"public.orders" = "op != 'd' and after.country == 'DE'"

[topics]
"public.orders" = "orders"

[[routes]]
pattern = '(.*)\.public\.(.*)'
replacement = '\1-\2'

[topic_config]
"retention.ms" = 1000

[snapshot_where]
"public.big" = "id > 5"

[outbox]
table = "public.outbox"
additional = ["type:header:eventType", "trace:envelope"]
expand_json = true
on_update = "error"
"""


def test_everything_is_taken() -> None:
    made = CaptureConfig.from_mapping("shop", tomllib.loads(FULL))
    assert made.source.topic_prefix == made.events.prefix == "my-shop"
    assert made.source.options == {"slot": "mine", "streaming": "true", "spool": "5"}
    assert made.source.include == ("public.*",)
    assert made.source.snapshot_workers == 4
    assert made.events.skip == frozenset()
    assert not made.events.publish_schemas
    assert made.events.keys == {"public.events": ("source", "number"), "public.one": ("a",)}
    assert made.events.hash == {"*.email": Hash("sha256", "pepper"), "*.ssn": Hash(salt="salt")}
    assert (
        made.events.routes[0].pattern.sub(made.events.routes[0].replacement, "a.public.b") == "a-b"
    )
    assert made.events.outbox == OutboxSettings(
        "public.outbox",
        additional=(
            Placement("type", "header", "eventType"),
            Placement("trace", "envelope", "trace"),
        ),
        expand_json=True,
        on_update="error",
    )
    assert made.topics.partitions == 4
    assert made.topics.config == {"retention.ms": "1000"}
    assert made.snapshot.where == {"public.big": "id > 5"}
    assert made.snapshot.mode == "when_needed"
    assert not made.delivery.transactions
    assert made.transactional_id == "penstock-capture-shop"


def test_a_url_is_enough() -> None:
    made = CaptureConfig.from_mapping("shop", {"url": "sqlite:///shop.db"})
    assert made.events.prefix == "shop"
    assert made.events.skip == frozenset("t")
    assert made.events.truncates == "deletes"
    assert made.events.publish_schemas
    assert made.snapshot.mode == "initial"
    assert made.delivery.transactions


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": ""}, ["capture.shop.url", "text"]),
        ({"url": None}, ["capture.shop.url", "missing"]),
        ({"snapshot": "never"}, ["capture.shop.snapshot", "initial_only", "'never'"]),
        ({"format": "xml"}, ["capture.shop.format", "json, avro"]),
        ({"partitions": 0}, ["capture.shop.partitions", "1 to 1000"]),
        ({"partitions": True}, ["capture.shop.partitions", "whole number"]),
        ({"schemas": "yes"}, ["capture.shop.schemas", "true or false"]),
        ({"publish_schemas": 1}, ["capture.shop.publish_schemas", "true or false"]),
        ({"include": "public.*"}, ["capture.shop.include", "list"]),
        ({"skip": ["x"]}, ["capture.shop.skip", "c, u, d"]),
        ({"truncates": "keep"}, ["capture.shop.truncates", "deletes, skip", "'keep'"]),
        ({"prefix": "a b"}, ["capture.shop.prefix"]),
        ({"prefix": "__penstock_x"}, ["capture.shop.prefix"]),
        ({"partition": 3}, ["capture.shop.partition is no setting"]),
        ({"columns": {"masks": {}}}, ["capture.shop.columns.masks is no setting"]),
        ({"columns": {"mask": {"a": -1}}}, ["capture.shop.columns.mask.a"]),
        ({"columns": {"truncate": {"a": "x"}}}, ["capture.shop.columns.truncate.a"]),
        ({"columns": {"hash": {"a": {"algorithm": "rot13"}}}}, ["hash.a.algorithm", "sha256"]),
        ({"columns": {"hash": {"a": {"pepper": "x"}}}}, ["hash.a.pepper is no setting"]),
        ({"columns": {"hash": {"a": 5}}}, ["hash.a", "table"]),
        ({"columns": 5}, ["capture.shop.columns", "table"]),
        ({"filters": {"t": "after.x = 1"}}, ["capture.shop.filters.t", ">>>"]),
        ({"filters": {"t": 5}}, ["capture.shop.filters.t", "expression"]),
        ({"keys": {"t": [1]}}, ["capture.shop.keys.t", "columns"]),
        ({"topics": {"t": []}}, ["capture.shop.topics.t", "text"]),
        ({"routes": [{"pattern": "(", "replacement": "x"}]}, ["routes[0].pattern"]),
        ({"routes": [{"pattern": "a", "replacement": "\\1"}]}, ["routes[0].pattern", "group"]),
        ({"routes": {"pattern": "a"}}, ["capture.shop.routes", "list"]),
        ({"outbox": {}}, ["capture.shop.outbox.table", "missing"]),
        ({"outbox": {"table": "x", "additional": ["type"]}}, ["outbox.additional", "ALIAS"]),
        ({"outbox": {"table": "x", "on_update": "ignore"}}, ["outbox.on_update", "warn, error"]),
        ({"format": "avro", "schemas": True}, ["capture.shop.schemas", "json"]),
        ({"format": "avro", "unavailable": "fill"}, ["capture.shop.unavailable", "json"]),
        ({"options": 5}, ["capture.shop.options", "table"]),
    ],
)
def test_what_is_not_acceptable_is_named(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        CaptureConfig.from_mapping("shop", {"url": "sqlite:///x", **settings})
    for word in words:
        assert word in str(caught.value)


def test_what_is_nearly_right_is_suggested() -> None:
    with pytest.raises(ConfigError) as caught:
        CaptureConfig.from_mapping("shop", {"url": "sqlite:///x", "partition": 3})
    assert "Did you mean partitions?" in caught.value.advice


@pytest.mark.parametrize("name", ["", "Shop", "1shop", "a-b", "a" * 41, "a.b"])
def test_names(name: str) -> None:
    with pytest.raises(ConfigError, match="name of a capture"):
        CaptureConfig.from_mapping(name, {"url": "sqlite:///x"})
