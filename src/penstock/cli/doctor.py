"""`penstock doctor`: whether this machine has what the project needs, and what to do if not.

Each check is a line: what was looked at, what was found, and the remedy. Nothing is changed, and
nothing is started, Spark neither: what only it knows of views, the types, is checked when they are
made and when they run. Checks of databases and stores are those of the rooms that use them.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import typer

from penstock.cli import output, project
from penstock.cli.kafka import BOOTSTRAP_VARIABLE, DEFAULT_PORT, AsJson, bootstrap_of
from penstock.cli.needs import need_captures, need_sinks, of_captures, of_sinks, tables
from penstock.cli.project import ProjectFile
from penstock.cli.project_check import mistakes_around
from penstock.cli.values import parse_address
from penstock.errors import ConfigError, PenstockError
from penstock.extras import EXTRAS, explain, install, missing, package_of

if TYPE_CHECKING:
    from penstock.spark.views.definitions import Definition

Level = Literal["ok", "warning", "failure"]

# What the whole of it takes on one machine: the broker, a driver of Spark and its workers.
MEMORY_WANTED_BYTES: Final = 3 << 30
MEMORY_NEEDED_BYTES: Final = 1 << 30
DISK_WANTED_BYTES: Final = 5 << 30
DISK_NEEDED_BYTES: Final = 1 << 30
CONNECT_TIMEOUT_S: Final = 3.0
OLDEST_PYTHON: Final = (3, 11)
# As `penstock.spark.views.definitions` has them, which is not there without Spark.
VIEW_FILES: Final = "views/*.sql"
_MARKS: Final = {"ok": "ok", "warning": "warning", "failure": "FAILS"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found."""

    level: Level
    what: str
    found: str
    remedy: str = ""


def doctor(
    project_file: ProjectFile = None,
    json: AsJson = False,
) -> None:
    """Check Python, Java, memory, disk, ports, the broker, databases, stores, views.

    Nothing is changed. The status is 1 if something fails; warnings do not count.

    \b
    Examples:
      penstock doctor
      penstock doctor --project shop/penstock.toml
      penstock doctor --json | jq -r '.[] | select(.level != "ok") | .remedy'
    """
    findings = list(examine(project_file))
    if json:
        output.write_json([asdict(each) for each in findings])
    else:
        rows = (
            (_MARKS[each.level], each.what, "\n".join(filter(None, (each.found, each.remedy))))
            for each in findings
        )
        output.print_table(("", "what", "found"), rows)
        bad = sum(each.level == "failure" for each in findings)
        output.say(f"{output.count(bad, 'check')} failed" if bad else "everything needed is there")
    if any(each.level == "failure" for each in findings):
        raise typer.Exit(output.EXIT_FAILURE)


def examine(project_file: Path | None) -> Iterator[Finding]:
    """All checks, one after the other; one that breaks is a finding, not the end."""
    found: list[project.Project] = []
    yield from _guarded("project", lambda: _project(project_file, found))
    known = found[0] if found else project.Project()
    yield from _guarded("Python", _python)
    yield from _guarded("Java", _java)
    yield from _guarded("packages", lambda: _packages(known))
    yield from _guarded("memory", _memory)
    yield from _guarded("disk", lambda: _disk(known))
    yield from _guarded("broker", lambda: _broker(known))
    for name in tables(known, "capture"):
        yield from _guarded(f"capture {name}", partial(_capture, known, name))
    for name in tables(known, "sinks"):
        yield from _guarded(f"sink {name}", partial(_sink, known, name))
    yield from _guarded("views", lambda: _views(known))


def _guarded(what: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except PenstockError as error:
        yield Finding("failure", what, str(error), error.advice)
    except OSError as error:
        yield Finding("failure", what, str(error))
    except ModuleNotFoundError as error:
        lacking = explain(error)
        if lacking is None:
            raise
        yield Finding("failure", what, str(lacking), lacking.advice)


# ---- this machine ------------------------------------------------------------------------


def _project(file: Path | None, found: list[project.Project]) -> Iterator[Finding]:
    # Captures and sinks have findings of their own.
    try:
        known = project.load(file, whole=False)
    except ConfigError:
        # Then these have none: all that is wrong is told here.
        project.load(file)
        raise
    found.append(known)
    project.raise_all(mistakes_around(known))
    if known.path is None:
        advice = "`penstock init` makes one; without it every command takes its options."
        yield Finding("ok", "project", f"no {project.FILE_NAME} here or above", advice)
        return
    parts = [
        output.count(len(value), name.rstrip("s"))
        for name, value in known.data.items()
        if isinstance(value, Mapping) and name != "broker" and value
    ]
    yield Finding("ok", "project", f"{known.path}: {', '.join(parts) or 'no captures, no sinks'}")


def _python() -> Iterator[Finding]:
    here = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        yield Finding("failure", "Python", here, f"Install Python {wanted} or newer.")
        return
    yield Finding("ok", "Python", f"{here}, {sys.executable}")


def _java() -> Iterator[Finding]:
    if missing(["spark"]):
        # Java is looked for by what needs it.
        yield Finding("ok", "Java", "not looked for: only flows need it", "They need the extra "
                      "spark first.")  # fmt: skip
        return
    from penstock.spark.java import JavaError, find_java

    try:
        java = find_java()
    except JavaError as error:
        told = error.args[0] if error.args else str(error)
        yield Finding("failure", "Java", f"{told}: flows cannot run", error.advice)
        return
    yield Finding("ok", "Java", f"{java.version}, {java.program}")


def _packages(known: project.Project) -> Iterator[Finding]:
    yield Finding("ok", "Penstock", _version("penstock") or "not installed, run from its source")
    needed = _needed_extras(known)
    for extra, modules in EXTRAS.items():
        absent = ", ".join(map(package_of, missing([extra])))
        if not absent:
            packages = map(package_of, modules)
            versions = ", ".join(f"{name} {_version(name) or ''}".strip() for name in packages)
            yield Finding("ok", f"extra {extra}", versions)
        elif extra in needed:
            # For all that the project needs: whoever has run it needs no other.
            yield Finding("failure", f"extra {extra}", f"the project needs {absent}",
                          install(needed))  # fmt: skip
        else:
            yield Finding("ok", f"extra {extra}", f"without {absent}",
                          f"If you want it: {install([extra])}")  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _needed_extras(known: project.Project) -> set[str]:
    """The extras that the project asks for."""
    needed = set()
    if tables(known, "sinks"):
        needed |= of_sinks(known)
    if tables(known, "capture"):
        needed |= of_captures(known)
    if known.data.get("views") or _view_files(known):
        needed.add("spark")
    return needed


def _memory() -> Iterator[Finding]:
    free = _free_memory_bytes()
    if free is None:
        yield Finding("ok", "memory", "unknown on this system")
        return
    text = f"{free / (1 << 30):.1f} GiB available"
    advice = "Close other programs, or give Spark less: session(**{'spark.driver.memory': '1g'})."
    if free < MEMORY_NEEDED_BYTES:
        yield Finding("failure", "memory", text, advice)
    elif free < MEMORY_WANTED_BYTES:
        yield Finding("warning", "memory", f"{text}; flows with state like to have 3", advice)
    else:
        yield Finding("ok", "memory", text)


def _free_memory_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(found.split()[1]) * 1024 if found else None


def _disk(known: project.Project) -> Iterator[Finding]:
    folder = known.folder.resolve()
    if not os.access(folder, os.W_OK):
        yield Finding("failure", "disk", f"{folder} cannot be written to",
                      "Work in a folder of your own.")  # fmt: skip
        return
    free = shutil.disk_usage(folder).free
    text = f"{free / (1 << 30):.1f} GiB free at {folder}"
    advice = "Free some space, or shorten retention.ms or retention.bytes of topics."
    if free < DISK_NEEDED_BYTES:
        yield Finding("failure", "disk", text, advice)
    elif free < DISK_WANTED_BYTES:
        yield Finding("warning", "disk", text, advice)
    else:
        yield Finding("ok", "disk", text)


# ---- what it talks to --------------------------------------------------------------------


def _broker(known: project.Project) -> Iterator[Finding]:
    """Whether a broker answers; or, if none is to be expected yet, whether its port is free."""
    bootstrap = bootstrap_of(None, known)
    host, port = parse_address(bootstrap.split(",", maxsplit=1)[0], default_port=DEFAULT_PORT)
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        if not _is_here(host):
            remedy = f"Start it, or mend {BOOTSTRAP_VARIABLE} or bootstrap in [broker]."
            yield Finding("failure", "broker", f"nobody answers at {bootstrap}: {error}", remedy)
            return
        yield Finding("ok", "broker", f"none runs at {bootstrap}; the port is free",
                      "`penstock up` starts one.")  # fmt: skip
        return
    yield _speaks_kafka(bootstrap)


def _is_here(host: str) -> bool:
    return host in {"localhost", "127.0.0.1", "::1", "0.0.0.0"}


def _topics(bootstrap: str) -> list[str]:
    from penstock.client.connection import Cluster
    from penstock.client.metadata import Metadata

    with Cluster(bootstrap, timeout_s=CONNECT_TIMEOUT_S) as cluster:
        return Metadata(cluster, timeout_s=CONNECT_TIMEOUT_S).topics(pattern=".*")


def _speaks_kafka(bootstrap: str) -> Finding:
    try:
        topics = _topics(bootstrap)
    except PenstockError as error:
        return Finding("failure", "broker", f"{bootstrap} is taken by something else, or is a "
                       f"broker that does not let us in: {error}",
                       error.advice or "Choose another port: penstock up --listen")  # fmt: skip
    return Finding("ok", "broker", f"{bootstrap} answers, {output.count(len(topics), 'topic')}")


def _capture(known: project.Project, name: str) -> Iterator[Finding]:
    from penstock.capture.sources import open_source
    from penstock.cli.capture_project import configured

    config = configured(known, name)
    need_captures(known, [name])
    with open_source(config.source) as source:
        for check in source.check():
            level: Level = "ok" if check.ok else "failure" if check.required else "warning"
            remedy = "" if check.ok else check.remedy
            yield Finding(level, f"capture {name}: {check.name}", check.found, remedy)


def _sink(known: project.Project, name: str) -> Iterator[Finding]:
    known.need("sinks", name)
    need_sinks(known, [name])
    from penstock.cli.sinks_file import read
    from penstock.cli.sinks_reach import answer_of

    spec = read(known, name)
    at, readable, target = answer_of(
        spec, lambda sink: (sink.position(), sink.readable, sink.target)
    )
    told = "reached, not made yet" if at is None else f"reached, read to {at}"
    if not readable:
        # A webhook: a question would be a delivery.
        told = "not asked: it is called when there is something to tell"
    yield Finding("ok", f"sink {name}", f"{target}: {told}")


def _view_files(known: project.Project) -> list[Path]:
    return sorted(known.folder.glob(VIEW_FILES))


def _views(known: project.Project) -> Iterator[Finding]:
    """Whether each can be read and kept up to date, and its tables' topics are there."""
    files = _view_files(known)
    if not files and not tables(known, "views"):
        return
    from penstock.cli.run import need_spark
    from penstock.cli.view import declared_tables

    need_spark("views")
    from penstock.spark.flows.declare import Collected
    from penstock.spark.views.definitions import read

    declared_tables(known)
    views: dict[str, Definition] = {}
    flows = []
    for file in files:
        try:
            made = read(file)
            flows.append(made.flow())
            views[file.stem] = made
        except PenstockError as error:
            yield Finding("failure", f"view {file.stem}", str(error), error.advice)
    # That no two write to the same.
    Collected.of(flows)
    try:
        there = set(_topics(bootstrap_of(None, known))) if views else set()
    except PenstockError:
        # Of which the broker has a finding.
        there = None
    made_here = {each.topic for each in views.values()}
    for name, view in views.items():
        yield _view(f"view {name}", view, there, made_here)


def _view(what: str, view: Definition, there: set[str] | None, made_here: set[str]) -> Finding:
    """A view that can be read; `there` are the topics, if a broker tells of them."""
    text = f"topic {view.topic} by {', '.join(view.key)}"
    if there is None:
        return Finding("ok", what, f"{text}; no broker was there to ask for its tables")
    missing = sorted({each.topic for each in view.tables} - there - made_here)
    if missing:
        return Finding("warning", what, f"{text}; it waits for {', '.join(missing)}, not there yet",
                       "It is made when somebody first writes to it, or by `penstock topics create "
                       f"{missing[0]}`; a name that is wrong is in {VIEW_FILES}.")  # fmt: skip
    return Finding("ok", what, text if view.topic in there else f"{text}, not made yet")
