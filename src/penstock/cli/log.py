"""`penstock log`: look into and check the files of a data directory, without a broker.

Both commands only read. The exception is `verify --rebuild-indexes`, which writes what can be
made from the log, and never the log itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import output
from penstock.cli.values import show_bytes, show_time
from penstock.errors import DataDirectoryError

if TYPE_CHECKING:
    from penstock.log.dump import BatchEntry, Entry
    from penstock.log.findings import Finding, Report
    from penstock.log.offline import Place
    from penstock.records.batch import BatchHeader
    from penstock.records.record import Record

app = typer.Typer(
    no_args_is_help=True,
    help="Look into the files of a log, and check them, without a broker.",
    epilog="A data directory has a folder for each partition. In it the log is cut into segments, "
    "files named by their first offset, which hold batches of records.",
)

LogPath = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="A data directory, the folder of a partition, or one "
                   ".log file.", show_default=False),
]  # fmt: skip


# ---- dump --------------------------------------------------------------------------------


@app.command("dump")
def dump(
    path: LogPath,
    records: Annotated[
        bool, typer.Option("--records", "-r", help="Open the batches and show their records.")
    ] = False,
    start: Annotated[
        int,
        typer.Option("--from", "-f", min=0, metavar="OFFSET", help="Start with the batch that "
                     "holds this offset."),
    ] = 0,
    maximum: Annotated[
        int | None, typer.Option("--max", "-n", min=1, metavar="N", help="Stop after N batches.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, for programs.")
    ] = False,
) -> None:  # fmt: skip
    """Show the batches of a log as they are on disk.

    Each line is a batch: the byte where it starts, its offsets, how many records it has, its
    size and how it is compressed, its times and the leader epoch it was written in. Works on
    damaged files too, shows what is not readable, and goes on behind it. An .index,
    .timeindex, .txnindex or .snapshot file is shown entry by entry.

    \b
    Examples:
      penstock log dump penstock-data/orders-0
      penstock log dump penstock-data/orders-0 --from 1200 --max 3 --records
      penstock log dump penstock-data --json | jq 'select(.producer_id == 7)'
      penstock log dump penstock-data/orders-0/00000000000000000000.index
    """
    from penstock.log.dump import DERIVED, BatchEntry, dump_derived, dump_logs
    from penstock.log.offline import locate

    if path.suffix in DERIVED and path.is_file():
        entries = dump_derived(str(path))
    else:
        entries = dump_logs(locate(str(path)), open_records=records, first_offset=start)
    show = _dump_as_json if json else _dump_as_text
    batches = 0
    try:
        for entry in entries:
            show(entry)
            batches += isinstance(entry, BatchEntry)
            if batches == maximum:
                break
        output.flush()
    except BrokenPipeError:
        output.silence_stdout()


def _dump_as_json(entry: Entry) -> None:
    from penstock.log.dump import BatchEntry, SegmentStart

    if isinstance(entry, BatchEntry):
        output.write_json(_batch_as_json(entry))
    elif not isinstance(entry, SegmentStart):
        kind = type(entry).__name__.removesuffix("Entry").lower()
        output.write_json({"kind": kind, **entry._asdict()})


def _batch_as_json(entry: BatchEntry) -> dict[str, Any]:
    header = entry.header
    fields: dict[str, Any] = {
        "kind": "batch",
        "path": entry.path,
        "position": entry.position,
        "size": header.size,
        **header._asdict(),
        "last_offset": header.last_offset,
        "codec": _codec(header),
        "flags": _flags(header),
    }
    if entry.records is not None:
        fields["records"] = [_record_as_json(item) for item in entry.records]
    if entry.error:
        fields["error"] = entry.error
    return fields


def _record_as_json(item: Record) -> dict[str, Any]:
    return {
        "offset": item.offset,
        "timestamp": item.timestamp_ms,
        "key": output.json_bytes(item.key),
        "value": output.json_bytes(item.value),
        "headers": [
            {"name": name, "value": output.json_bytes(value)} for name, value in item.headers
        ],
    }


def _dump_as_text(entry: Entry) -> None:
    from penstock.log import dump as kinds

    match entry:
        case kinds.SegmentStart(path, _, size):
            print(f"{path} ({show_bytes(size)})")
        case kinds.BatchEntry():
            print(_batch_as_text(entry))
            for item in entry.records or ():
                print(f"    {_record_as_text(item)}")
            if entry.error:
                print(f"    cannot be opened: {entry.error}")
        case kinds.BrokenEntry(_, position, length, reason):
            print(f"  {position:>10}  {length} bytes are not a batch: {reason}")
        case kinds.IndexEntry(_, offset, position):
            print(f"  offset {offset} ends the batch at byte {position}")
        case kinds.TimeEntry(_, timestamp_ms, offset):
            print(f"  {show_time(timestamp_ms)} is the latest up to offset {offset}")
        case kinds.ProducerEntry():
            print(
                f"  producer {entry.producer_id}, epoch {entry.epoch}: last sequence "
                f"{entry.last_sequence}, last offset {entry.last_offset}, "
                f"{show_time(entry.timestamp_ms)}"
                + (
                    f", in a transaction since offset {entry.txn_first_offset}"
                    if entry.txn_first_offset >= 0
                    else ""
                )
            )
        case kinds.AbortedEntry(_, producer_id, first_offset, last_offset, _):
            print(
                f"  producer {producer_id} aborted the transaction of offsets {first_offset} to "
                f"{last_offset}"
            )


def _batch_as_text(entry: BatchEntry) -> str:
    header = entry.header
    parts = [
        f"offsets {header.base_offset} to {header.last_offset}",
        output.count(header.record_count, "record"),
        f"{header.size} bytes",
        _codec(header),
        show_time(header.max_timestamp),
        f"epoch {header.leader_epoch}",
    ]
    if header.producer_id >= 0:
        parts.append(
            f"producer {header.producer_id}/{header.producer_epoch} "
            f"sequence {header.base_sequence} to {header.last_sequence}"
        )
    return f"  {entry.position:>10}  " + ", ".join(parts + _flags(header))


def _record_as_text(item: Record) -> str:
    key = "" if item.key is None else f"{output.text_bytes(item.key)}: "
    value = "(null)" if item.value is None else output.text_bytes(item.value)
    headers = " ".join(f"{name}={output.text_bytes(data)}" for name, data in item.headers)
    text = f"{item.offset}  {show_time(item.timestamp_ms)}  {key}{value}"
    return f"{text}  [{headers}]" if headers else text


def _codec(header: BatchHeader) -> str:
    from penstock.records.compression import NAMES

    return NAMES.get(header.codec, f"codec {header.codec}")


def _flags(header: BatchHeader) -> list[str]:
    flags = {
        "append-time": header.has_append_time,
        "transactional": header.is_transactional,
        "control": header.is_control,
    }
    return [name for name, is_set in flags.items() if is_set]


# ---- verify ------------------------------------------------------------------------------


@app.command("verify")
def verify(
    path: LogPath,
    records: Annotated[
        bool,
        typer.Option("--records", "-r", help="Also open every batch, to see whether consumers "
                     "can. Takes much longer."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Go on while a broker runs on the directory. What it is "
                     "just writing may look torn."),
    ] = False,
    rebuild: Annotated[
        bool,
        typer.Option("--rebuild-indexes", help="Write indexes and digests anew where they are "
                     "damaged and the log is sound. The log itself is never written."),
    ] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="Findings as JSON objects, one a line, a summary last."),
    ] = False,
) -> None:  # fmt: skip
    """Check a log byte by byte, and name everything that is not as it was stored.

    Reads every batch against its checksum, and everything else against the batches: indexes,
    digests, producers' snapshots, leader epochs, checkpoints. Says where the damage is, which
    offsets it touches and what to do. After a crash the end of a log may be torn; that is noted
    and not damage, since the next start puts it right.

    Ends with status 1 if there is damage.

    \b
    Examples:
      penstock log verify penstock-data
      penstock log verify penstock-data/orders-0
      penstock log verify penstock-data --json
    """
    from penstock.log.offline import is_locked, locate
    from penstock.log.verify import Verifier, log_bytes, rebuild_indexes

    place = locate(str(path))
    running = place.data_dir is not None and is_locked(place.data_dir)
    if running:
        _accept_running(place, force=force and not rebuild)
    with _progress(log_bytes(place), json=json) as advance:
        verifier = Verifier(
            place, str(path), open_records=records, progress=advance, running=running
        )
        findings = list(verifier.run())
    for finding in findings:
        _show_finding(finding, json=json)
    _show_summary(verifier.report, json=json)
    if not running and place.data_dir is not None and is_locked(place.data_dir):
        output.warn("a broker was started meanwhile: what it wrote may have looked torn")
    if rebuild and verifier.rebuildable:
        rebuild_indexes(place.data_dir, verifier.rebuildable)
        written = output.count(len(verifier.rebuildable), "segment")
        output.say(f"wrote indexes and digests of {written} anew")
        output.say("run the command again to see what is left")
    if verifier.report.damage:
        raise typer.Exit(output.EXIT_FAILURE)


def _accept_running(place: Place, *, force: bool) -> None:
    if not force:
        raise DataDirectoryError(
            f"a broker is running on {place.data_dir}",
            advice="Stop it first, or look anyway with --force; --rebuild-indexes needs it "
            "stopped.",
        )
    output.warn("a broker is running here: what it is just writing may look torn")


@contextmanager
def _progress(total_bytes: int, *, json: bool) -> Iterator[Callable[[int], None]]:
    """A bar where there is a terminal and something to wait for."""
    if json or not sys.stderr.isatty() or total_bytes < 64 << 20:
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total_bytes)
        pending = 0

        def advance(count: int) -> None:
            # The bar takes longer than most batches do.
            nonlocal pending
            pending += count
            if pending >= 4 << 20:
                progress.advance(task, pending)
                pending = 0

        yield advance


def _show_finding(finding: Finding, *, json: bool) -> None:
    if json:
        fields = {slot: getattr(finding, slot) for slot in finding.__slots__}
        output.write_json({"finding": finding.severity, **fields})
        return
    place = os.path.relpath(finding.path)
    if len(place) > len(finding.path):
        place = finding.path
    details = []
    if finding.position is not None:
        details.append(f"byte {finding.position}")
    if finding.offset is not None:
        details.append(f"offset {finding.offset}")
    where = f"{place} ({', '.join(details)})" if details else place
    print(f"{finding.severity}: {finding.kind}: {where}")
    print(f"  {finding.message}")
    if finding.remedy:
        print(f"  {finding.remedy}")


def _show_summary(report: Report, *, json: bool) -> None:
    counts = {
        "partitions": report.partitions,
        "segments": report.segments,
        "batches": report.batches,
        "records": report.records,
        "bytes": report.bytes,
    }
    damage, notes = len(report.damage), len(report.notes)
    if json:
        output.write_json({
            "summary": "damaged" if damage else "sound",
            "clean_stop": report.clean_stop,
            **counts,
            "damage": damage,
            "notes": notes,
        })  # fmt: skip
        output.flush()
        return
    names = ("partition", "segment", "batch", "record")
    looked = ", ".join(
        output.count(counts_of, name)
        for counts_of, name in zip(counts.values(), names, strict=False)
    )
    print(f"{looked}, {show_bytes(report.bytes)}")
    if report.clean_stop is False:
        print("the broker was not stopped cleanly; the next start will check the ends of the logs")
    verdict = f"{damage:,} damaged" if damage else "no damage"
    print(f"{verdict}, {output.count(notes, 'note')}" if notes else verdict)
