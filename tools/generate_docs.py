"""Writes what docs/ says of settings and APIs from the code, so that the two cannot differ.

`python -m tools.generate_docs` replaces docs/configuration.md and the table in docs/protocol.md;
a test compares them with the code.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from penstock.broker.apis.table import ENDPOINTS
from penstock.broker.config import BrokerConfig, Limits
from penstock.log.config import SETTINGS
from penstock.wire import api

DOCS = Path(__file__).parent.parent / "docs"
_BEGIN, _END = "<!-- apis:begin -->", "<!-- apis:end -->"

_LIMITS = {
    "max_connections": "Connections at a time; more are refused.",
    "max_request_bytes": "The largest request; a larger one closes its connection.",
    "max_buffered_bytes": "What all receive buffers together may grow to.",
    "max_inflight_requests": "Unanswered requests of a connection before it is not read from.",
    "max_unsent_bytes": "Unsent answers of a connection before it is not read from.",
    "max_fetch_bytes": "The most that one fetch answers, but for a first larger batch.",
    "max_fetch_sessions": "Fetch sessions; the longest unused makes room.",
    "max_idle_ms": "A connection that is silent for longer is closed.",
    "max_request_ms": "A request that takes longer to arrive closes its connection.",
    "max_topics": "Topics that the broker holds.",
    "max_partitions": "Partitions that the broker holds.",
}

_BROKER = {
    "data": "The data directory (`--data`).",
    "host": "The address that is listened on (`--listen`).",
    "port": "The port that is listened on (`--listen`); 0 takes a free one.",
    "advertised_host": "The host that clients are told to connect to (`--advertise`).",
    "advertised_port": "The port that clients are told to connect to (`--advertise`).",
    "durability": "The durability of topics that do not say otherwise (`--durability`).",
    "archive": "Where closed segments of archived topics go: a directory or an `s3://` URL "
    "(`--archive`).",
    "auto_create_topics": "Whether a topic that a client asks for is made if it is not there.",
    "default_partitions": "Partitions of topics that do not say how many.",
    "topic_defaults": "Topic settings that hold where a topic does not say otherwise.",
    "housekeeping_interval_ms": "How often retention, compaction and the archive are looked after.",
}


def pages() -> dict[Path, str]:
    """Every page that is made here, as it should be."""
    protocol = DOCS / "protocol.md"
    return {DOCS / "configuration.md": configuration(), protocol: with_apis(protocol.read_text())}


def with_apis(text: str) -> str:
    """The page about the protocol with its table of APIs made anew."""
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    rows = ["| API | key | versions |", "|---|---|---|"]
    for endpoint in sorted(ENDPOINTS.values(), key=lambda item: item.api_key):
        name = api(endpoint.api_key).name
        versions = f"{endpoint.min_version}-{endpoint.max_version}"
        rows.append(f"| {name} | {endpoint.api_key} | {versions} |")
    return "\n".join([before + _BEGIN, *rows, _END + after])


def configuration() -> str:
    """The page about settings."""
    return "\n".join([*_introduction(), *_topics(), *_broker(), *_limits(), ""])


def _introduction() -> list[str]:
    return [
        "# Configuration",
        "",
        "Made from the code by `python -m tools.generate_docs`.",
        "",
        "## Topics",
        "",
        "Given when a topic is made (`penstock topics create NAME -c key=value`, or by any Kafka",
        "admin client) and changed while it is in use (`penstock topics alter`). Names, units and",
        "defaults are Kafka's, except that `segment.bytes` is smaller, because what a crash may",
        "leave to check is one segment, and `durability`, which is Penstock's own.",
        "",
        "| setting | kind | default | meaning |",
        "|---|---|---|---|",
    ]


def _topics() -> list[str]:
    return [
        f"| `{name}` | {setting.kind} | `{setting.render(setting.default)}` | {setting.doc} |"
        for name, setting in SETTINGS.items()
    ]


def _broker() -> list[str]:
    lines = [
        "",
        "## Broker",
        "",
        "Options of `penstock up`, and fields of `penstock.broker.config.BrokerConfig`, which",
        "`penstock.testing.Broker` takes too.",
        "",
        "| field | default | meaning |",
        "|---|---|---|",
    ]
    defaults = BrokerConfig(data="…")
    for item in fields(BrokerConfig):
        if item.name == "limits":
            continue
        value = getattr(defaults, item.name)
        shown = "none" if item.name == "topic_defaults" else f"`{value}`"
        if item.name == "data":
            shown = "required"
        lines.append(f"| `{item.name}` | {shown} | {_BROKER[item.name]} |")
    return lines


def _limits() -> list[str]:
    lines = [
        "",
        "## Limits",
        "",
        "Fields of `penstock.broker.config.Limits`. Every queue, buffer and request has one.",
        "",
        "| field | default | meaning |",
        "|---|---|---|",
    ]
    defaults = Limits()
    lines += [
        f"| `{item.name}` | `{getattr(defaults, item.name)}` | {_LIMITS[item.name]} |"
        for item in fields(Limits)
    ]
    return lines


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
