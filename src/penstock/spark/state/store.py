"""What a shard keeps, by version: values, which are whole tables, and tables by key.

    FOLDER/OPERATOR/SHARD/VERSION-RANDOM.state
    FOLDER/OPERATOR/SHARD/VERSION-DIGEST.runs

A file holds what a version has changed: whole values, and runs of tables (`runs`). At its end
stands what the version consists of, by file and place, most of it in the files of versions before.
So a version costs what has changed, and any worker opens one by mapping its files into memory. A
worker that still has the version it needs does not even do that.

Large runs are merged while nobody waits for it (`keyed`), and the one that they become is written
then, under a name that tells for which it stands. The next version refers to it, whichever worker
writes that; a file to which no version refers is removed like others.

A file is whole or not there, and never changed: two tries of a task write two files, of which
either will do, for they say the same. The newest version before the one that is asked for counts.
Files are removed when no version of those that could be needed refers to them.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import time_ns
from typing import Any, Final
from uuid import uuid4

import orjson
import pyarrow as pa

from penstock.spark.state.files import Files, StateError
from penstock.spark.state.keyed import KeyedTable, Merging
from penstock.spark.state.runs import Run, merged, one_batch
from penstock.spark.state.schemas import shown

# So many versions before the newest are kept: the last micro-batch may have to be run again.
KEPT_VERSIONS: Final = 3
_NAME: Final = re.compile(r"(\d+)-[0-9a-f]+\.state")
_ANY_NAME: Final = re.compile(r"(\d+)-[0-9a-f]+\.(?:state|runs)")
_RUNS: Final = ".runs"
# Characters of a digest in a name.
_DIGEST: Final = 32
_MAGIC: Final = b"PENSTAT1"
_ALIGNMENT: Final = 64
# How many shards a worker process keeps open between micro-batches.
_MOST_WARM: Final = 256
# After how many versions it is looked for what killed writers have left.
_SWEPT_EVERY: Final = 64
# So many removals wait at the most.
_MOST_REMOVALS: Final = 64
log: Final = logging.getLogger(__name__)
__all__ = [
    "KEPT_VERSIONS",
    "Held",
    "KeyedTable",
    "Place",
    "State",
    "hold",
    "is_whole",
    "opened",
    "size",
]
_DAMAGED: Final = "Rebuild the flow from the log, with `penstock flows reset`."


@dataclass(frozen=True, slots=True)
class Place:
    """Where the shards of one operator are."""

    folder: str


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a file: a table as Arrow's stream."""

    file: str
    offset: int
    size: int
    rows: int

    def as_list(self) -> list[Any]:
        return [self.file, self.offset, self.size, self.rows]


@dataclass(slots=True)
class State:
    """The state of one shard, while a task has it."""

    values: dict[str, pa.Table] = field(default_factory=dict)
    tables: dict[str, KeyedTable] = field(default_factory=dict)
    # Where that which is saved stands, by the identity of a value or run.
    saved: dict[int, tuple[object, Section]] = field(default_factory=dict)
    # The one that was written last.
    version: int = -1

    def value(self, name: str) -> pa.Table | None:
        """A table that is kept whole: right for what is small, or changes wholly."""
        return self.values.get(name)

    def keep(self, name: str, rows: pa.Table) -> None:
        """Keep a table in the place of what had the name."""
        self.values[name] = rows

    def table(self, name: str, schema: pa.Schema, key: Sequence[str]) -> KeyedTable:
        """A table by key, of which each version writes only what has changed."""
        found = self.tables.get(name)
        if found is None:
            found = self.tables[name] = KeyedTable(schema, key)
        elif found.key != tuple(key) or _types(found.schema) != _types(schema):
            raise StateError(
                f"the table {name!r} was kept with the key {', '.join(found.key)} and the columns "
                f"{shown(found.schema)}, and is asked for with others",
                advice=_DAMAGED,
            )
        else:
            found.schema = schema
        return found


def _types(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return [(each.name, each.type) for each in schema]


# ---- versions ----------------------------------------------------------------------------

# What this worker process has in memory, by folder and shard: the file and the state.
_warm: OrderedDict[tuple[str, int], tuple[str, State]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class Held:
    """The state of a shard in the hands of a task: what becomes of it is kept as a version."""

    place: Place
    shard: int
    version: int
    state: State

    def keep(self) -> None:
        """Write the version; from then on it counts."""
        files = self._files
        name = write(files, self.version, self.state)
        _forget_soon(files, self.version)
        _warm[self.place.folder, self.shard] = (name, self.state)
        while len(_warm) > _MOST_WARM:
            with suppress(KeyError):
                _warm.popitem(last=False)

    def tidy(self) -> None:
        """Let runs be merged, when all is done that somebody waits for."""

        saved = self.state.saved

        def begin(title: str, key: Sequence[str], runs: Sequence[Run], forget: bool) -> Merging:
            digest = _digest(title, [saved[id(each)][1] for each in runs])
            work = partial(merged, runs, key, forget=forget)
            return _merging.submit(_merge, self._files, self.state, digest, work)

        for title, table in self.state.tables.items():
            table.merge_meanwhile(partial(begin, title, table.key))

    @property
    def _files(self) -> Files:
        return Files(f"{self.place.folder}/{self.shard}")


def hold(place: Place, shard: int, version: int) -> Held:
    """The state before a version."""
    files = Files(f"{place.folder}/{shard}")
    warm = _warm.pop((place.folder, shard), None)
    newest = newest_before(files, version)
    if warm is not None and warm[0] == newest:
        state = warm[1]
        for table in state.tables.values():
            table.adopt()
    else:
        state = State() if newest is None else read(files, newest)
    return Held(place, shard, version, state)


@contextmanager
def opened(place: Place | None, shard: int, version: int) -> Iterator[State]:
    """The state before a version; what it is at the end becomes that version."""
    if place is None:
        yield State()
        return
    held = hold(place, shard, version)
    yield held.state
    held.keep()
    held.tidy()


def is_whole(place: Place, shards: int, version: int) -> bool:
    """Whether all shards of an operator have written a version."""
    files = Files(place.folder)
    return all(
        any(found == version for found, _ in _versions(files.names(str(at))))
        for at in range(shards)
    )  # fmt: skip


def size(places: Sequence[Place], shards: int) -> tuple[int, int]:
    """Rows, with those that are overwritten and not merged yet, and bytes of operators.

    Of a store that is far away it is not asked: (0, 0).
    """
    rows = taken = 0
    for place in places:
        for shard in range(shards):
            files = Files(f"{place.folder}/{shard}")
            newest = newest_before(files, 1 << 62) if files.is_local else None
            if newest is not None:
                parts = sections(_contents(files, newest))
                rows += sum(each.rows for each in parts)
                taken += sum(each.size for each in parts)
    return rows, taken


def _versions(names: Any, kind: re.Pattern[str] = _NAME) -> list[tuple[int, str]]:
    """Versions and their files, from the oldest to the newest."""
    matches = [found for found in map(kind.fullmatch, names) if found is not None]
    return sorted((int(found[1]), found[0]) for found in matches)


def newest_before(files: Files, version: int) -> str | None:
    """The file of the newest version before one; None if there is none."""
    found = [name for number, name in _versions(files.names()) if number < version]
    return found[-1] if found else None


# To remove a large file takes longer than to write a small one, and nobody waits for it.
_removing: Final = ThreadPoolExecutor(1, "forget-state")
# Nor for large runs to be merged.
_merging: Final = ThreadPoolExecutor(1, "merge-state")
_removals: Final = threading.BoundedSemaphore(_MOST_REMOVALS)


def _forget_soon(files: Files, version: int) -> None:
    if _removals.acquire(blocking=False):
        _removing.submit(_forget, files, version).add_done_callback(lambda _: _removals.release())
    else:
        _forget(files, version)


def _forget(files: Files, version: int) -> None:
    try:
        _forget_old(files, version)
    except Exception as error:
        # The next version looks for the same files again. Nobody waits for this one to be done.
        log.warning("old state in %s stays for now: %s", files.folder, error)


def _forget_old(files: Files, version: int) -> None:
    if version % _SWEPT_EVERY == 0:
        files.sweep()
    names = files.names()
    there = _versions(names)
    numbers = sorted({number for number, _ in there if number < version})
    if len(numbers) <= KEPT_VERSIONS:
        return
    oldest = numbers[-KEPT_VERSIONS]
    needed = {
        section.file
        for number, name in there
        if number >= oldest
        for section in sections(_contents(files, name))
    }
    for number, name in _versions(names, _ANY_NAME):
        if number < oldest and name not in needed:
            files.remove(name)


# ---- files -------------------------------------------------------------------------------


def write(files: Files, version: int, state: State) -> str:
    """Write a version; the name of its file."""
    # Of several tries of a version the last counts: its output was written, should they differ.
    name = f"{_unique(version)}.state"
    out = pa.BufferOutputStream()
    saved: dict[int, tuple[object, Section]] = {}

    def section(thing: pa.Table | Run, written: Mapping[int, tuple[Run, Section]]) -> list[Any]:
        known = state.saved.get(id(thing))
        if known is None or known[0] is not thing:
            known = written.get(id(thing))
            if known is None or not _is_there(known[1], version):
                known = (thing, _put(out, name, thing))
        saved[id(thing)] = known
        return known[1].as_list()

    told: dict[str, Any] = {"version": version, "values": {}, "tables": {}}
    for title, rows in state.values.items():
        told["values"][title] = section(rows, {})
    for title, table in state.tables.items():
        table.settle()
        runs = [section(run, table.written) for run in table.runs]
        told["tables"][title] = {"key": list(table.key), "runs": runs}
        table.written = {}
    _close(out, told)
    files.write(name, out.getvalue())
    state.saved = saved
    state.version = version
    return name


def _close(out: pa.BufferOutputStream, told: dict[str, Any]) -> None:
    """Write what a file says at its end."""
    contents = orjson.dumps(told)
    out.write(contents)
    out.write(len(contents).to_bytes(8, "little"))
    out.write(_MAGIC)


def _unique(version: int) -> str:
    return f"{version}-{time_ns():016x}{uuid4().hex[:8]}"


def _put(out: pa.BufferOutputStream, name: str, thing: pa.Table | Run) -> Section:
    """Write a value or a run behind what is there already."""
    out.write(bytes(-out.tell() % _ALIGNMENT))
    begin = out.tell()
    whole = thing.to_batch() if isinstance(thing, Run) else thing
    with pa.ipc.new_stream(out, whole.schema) as writer:
        writer.write(whole)
    return Section(name, begin, out.tell() - begin, len(thing))


def _merge(files: Files, state: State, digest: str, work: Callable[[], Run]) -> tuple[Run, Section]:
    """Make one run of some and write it, unless another worker has done so."""
    known = _merged_by_others(files, state.version).get(digest)
    found = None if known is None else _read_merged(files, known)
    if found is not None:
        return found
    one = work()
    # As new as can be, whoever has written it: nobody removes what is so new.
    newest = max((number for number, _ in _versions(files.names())), default=state.version)
    name = f"{newest}-{digest}{uuid4().hex[:8]}{_RUNS}"
    out = pa.BufferOutputStream()
    place = _put(out, name, one)
    _close(out, {"run": place.as_list()})
    # A folder that was removed meanwhile is not made again.
    files.write(name, out.getvalue(), makes_folder=False)
    return _read_merged(files, name) or (one, place)


def _digest(title: str, parts: Sequence[Section]) -> str:
    """Tells runs of a table from all others: by where they stand."""
    told = orjson.dumps([title, [each.as_list() for each in parts]])
    return hashlib.sha256(told).hexdigest()[:_DIGEST]


def _merged_by_others(files: Files, version: int) -> dict[str, str]:
    """Files of merged runs that nobody has removed by now, by the digests of what was merged."""
    there = _versions((each for each in files.names() if each.endswith(_RUNS)), _ANY_NAME)
    fresh = [name for number, name in there if number > version - KEPT_VERSIONS]
    return {name.partition("-")[2][:_DIGEST]: name for name in fresh}


def _read_merged(files: Files, name: str) -> tuple[Run, Section] | None:
    """A merged run; None if it is gone by now."""
    try:
        data = files.read(name)
    except FileNotFoundError:
        return None
    place = Section(*_contents(files, name, data)["run"])
    with pa.ipc.open_stream(data.slice(place.offset, place.size)) as reader:
        return Run.of(one_batch(reader.read_all())), place


def _adopt(files: Files, state: State) -> None:
    """Take what others have merged of the runs of a version."""
    known = _merged_by_others(files, state.version)
    for title, table in state.tables.items() if known else ():
        parts = [state.saved[id(each)][1] for each in table.runs]
        spans = (
            (first, end) for first in range(len(parts)) for end in range(len(parts), first, -1)
        )
        for first, end in spans:
            name = known.get(_digest(title, parts[first:end]))
            found = None if name is None else _read_merged(files, name)
            if found is not None:
                table.replace(first, end - first, *found)
                break


def _is_there(place: Section, version: int) -> bool:
    """Whether a file that no version refers to yet is too new for anybody to have removed it."""
    found = _ANY_NAME.fullmatch(place.file)
    return found is not None and int(found[1]) > version - KEPT_VERSIONS


def _contents(files: Files, name: str, data: pa.Buffer | None = None) -> dict[str, Any]:
    """What a version consists of."""
    data = files.read(name) if data is None else data
    size = data.size
    try:
        if bytes(data.slice(size - 8)) != _MAGIC:
            raise ValueError("its end is missing")
        length = int.from_bytes(bytes(data.slice(size - 16, 8)), "little")
        found: dict[str, Any] = orjson.loads(bytes(data.slice(size - 16 - length, length)))
    except (ValueError, IndexError, pa.ArrowException) as error:
        raise StateError(f"{files.folder}/{name} is damaged: {error}", advice=_DAMAGED) from error
    return found


def sections(contents: dict[str, Any]) -> list[Section]:
    """All parts that a version consists of."""
    found = [Section(*each) for each in contents["values"].values()]
    for table in contents["tables"].values():
        found += [Section(*each) for each in table["runs"]]
    return found


def _table_of(files: Files, name: str, mapped: dict[str, pa.Buffer], section: Section) -> pa.Table:
    """A part of a version; `mapped` are files that were read already."""
    try:
        data = mapped.get(section.file)
        if data is None:
            data = mapped[section.file] = files.read(section.file)
        with pa.ipc.open_stream(data.slice(section.offset, section.size)) as reader:
            return reader.read_all()
    except (OSError, pa.ArrowException) as error:
        raise StateError(
            f"{files.folder}/{section.file}, which {name} needs, cannot be read: {error}",
            advice=_DAMAGED,
        ) from error


def tables_of(files: Files, name: str, begin: str) -> dict[str, pa.Table]:
    """The tables by key of a version whose names begin so, and nothing else of it."""
    mapped = {name: files.read(name)}
    found = {}
    for title, told in _contents(files, name, mapped[name])["tables"].items():
        if title.startswith(begin) and told["runs"]:
            parts = (_table_of(files, name, mapped, Section(*each)) for each in told["runs"])
            runs = [Run.of(one_batch(each)) for each in parts]
            found[title] = KeyedTable(runs[-1].rows.schema, told["key"], runs).scan()
    return found


def read(files: Files, name: str) -> State:
    """The state of a version."""
    mapped = {name: files.read(name)}
    contents = _contents(files, name, mapped[name])
    state = State(version=contents["version"])
    table_of = partial(_table_of, files, name, mapped)

    for title, told in contents["values"].items():
        section = Section(*told)
        rows = state.values[title] = table_of(section)
        state.saved[id(rows)] = (rows, section)
    for title, told in contents["tables"].items():
        runs = []
        for each in told["runs"]:
            section = Section(*each)
            run = Run.of(one_batch(table_of(section)))
            state.saved[id(run)] = (run, section)
            runs.append(run)
        if runs:
            schema = runs[-1].rows.schema
            state.tables[title] = KeyedTable(schema, told["key"], runs)
    _adopt(files, state)
    return state
