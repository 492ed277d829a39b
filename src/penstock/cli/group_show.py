"""A group as it is shown: for programs as JSON, for people as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.lag.alerts import show_seconds
from penstock.cli import output
from penstock.cli.group_view import GroupView, PartitionView
from penstock.cli.values import show_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType


# In the tables: not the same as a dash, which is good news.
UNKNOWN: Final = "?"


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
            "time_to_loss_known": all(part.loss_known for part in view.partitions),
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
        "time_to_loss_known": part.loss_known,
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
    columns = ["topic", ">part", ">committed", ">end", ">records", ">bytes", ">age",
               ">loss in"]  # fmt: skip
    missed = any(part.lag.missed for part in view.partitions if part.lag)
    if missed:
        columns.append(">missed")
    if view.members:
        columns.append("client")
    rows: list[Sequence[str]] = []
    for part in view.partitions:
        committed = "-" if part.committed is None else str(part.committed)
        end = "gone" if part.log_end is None else str(part.log_end)
        row = [part.topic, str(part.partition), committed, end, *_lag_cells(part)]
        if missed:
            row.append(f"{part.lag.missed:,}" if part.lag and part.lag.missed else "-")
        if view.members:
            row.append(part.member.client_id if part.member else "")
        rows.append(row)
    return columns, rows


def _lag_cells(part: PartitionView) -> tuple[str, str, str, str]:
    lag = part.lag
    if lag is None:
        return "-", "-", "-", "-"
    age = "-" if part.age_known else UNKNOWN
    return (
        f"{lag.records:,}",
        UNKNOWN if lag.bytes is None else show_bytes(lag.bytes),
        age if lag.seconds is None else show_seconds(lag.seconds),
        _loss_cell(lag.time_to_loss_s, known=part.loss_known),
    )


def _loss_cell(seconds: float | None, *, known: bool) -> str:
    if seconds is None:
        return "-" if known else UNKNOWN
    if not seconds:
        return "now"
    # By age or by size it is this long; by the other it may be sooner.
    return show_seconds(seconds) if known else f"<{show_seconds(seconds)}"


def _remarks(view: GroupView) -> Iterable[str]:
    """What should not be overlooked, in words."""
    unknown = sum(not part.age_known for part in view.partitions)
    if unknown:
        yield (
            f"the first unread record could not be read in {output.count(unknown, 'partition')}: "
            f"its age is not known ({UNKNOWN})"
        )
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
