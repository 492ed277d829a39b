"""Writes what docs/ says of settings and APIs from the code, so that the two cannot differ.

`python -m tools.generate_docs` replaces docs/configuration.md and the table in docs/protocol.md;
a test compares them with the code.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from penstock.broker.apis.table import ENDPOINTS
from penstock.broker.config import BrokerConfig, Limits
from penstock.broker.groups.settings import GROUP_SETTINGS
from penstock.cli import project
from penstock.cli.kafka import BOOTSTRAP_VARIABLE, DEFAULT_BOOTSTRAP
from penstock.log.config import SETTINGS
from penstock.wire import api

DOCS = Path(__file__).parent.parent / "docs"
_BEGIN, _END = "<!-- apis:begin -->", "<!-- apis:end -->"

_LIMITS = {
    "max_connections": (
        "Connections at a time; more are refused. Fewer, if the process may not have so many open "
        "files."
    ),
    "max_request_bytes": "The largest request; a larger one closes its connection.",
    "max_buffered_bytes": "What all receive buffers may grow to, with what is compressed anew.",
    "max_inflight_requests": "Unanswered requests of a connection before it is not read from.",
    "max_unsent_bytes": "Unsent answers of a connection before it is not read from.",
    "max_fetch_bytes": "The most that one fetch answers, but for a first larger batch.",
    "max_fetch_sessions": "Fetch sessions; the longest unused makes room.",
    "max_idle_ms": "A connection that is silent for longer is closed.",
    "max_request_ms": "A request that takes longer to arrive closes its connection.",
    "max_hold_ms": (
        "A produce request for a full topic, or one that waits for being compressed anew, is held "
        "this long before it is refused."
    ),
    "max_topics": "Topics that the broker holds.",
    "max_partitions": "Partitions that the broker holds.",
    "max_groups": "Groups of all kinds that the broker holds.",
    "max_group_size": "Members of one group.",
    "max_member_bytes": "What one member may send when it joins a group.",
    "max_group_bytes": "What all members of a group together may send and be assigned.",
    "min_session_timeout_ms": "The shortest session that a member of a classic group may ask for.",
    "max_session_timeout_ms": "The longest session that a member of a classic group may ask for.",
    "max_committed_offsets": "Committed offsets of all groups together.",
    "max_offset_metadata_bytes": "What may be noted with a committed offset.",
    "max_transactional_ids": "Transactional ids; the longest idle make room.",
    "max_watched_lags": "Offsets of groups whose lag is watched; more are only counted.",
    "max_metric_lags": "Offsets of groups that the metrics tell of one by one; more are summed.",
    "max_metric_partitions": "Partitions that the metrics tell of one by one; more are summed.",
}

_SECTIONS = {
    "broker": "Where the broker is, for all commands; `penstock up` listens there, if it is on "
    "this machine (127.0.0.1, localhost, ::1).",
    "capture": "A database whose changes go into the log, `[capture.NAME]`: [capture](capture.md).",
    "sinks": "A store that is kept in step with a topic, `[sinks.NAME]`: [sinks](sinks.md).",
    "views": "Tables for views, `[views.tables]`: [views](views.md).",
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
    "group_initial_delay_ms": "The first members of a classic group are waited for until none has "
    "come for this long,",
    "group_initial_delay_max_ms": "but not longer than this.",
    "offsets_retention_ms": "How long committed offsets outlive the last member of their group.",
    "offsets_check_interval_ms": "How often committed offsets that are too old are looked for.",
    "transaction_max_timeout_ms": "The longest timeout of transactions that a producer may ask "
    "for.",
    "transactional_id_expiration_ms": "A transactional id that is idle for longer is forgotten.",
    "two_phase_commit": "Whether a producer may leave the decision about its transactions to "
    "somebody else, without a timeout (KIP-939; `--two-phase`).",
    "transaction_version": "2 offers clients the newer form of transactions (KIP-890), 0 and 1 "
    "the older only.",
    "lag_interval_ms": "How often the lag of groups is measured; 0: never.",
    "alert_before_loss_ms": "How long before a group loses records there is an alert "
    "(`--alert-before`); 0: none.",
    "alert_webhook": "A URL that alerts are sent to, as JSON by POST (`--alert-webhook`).",
    "metrics_host": "The address that metrics are served on (`--metrics`).",
    "metrics_port": "The port that metrics are served on (`--metrics`); none: they are not.",
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
    parts = (_introduction(), _project(), _topics(), _groups(), _broker(), _limits())
    return "\n".join([*(line for part in parts for line in part), ""])


def _introduction() -> list[str]:
    return [
        "# Configuration",
        "",
        "Made from the code by `python -m tools.generate_docs`.",
    ]


def _project() -> list[str]:
    return [
        "",
        "## The project file",
        "",
        "`penstock.toml`, in the folder of the command or above it, or named by `--project` or",
        f"`{project.VARIABLE}`; `penstock init` makes one. `${{NAME}}` in a text stands for a",
        "variable of the environment, `$$` for a dollar sign. Whoever reads the file checks all of",
        "it: everything that is wrong is told at once, each with its line. A variable that is not",
        "set is an error of what needs it, one capture or one sink; the rest works without.",
        "",
        "| section | meaning |",
        "|---|---|",
        *(f"| `[{name}]` | {_SECTIONS[name]} |" for name in project.SECTIONS),
        "",
        "| setting of `[broker]` | meaning |",
        "|---|---|",
        *(f"| `{name}` | {meaning} |" for name, meaning in project.BROKER.items()),
        "",
        "**Which broker a command uses**: the one that its `--bootstrap` names; else the variable",
        f"`{BOOTSTRAP_VARIABLE}`; else `bootstrap` in `[broker]` of the project file; else",
        f"`{DEFAULT_BOOTSTRAP}`. It is so for all commands.",
    ]


def _topics() -> list[str]:
    return [
        "",
        "## Topics",
        "",
        "Given when a topic is made (`penstock topics create NAME -c key=value`, or by any Kafka",
        "admin client) and changed while it is in use (`penstock topics alter`). Names, units and",
        "defaults are Kafka's, except that `segment.bytes` is smaller, because what a crash may",
        "leave to check is one segment, and `durability`, which is Penstock's own.",
        "",
        "The defaults can be changed while the broker runs, under the names that Kafka has for",
        "them (`log.retention.ms`, `compression.type`, …), by any Kafka admin client: of the",
        "resource of type `BROKER` with the name `1`, or with no name for all brokers, which",
        "counts less. They hold at once for all topics that do not say otherwise, and survive",
        "restarts.",
        "",
        "| setting | kind | default | meaning |",
        "|---|---|---|---|",
        *_topic_settings(),
    ]


def _topic_settings() -> list[str]:
    return [
        f"| `{name}` | {setting.kind} | `{setting.render(setting.default)}` | {setting.doc} |"
        for name, setting in SETTINGS.items()
    ]


def _groups() -> list[str]:
    return [
        "",
        "## Groups",
        "",
        "Set with `penstock queue alter GROUP -c key=value`, or by any Kafka admin client, as of a",
        "resource of type `GROUP`. A group need not exist yet. See [queues](queues.md).",
        "",
        "| setting | kind | default | meaning |",
        "|---|---|---|---|",
        *(
            f"| `{name}` | {setting.kind} | `{setting.render(setting.default)}` | {setting.doc} |"
            for name, setting in GROUP_SETTINGS.items()
        ),
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
