"""A group as it is shown: for programs as JSON, for people as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.broker.lag.alerts import show_seconds
from penstock.cli import output
from penstock.cli.group_view import GroupView, PartitionView
from penstock.cli.values import show_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType


def as_json(view: GroupView) -> dict[str, Any]:
    """A group as `--json` prints it."""
    return {
        "group": view.id,
        "kind": view.kind,
        "state": view.state,
        "protocol": view.protocol,
        "coordinator": view.coordinator,
        "members": [
            {
                "member": member.id,
                "client": member.client_id,
                "host": member.host,
                "instance": member.instance_id,
                "partitions": [{"topic": t, "partition": n} for t, n in member.partitions],
            }
            for member in view.members
        ],
        "partitions": [_partition_json(part) for part in view.partitions],
        "total": {
            "records": sum(part.lag.records for part in view.partitions if part.lag),
            "missed": sum(part.lag.missed for part in view.partitions if part.lag),
            "time_to_loss_seconds": _soonest(view.partitions),
        },
    }


def _partition_json(part: PartitionView) -> dict[str, Any]:
    lag = part.lag
    return {
        "topic": part.topic,
        "partition": part.partition,
        "committed": part.committed,
        "start": part.log_start,
        "end": part.log_end,
        "records": lag.records if lag else None,
        "bytes": lag.bytes if lag else None,
        "seconds": lag.seconds if lag else None,
        "time_to_loss_seconds": lag.time_to_loss_s if lag else None,
        "missed": lag.missed if lag else None,
        "beyond": lag.beyond if lag else None,
        "member": part.member.id if part.member else None,
    }


def _soonest(partitions: Iterable[PartitionView]) -> float | None:
    known = (part.lag.time_to_loss_s for part in partitions if part.lag)
    return min((seconds for seconds in known if seconds is not None), default=None)


# ---- for people --------------------------------------------------------------------------


def rendered(views: Iterable[GroupView]) -> RenderableType:
    from rich.console import Group as Stack
    from rich.text import Text

    parts: list[RenderableType] = []
    for view in views:
        parts.append(Text(_headline(view)))
        if view.members:
            parts.append(output.table(*_member_table(view)))
        if view.partitions:
            parts.append(output.table(*_partition_table(view)))
        else:
            parts.append(Text("  it has committed nothing yet"))
        parts += [Text(f"  {line}", style="yellow") for line in _remarks(view)]
    return Stack(*parts)


def _headline(view: GroupView) -> str:
    how = f"{view.kind} group" + (f" ({view.protocol})" if view.protocol else "")
    members = output.count(len(view.members), "member")
    behind = sum(part.lag.records for part in view.partitions if part.lag)
    return f"{view.id}: {view.state}, {how}, {members}, {output.count(behind, 'record')} behind"


def _member_table(view: GroupView) -> tuple[Sequence[str], list[Sequence[str]]]:
    rows: list[Sequence[str]] = []
    for member in view.members:
        by_topic: dict[str, list[str]] = {}
        for topic, number in member.partitions:
            by_topic.setdefault(topic, []).append(str(number))
        shares = "; ".join(f"{topic}: {', '.join(n)}" for topic, n in by_topic.items())
        rows.append((member.id, member.client_id, member.host, member.instance_id or "",
                     shares or "none"))  # fmt: skip
    return ("member", "client", "host", "instance", "partitions"), rows


def _partition_table(view: GroupView) -> tuple[Sequence[str], list[Sequence[str]]]:
    columns = ("topic", ">partition", ">committed", ">end", ">records", ">bytes", ">age",
               ">loss in", ">missed", "client")  # fmt: skip
    rows: list[Sequence[str]] = []
    for part in view.partitions:
        client = part.member.client_id if part.member else ""
        committed = "-" if part.committed is None else str(part.committed)
        end = "gone" if part.log_end is None else str(part.log_end)
        rows.append((part.topic, str(part.partition), committed, end, *_lag_cells(part), client))
    return columns, rows


def _lag_cells(part: PartitionView) -> tuple[str, str, str, str, str]:
    lag = part.lag
    if lag is None:
        return "-", "-", "-", "-", "-"
    loss = "-"
    if lag.time_to_loss_s is not None:
        loss = show_seconds(lag.time_to_loss_s) if lag.time_to_loss_s else "now"
    return (
        f"{lag.records:,}",
        "-" if lag.bytes is None else show_bytes(lag.bytes),
        "-" if lag.seconds is None else show_seconds(lag.seconds),
        loss,
        f"{lag.missed:,}" if lag.missed else "-",
    )


def _remarks(view: GroupView) -> Iterable[str]:
    """What should not be overlooked, in words."""
    for part in view.partitions:
        lag = part.lag
        if lag is not None and lag.missed:
            yield (
                f"{part.topic}, partition {part.partition}: {output.count(lag.missed, 'record')} "
                f"missed; offset {lag.committed} was removed, the log starts at {lag.log_start}"
            )
        if lag is not None and lag.beyond:
            yield (
                f"{part.topic}, partition {part.partition}: offset {lag.committed} is beyond the "
                f"end of the log, {lag.log_end}; was the topic made anew?"
            )
