"""A right use of each command, in a project of two captures and two sinks."""

from __future__ import annotations

PROJECT = """
[capture.shop]
url = "sqlite:///shop.db"

[capture.pg]
url = "postgresql://me:secret@127.0.0.1/shop"

[sinks.orders]
topic = "shop.orders"
url = "sqlite:///derived.db"

[sinks.words]
topic = "shop.orders"
url = "tantivy:///words?text=note"
"""
# What the base install can do, in this order; of what is `absent` the commands say so.
BASE = [
    "init made",
    "topics create t",
    "topics list",
    "topics describe t",
    "topics alter t --partitions 2",
    "produce t",
    "consume t",
    "groups list",
    "groups reset readers --topic t --to-earliest --execute",
    "groups describe readers",
    "groups delete readers --yes",
    "queue list",
    "queue alter workers -c share.auto.offset.reset=earliest",
    "queue reset absent --topic t --to-earliest --execute",
    "queue inspect workers",
    "queue delete absent --yes",
    "queue redrive workers --dead-letters t",
    "transactions list",
    "transactions describe absent",
    "transactions commit absent",
    "transactions abort absent",
    "quotas list",
    "quotas set producer_byte_rate=1000000 --client-id a",
    "quotas remove --client-id a",
    "migrate --from {at} --to {other}",
    "log dump {data}/t-0",
    "log verify {data} --force",
    "topics delete t --yes",
]
# What it cannot, and the extras that the message names; `%` is a space.
NEEDS = [
    ("demo", "search,warehouse"),
    ("up --data again --listen 127.0.0.1:0", "postgres"),
    ("run flows.py", "spark"),
    ("flows list", "spark"),
    ("flows describe f", "spark"),
    ("flows stop f", "spark"),
    ("flows restart f", "spark"),
    ("flows reset f --yes", "spark"),
    ("flows state f", "spark"),
    ("flows rescale f --shards 2", "spark"),
    ("flows cleanup", "spark"),
    ("flows dead-letters f", "spark"),
    ("flows redrive f", "spark"),
    ("sinks list", "search"),
    ("sinks describe orders", "search"),
    ("sinks run", "search"),
    ("sinks run --only orders", "spark"),
    ("sinks pause orders", "search"),
    ("sinks resume orders", "search"),
    ("sinks rebuild orders --yes", "search"),
    ("sinks remove orders --yes", "search"),
    ("sinks wait orders", "spark"),
    ("sinks dead-letters orders", "spark"),
    ("sinks redrive orders", "spark"),
    ("verify shop.orders orders", "spark"),
    ("view create v%AS%SELECT%1", "spark"),
    ("view check v%AS%SELECT%1", "spark"),
    ("view list", "spark"),
    ("view describe v", "spark"),
    ("view drop v --yes", "spark"),
    ("view rows v", "spark"),
    ("view aside v", "spark"),
    ("capture check sqlite:///shop.db", "capture"),
    ("capture check mysql://me@127.0.0.1/shop", "mysql"),
    ("capture add other postgresql://me@127.0.0.1/shop", "postgres"),
    ("capture run shop --plain", "capture"),
    ("capture run pg --plain", "postgres"),
    ("capture status", "postgres"),
    ("capture pause shop", "postgres"),
    ("capture resume shop", "postgres"),
    ("capture snapshot --all --capture shop", "postgres"),
    ("capture alter shop ALTER%TABLE%orders%DROP%COLUMN%note", "capture"),
    ("capture remove shop --yes", "capture"),
]
