"""The command line: `python -m benchmarks.broker [--quick] [--systems a,b] [--only part]`.

Parts: `compare` (every system), `raw` (the Kafka protocol over bare sockets), `retained` (a log of
10 GB), `crowd` (thousands of partitions, groups and connections at once), `report` (only print and
write what earlier runs measured). Results are merged into `benchmarks/results/broker.json`; the
tables go to stdout, `benchmarks/results/broker.md` and `docs/benchmarks.md`, the plot to
`docs/img/`. A quick run keeps to files in `build/bench/`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final

from benchmarks.broker import crowd, docs, plot, report, retained, workloads
from benchmarks.broker.clients import BUILD, ROOT, ClientError, build
from benchmarks.broker.processes import ServerError
from benchmarks.broker.results import Results, SystemResult, describe_machine
from benchmarks.broker.systems import SYSTEMS, System
from benchmarks.broker.workloads import QUICK, Plan, progress

PARTS: Final = ("compare", "raw", "retained", "crowd")
RETAINED_SYSTEMS: Final = ("penstock", "kafka")
CROWD_SYSTEMS: Final = ("penstock", "kafka")
# One that both take where a process may have 20,000 files, and the full one.
CROWDS: Final = (crowd.Crowd(4_000, 1_000, 5_000), crowd.Crowd())
# A crowd may be too much for these: then the table says so.
MAY_FAIL: Final = ("kafka", "kafka-fsync")
RESULTS: Final = ROOT / "benchmarks" / "results"
DATA: Final = BUILD / "data"


def main() -> int:
    options = _parse()
    # Ending by a signal must stop the servers as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    base = BUILD / "quick" if options.quick else RESULTS / "broker"
    results = Results.load(base.with_suffix(".json"))
    plan = QUICK if options.quick else Plan(rounds=options.rounds)
    parts = frozenset(options.only or (PARTS[:2] if options.quick else PARTS))
    chosen = [SYSTEMS[key] for key in options.systems or SYSTEMS]
    failures = 0
    # What the crowd was measured on is said in its own table.
    if parts - {"report", "crowd"} or not results.machine:
        results.machine = describe_machine(options.data)
    try:
        if parts & {"compare", "raw"}:
            failures += _compare(chosen, plan, results, parts, options.data)
        if "retained" in parts:
            failures += _retained(chosen, plan, results, options)
        if "crowd" in parts:
            failures += _crowd(chosen, results, options)
    except KeyboardInterrupt:
        progress("interrupted; every server is stopped, nothing is written")
        return 130
    _write(results, base, quick=options.quick)
    return 1 if failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.broker", description=__doc__)
    parser.add_argument(
        "--systems",
        type=_systems,
        help=f"comma-separated, in the order of the run: {', '.join(SYSTEMS)}",
    )
    parser.add_argument(
        "--only", action="append", choices=(*PARTS, "report"), help="a part; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="one short round, under 3 minutes")
    parser.add_argument("--rounds", type=int, default=3, help="how often (%(default)s)")
    parser.add_argument("--retained-gb", type=float, default=10.0, help="length of the long log")
    parser.add_argument(
        "--crowd",
        type=_crowd_of,
        action="append",
        help="PARTITIONS,GROUPS,CONNECTIONS; may be repeated",
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help="where the servers keep their data (%(default)s)"
    )
    return parser.parse_args()


def _systems(text: str) -> list[str]:
    keys = text.split(",")
    for key in keys:
        if key not in SYSTEMS:
            raise argparse.ArgumentTypeError(f"no system {key!r}; there are {', '.join(SYSTEMS)}")
    return keys


def _crowd_of(text: str) -> crowd.Crowd:
    try:
        partitions, groups, connections = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers") from None
    return crowd.Crowd(partitions, groups, connections)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _available(system: System, results: Results) -> bool:
    """Whether it can be run; if not, its row says why."""
    row = SystemResult(system.key, system.name, system.level, system.durability)
    try:
        row.version = system.version()
        build(system.program)
        if system.speaks_kafka:
            build("raw_kafka")
    except (ServerError, ClientError) as error:
        row.missing = str(error)
        progress(f"{system.key}: not available: {error}")
    earlier = results.systems.get(system.key)
    if earlier is None or row.missing or earlier.missing:
        results.systems[system.key] = row
    else:
        earlier.version, earlier.durability = row.version, row.durability
    return not row.missing


def _forget(row: SystemResult, parts: frozenset[str], run: str) -> None:
    """Drop the earlier figures of the parts about to be measured."""
    raw_cells = {cell for cell in row.cells if cell.startswith("raw_")}
    dropped = set(row.cells) - raw_cells if "compare" in parts else set()
    if "raw" in parts:
        dropped |= raw_cells
    for cell in dropped:
        del row.cells[cell]
    row.start_s, row.idle_mb = [], []
    if "compare" in parts:
        row.loaded_mb, row.run = [], run


def _compare(
    chosen: list[System], plan: Plan, results: Results, parts: frozenset[str], data: Path
) -> int:
    failures = 0
    run = datetime.now(UTC).isoformat(timespec="seconds")
    running = [system for system in chosen if _available(system, results)]
    if "compare" not in parts:
        running = [system for system in running if system.speaks_kafka]
    for system in running:
        _forget(results.systems[system.key], parts, run)
    for number in range(1, plan.rounds + 1):
        for system in list(running):
            progress(f"round {number} of {plan.rounds}: {system.key}")
            row = results.systems[system.key]
            try:
                workloads.run_round(system, plan, data / system.key, row, parts)
            except (ServerError, ClientError) as error:
                failures += 1
                progress(f"  {system.key} failed: {error}")
                if not row.cells:
                    row.missing = f"failed: {str(error).strip().splitlines()[-1]}"
                    running.remove(system)
    # In the order of the table, whatever was run when.
    results.systems = {key: results.systems[key] for key in SYSTEMS if key in results.systems}
    return failures


def _retained(
    chosen: list[System], plan: Plan, results: Results, options: argparse.Namespace
) -> int:
    failures = 0
    for system in chosen:
        # Every other one that speaks Kafka can be asked for by name.
        wanted = system.speaks_kafka if options.systems else system.key in RETAINED_SYSTEMS
        if not wanted or not _available(system, results):
            continue
        progress(f"retained: {system.key}")
        try:
            results.retained[system.key] = retained.measure(
                system, plan, options.data / f"{system.key}-retained", options.retained_gb
            )
        except (ServerError, ClientError) as error:
            failures += 1
            progress(f"  {system.key} failed: {error}")
    return failures


def _crowd(chosen: list[System], results: Results, options: argparse.Namespace) -> int:
    failures = 0
    for size in options.crowd or CROWDS:
        for system in chosen:
            wanted = system.speaks_kafka if options.systems else system.key in CROWD_SYSTEMS
            if not wanted:
                continue
            progress(f"crowd of {size.text}: {system.key}")
            short = replace(size, hold_s=5.0) if options.quick else size
            machine = describe_machine(options.data)
            entry = crowd.measure(system, options.data / f"{system.key}-crowd", short)
            entry["measured"] = f"{machine['date']}, load before {machine['load']}"
            results.crowd[f"{system.key} {size.text}"] = entry
            failures += "failed" in entry and system.key not in MAY_FAIL
    # In the order of the table, whatever was run when.
    order = list(SYSTEMS)
    results.crowd = dict(
        sorted(
            results.crowd.items(),
            key=lambda item: (item[1]["partitions"], order.index(item[0].split()[0])),
        )
    )
    return failures


def _write(results: Results, base: Path, *, quick: bool) -> None:
    results.save(base.with_suffix(".json"))
    text = report.markdown(results)
    print(text)
    base.with_suffix(".md").write_text(text)
    if quick:
        plot.draw(results, base.with_suffix(".svg"))
        return
    plot.draw(results, ROOT / "docs" / "img" / "bench-broker.svg")
    picture = "![Throughput, latency, memory and start of every system](img/bench-broker.svg)"
    docs.replace_section(docs.DOCS, "bench-broker", f"{picture}\n\n{text}")


if __name__ == "__main__":
    sys.exit(main())
