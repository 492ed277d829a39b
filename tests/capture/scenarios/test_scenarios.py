"""Each scenario, from a real database into a real log: undisturbed, and with kills in between."""

from __future__ import annotations

import random
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import pytest

from penstock.capture.delivery import capture
from penstock.client.connection import Cluster
from penstock.client.table_schemas import PublishedSchemas, ValueType, event_schema_id
from penstock.testing import Broker
from tests.capture.kit.capturing import (
    DATABASE_STATUS_S,
    CaptureProcess,
    CaptureThread,
    Told,
    check_transactions,
    records,
)
from tests.capture.kit.databases import KINDS, Database
from tests.capture.kit.databases import MARKS as DATABASE_MARKS
from tests.capture.kit.following import MARKS, make_marks, mark
from tests.capture.scenarios.script import FOLDER, Scenario, load, scenarios
from tests.harness.profiles import PROFILE, Profile, some
from tests.waiting import eventually

# Processes by the dozen: slow machines take their time.
pytestmark = pytest.mark.timeout(300)
# A capture of a scenario takes about so many steps of writing for a section.
STEPS_MAX = 16


@pytest.fixture(scope="module")
def log() -> Iterator[str]:
    with Broker() as broker:
        yield broker.bootstrap


def check_form(value: Any, kind: ValueType, database: str) -> None:
    """The value is one of its type, as the wire has it."""
    if value is None or database == "sqlite":
        # Any column of SQLite may hold a value of any kind.
        return
    if kind.name == "array":
        assert kind.items is not None
        for item in value:
            check_form(item, kind.items, database)
    elif kind.name == "struct":
        for name, inner in kind.fields:
            check_form(value[name], inner, database)
    elif kind.name == "bytes":
        b64decode(value, validate=True)
    else:
        wanted = {"string": str, "boolean": bool, "float": int | float, "double": int | float}
        assert isinstance(value, wanted.get(kind.name, int)), (value, kind)


class Run:
    """A scenario on a database, with a capture of it in a thread."""

    def __init__(self, scenario: Scenario, database: Database, log: str) -> None:
        self.scenario = scenario
        self.database = database
        # Of this name is a replication slot, and those are of the whole server.
        self.name = f"scenario{uuid4().hex[:12]}"
        self.cluster = Cluster(log)
        self.settings: dict[str, Any] = {"url": database.url, "options": dict(database.options)}
        self.settings |= scenario.capture(database.full_name, self.name)
        self.thread = CaptureThread(self.name, self.settings, log)
        make_marks(database)

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive

    def execute(self, statements: list[str]) -> None:
        with self.database.connect() as session:
            for statement in statements:
                session.run(self.database.sql(statement))

    def topic(self, table: str) -> str:
        return f"{self.name}.{self.database.full_name(table)}"

    def mark_op(self, number: int) -> str:
        """How a mark has come, if it has."""
        found = records(self.cluster, self.topic(MARKS))
        events = (orjson.loads(row.value) for row in found if row.value)
        return next((each["op"] for each in events if each["after"]["id"] == number), "")

    def catch_up(self) -> None:
        """Until a mark comes by the stream: all that was committed before it has come, too.

        One that a snapshot has read does not tell that the other tables are read.
        """
        op = "r"
        while op == "r":
            op = self._op_once_told(mark(self.database))

    def _op_once_told(self, number: int) -> str:
        return eventually(lambda: self.mark_op(number) if self.is_alive else "")

    def told(self) -> dict[str, Told]:
        with self.database.connect() as session:
            names = self.database.tables(session)
        return {name: Told(records(self.cluster, self.topic(name))) for name in names}

    def is_all_there(self) -> bool:
        """Whether each table that has rows has some in its topic."""
        return all(
            found.rows or self.is_hidden(name) or not self.database.rows(name)
            for name, found in self.told().items()
        )

    def is_hidden(self, table: str) -> bool:
        """Whether it is the outbox, which has no topic of its own."""
        settings = self.scenario.capture(self.database.full_name, self.name)
        return bool(settings.get("outbox", {}).get("table") == self.database.full_name(table))

    def verify(self) -> None:
        scenario = self.scenario
        # Tables that were made later are read by themselves, a while later.
        eventually(lambda: self.is_alive and self.is_all_there())
        told = self.told()
        for name, found in told.items():
            if self.is_hidden(name):
                assert found.rows == []
                continue
            assert sorted(found.table(), key=str) == sorted(self.rows(name, found), key=str), name
            self.verify_schemas(name, found)
        for name, ops in scenario.expected.items():
            assert told[name].ops() == ops, name
        others = {}
        for topic, wanted in scenario.records.items():
            found_rows = records(self.cluster, f"{self.name}.{topic}")
            assert [
                ((row.key or b"").decode(), (row.value or b"").decode()) for row in found_rows
            ] == wanted
            others[topic] = len(found_rows)
        if not others:
            check_transactions(self.cluster, self.name, told)

    def verify_schemas(self, table: str, found: Told) -> None:
        """Each event names a schema that is published, and its rows have its columns."""
        schemas = PublishedSchemas(self.cluster)
        published = {each.id for each in schemas.history(self.topic(table))}
        named: list[int] = []
        for row in found.rows:
            if row.value is None:
                continue
            id_ = event_schema_id(row.value)
            assert id_ in published, row
            schema = schemas.by_id(id_)
            named += [id_] if id_ not in named else []
            event = orjson.loads(row.value)
            for told in filter(None, (event["before"], event["after"])):
                assert list(told) == [column.name for column in schema.columns]
                for column in schema.columns:
                    check_form(told[column.name], column.type, self.database.kind)
        altered = sum(
            f"alter table {table} " in statement.lower()
            for section in self.scenario.sections
            for statement in section
        )
        # Not each ALTER TABLE changes what events show; nothing else does, kills neither.
        assert len(named) <= 1 + altered
        latest = schemas.latest(self.topic(table))
        assert latest is not None
        assert not named or latest.id in named
        with self.database.connect() as session:
            columns = self.database.columns(session, table)
        hidden = [column for column in latest.schema.key if column not in columns]
        assert [column.name for column in latest.schema.columns] == hidden + columns

    def rows(self, table: str, found: Told) -> list[dict[str, Any]]:
        """The table itself. What serves as its key where it has none is told beside its rows."""
        rows = self.database.rows(table)
        extra = set().union(*found.table()) - set().union(*rows) if rows else set()
        if not extra:
            return rows
        assert self.database.kind == "sqlite"
        (rowid,) = extra
        return self.database.rows(table, extra=rowid)

    def close(self) -> None:
        self.thread.stop()
        self.cluster.close()


class KilledRun(Run):
    """The same with a capture that is a process, to be killed."""

    def __init__(self, scenario: Scenario, database: Database, log: str, folder: Path) -> None:
        super().__init__(scenario, database, log)
        self.process = CaptureProcess(self.name, self.settings, log, folder / "capture.log")

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    def kill_within(self, steps: int) -> None:
        """Run a process that is killed at a step, or when it has caught up before that."""
        number = mark(self.database)
        self.process.start(steps)
        eventually(lambda: not self.process.is_alive or self.mark_op(number))
        self.process.kill()

    def close(self) -> None:
        self.process.kill()
        super().close()


def killed_pairs() -> Iterator[tuple[str, str]]:
    """Each scenario on one of the databases, in turn; in `proof` on all of them."""
    for turn, name in enumerate(scenarios()):
        kinds = kinds_of(name)
        first = turn % len(kinds)
        for kind in some(kinds[first:] + kinds[:first], test=1):
            yield name, kind


def undisturbed_pairs() -> Iterator[tuple[str, str]]:
    """Each scenario on all databases; before `proof` not on a server on which it is killed.

    `check` kills nothing, and SQLite costs next to nothing: what `check` runs, `test` runs too.
    """
    killed = {pair for pair in killed_pairs() if pair[1] != "sqlite"}
    if PROFILE is Profile.PROOF:
        killed.clear()
    for name in scenarios():
        yield from ((name, kind) for kind in kinds_of(name) if (name, kind) not in killed)


def kinds_of(name: str) -> list[str]:
    """The databases that a scenario is for."""
    return [kind for kind in KINDS if not load(FOLDER / f"{name}.sql", kind).skipped]


def on_each(pairs: Iterator[tuple[str, str]]) -> pytest.MarkDecorator:
    """Parameters of a test: scenarios, and the databases on which they run."""
    cases = [pytest.param(name, kind, marks=DATABASE_MARKS[kind]) for name, kind in pairs]
    return pytest.mark.parametrize(("scenario", "each"), cases, indirect=["each"])


@on_each(undisturbed_pairs())
def test_undisturbed(
    scenario: str, each: Database, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_DATABASE_STATUS_S", DATABASE_STATUS_S)
    with closing(Run(load(FOLDER / f"{scenario}.sql", each.kind), each, log)) as run:
        first, *rest = run.scenario.sections
        run.execute(first)
        run.thread.start()
        run.catch_up()
        for section in rest:
            run.execute(section)
        run.catch_up()
        run.verify()


@pytest.mark.processes
@on_each(killed_pairs())
def test_killed_in_the_middle(
    scenario: str, each: Database, log: str, tmp_path: Path, seed: int
) -> None:
    """The snapshot, and then each section, has a process that is killed at a random step of it."""
    chance = random.Random(seed)
    loaded = load(FOLDER / f"{scenario}.sql", each.kind)
    with closing(KilledRun(loaded, each, log, tmp_path)) as run:
        first, *rest = run.scenario.sections
        run.execute(first)
        run.kill_within(chance.randint(0, STEPS_MAX))
        run.process.start()
        run.catch_up()
        run.process.kill()
        for section in rest:
            run.execute(section)
            run.kill_within(chance.randint(0, STEPS_MAX))
        run.process.start()
        run.catch_up()
        run.verify()
