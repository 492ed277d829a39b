"""`penstock demo`: a busy shop, from its database to all that is derived from it, in one command.

Four processes beside this one, the same that a user starts by hand: the broker (`penstock up`), the
capture of the shop's database (`penstock capture run`), the flows and sinks (`penstock run`) and
the shop itself (`shop.py`). The folder is a project as `penstock init --example shop` makes it, so
every command works in it from another terminal.

At the end the shop closes first; then everything drains, and each derived system is compared with
the database; then flows, capture and broker stop.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli import output, project
from penstock.cli.demo_servers import check_servers
from penstock.cli.kafka import BOOTSTRAP_VARIABLE, connect
from penstock.cli.stopping import stopped_by_signals
from penstock.cli.up import DEFAULT_LISTEN
from penstock.cli.values import parse_pairs
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.cli.demo_check import Found
    from penstock.cli.demo_parts import Crew
    from penstock.cli.demo_view import Dashboard, Seen, Shopkeeper, Watcher
    from penstock.sinks.spec import SinkSpec

DEFAULT_DATA: Final = Path(".penstock") / "demo"
MARK: Final = ".penstock-demo"
DATABASE: Final = "SHOP_DATABASE"
CACHE: Final = "SHOP_CACHE"
ORDER: Final = ("shop", "flows", "capture", "broker")
CAPTURED: Final = ("shop.customers", "shop.products", "shop.orders")
EVENTS: Final = ("shop.clicks", "shop.payments", "shop.searches")
DRAIN_S: Final = 300.0
# How long flows whose results nobody compares may take beyond that.
FLOWS_S: Final = 60.0
# The whole demo is to fit beside other things; and with some dozen rows in a micro-batch, compiling
# and adapting a plan takes longer than running it. For Java that lives for a minute the same holds
# of its own code: the compiler for speed took more of two cores than all else.
SMALL: Final = (
    "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.memory=1g",
    "spark.ui.enabled=false",
    "spark.sql.adaptive.enabled=false",
    "spark.sql.codegen.wholeStage=false",
    "spark.sql.codegen.factoryMode=NO_CODEGEN",
)
_STEP_S: Final = 0.25
_QUICK_STOP_S: Final = 10.0
_EARLY_STOP_S: Final = 1.0

Data = Annotated[
    Path,
    typer.Option("--data", "-d", metavar="DIR", envvar="PENSTOCK_DEMO", file_okay=False,
                 help="Where everything is kept."),
]  # fmt: skip
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", "-s", min=0, metavar="N",
                 help="Stop after N seconds; counted from when the flows run."),
]  # fmt: skip
Rate = Annotated[
    float,
    typer.Option("--rate", min=1, max=5000, metavar="N", help="Changes of rows a second."),
]
Keep = Annotated[
    bool, typer.Option("--keep", help="Go on with what is there instead of beginning anew.")
]
Listen = Annotated[
    str,
    typer.Option("--listen", "-l", metavar="[HOST:]PORT", envvar="PENSTOCK_LISTEN",
                 help="Where the broker listens; port 0 takes any free one."),
]  # fmt: skip
Postgres = Annotated[
    str | None,
    typer.Option("--postgres", metavar="URL", help="Let the shop's database be in this PostgreSQL, "
                 "in the schema penstock_shop, instead of SQLite."),
]  # fmt: skip
Kafka = Annotated[
    str | None,
    typer.Option("--kafka", metavar="BOOTSTRAP", help="Let the log be this Apache Kafka."),
]
Redis = Annotated[
    str | None, typer.Option("--redis", metavar="URL", help="Let the cache be in this Redis.")
]
Master = Annotated[
    str, typer.Option("--master", "-m", metavar="URL", help="The Spark to run the flows on.")
]
Conf = Annotated[
    list[str],
    typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark. May be repeated."),
]
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")]


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for."""

    data: Path
    seconds: float | None
    rate: float
    keep: bool
    listen: str
    postgres: str | None
    kafka: str | None
    redis: str | None
    master: str
    plain: bool
    conf: tuple[str, ...] = ()

    @property
    def database(self) -> str:
        return self.postgres or f"sqlite:///{self.data / 'shop.db'}"

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes: what holds a password is given here, not in a file."""
        given = {name: value for name, value in os.environ.items()
                 if name not in {BOOTSTRAP_VARIABLE, "PENSTOCK_FLOWS", "PENSTOCK_SINKS",
                                 "PENSTOCK_MASTER", "PENSTOCK_METRICS"}}  # fmt: skip
        given[project.VARIABLE] = str(self.data / project.FILE_NAME)
        given["PYTHONUNBUFFERED"] = "1"
        # Of the C library: by default each thread may keep much of what it gave back.
        given.setdefault("MALLOC_ARENA_MAX", "2")
        return given | self.secrets

    @property
    def secrets(self) -> dict[str, str]:
        found = {DATABASE: self.postgres, CACHE: self.redis}
        return {name: value for name, value in found.items() if value is not None}


def demo(
    seconds: Seconds = None,
    data: Data = DEFAULT_DATA,
    rate: Rate = 50.0,
    keep: Keep = False,
    listen: Listen = DEFAULT_LISTEN,
    postgres: Postgres = None,
    kafka: Kafka = None,
    redis: Redis = None,
    master: Master = "local[2]",
    plain: Plain = False,
    conf: Conf = [],  # noqa: B006
) -> None:
    """Run a sample shop: a busy database and events in, flows, and derived systems kept in step.

    A database with customers, products and orders is captured into the log, beside a stream of
    clicks and one of payments. Flows enrich clicks, keep revenue by country and minute and the top
    products, and find abandoned carts, suspicious payments and products that somebody looks for. A
    search index, a cache, two SQL views and a Delta table are kept in step.

    After Ctrl-C, or --seconds, the shop closes, and each derived system is compared with the
    database. The status is 0 if all of them are equal, else 1.

    \b
    Examples:
      penstock demo
      penstock demo --seconds 60 --rate 200
      penstock demo --keep                     # go on with the data of the last time
      penstock demo --postgres postgresql://me:secret@localhost/test --redis redis://localhost/0
      penstock demo --kafka kafka-1:9092 --master spark://spark:7077
    """
    from penstock.cli.needs import need_demo

    began = time.monotonic()
    need_demo(filter(None, (postgres, redis)))
    from penstock.spark.java import find_java

    find_java()
    parse_pairs(conf)
    plan = Plan(data.resolve(), seconds, rate, keep, listen, postgres, kafka, redis, master, plain,
                tuple(conf))  # fmt: skip
    stop = threading.Event()
    with _folder(plan):
        made = _Demo(plan, stop, began)
        # The second Ctrl-C leaves at once, and nothing behind.
        with stopped_by_signals(stop, made.kill):
            good = made.run()
    if not good:
        raise typer.Exit(output.EXIT_FAILURE)


# ---- the folder --------------------------------------------------------------------------


@contextmanager
def _folder(plan: Plan) -> Iterator[None]:
    """The project in its folder, for one demo at a time."""
    data = plan.data
    mark = data / MARK
    if data.exists() and any(data.iterdir()) and not mark.exists():
        raise ConfigError(
            f"{data} is not empty, and not of a demo", advice="Choose another with --data DIR."
        )
    try:
        data.mkdir(parents=True, exist_ok=True)
        handle = os.open(mark, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"{data} cannot be used: {error.strerror or error}",
                          advice="Choose another with --data DIR.") from error  # fmt: skip
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another demo works in {data}",
                advice="Stop it, or choose another folder: --data DIR.",
            ) from None
        # Before anything of the last demo is deleted.
        check_servers(plan)
        if not plan.keep:
            _clear(data)
        _write_project(plan)
        yield
    finally:
        os.close(handle)


def _clear(data: Path) -> None:
    for entry in data.iterdir():
        if entry.name == MARK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _write_project(plan: Plan) -> None:
    """The files of the example, with what was asked for put in."""
    from penstock.cli import examples

    for name, text in examples.files_of("shop").items():
        if name == project.FILE_NAME:
            text = adapted(text, plan)  # noqa: PLW2901
        (plan.data / name).write_text(text, encoding="utf-8")


def adapted(text: str, plan: Plan) -> str:
    """The project file for the servers that were named."""
    changes: list[tuple[str, str]] = []
    if plan.kafka is not None:
        changes.append(('"127.0.0.1:9092"', f'"{plan.kafka}"'))
    if plan.postgres is not None:
        tables = (
            'include = ["penstock_shop.*"]\n'
            "routes = [{ pattern = 'shop\\.penstock_shop\\.(.*)', replacement = 'shop.\\1' }]"
        )
        changes += [
            ('"sqlite:///shop.db"', f'"${{{DATABASE}}}"'),
            ('include = ["customers", "products", "orders"]', tables),
        ]
    if plan.redis is not None:
        changes.append(('"sqlite:///derived/cache.db?table=customers"', f'"${{{CACHE}}}"'))
    for old, new in changes:
        if old not in text:
            raise PenstockError(f"the example's project file has no {old}")
        text = text.replace(old, new)
    return text


# ---- the run -----------------------------------------------------------------------------


class _Demo:
    """One run, from the checks to the summary."""

    def __init__(self, plan: Plan, stop: threading.Event, began: float) -> None:
        from penstock.cli.demo_parts import Crew
        from penstock.cli.demo_view import Seen, Shopkeeper

        self._began = began
        self._plan = plan
        self._stop = stop
        self._seen: Seen = Seen()
        self._keeper: Shopkeeper = Shopkeeper(self._seen)
        self._crew: Crew = Crew(plan.data, plan.environment)
        self._bootstrap = plan.kafka or ""
        self._heard_address = threading.Event()
        self._warned = ""
        os.environ.update(plan.secrets)
        self._project = project.load(plan.data / project.FILE_NAME)
        from penstock.cli.sinks_file import declared

        self._specs: list[SinkSpec] = declared(self._project)

    def kill(self) -> None:
        """End all processes, wherever they are."""
        self._crew.kill_all()

    def run(self) -> bool:
        """Whether all that is derived is right at the end."""
        from penstock.cli.demo_view import Dashboard

        try:
            with Dashboard(self._seen, plain=self._plan.plain) as view:
                self._check(view)
                self._start_log(view)
                if not self._stop.is_set():
                    self._start_shop(view)
                found = self._trade(view)
            return self._finish(found)
        finally:
            self._crew.end_all(ORDER, _QUICK_STOP_S)

    # ---- the start -----------------------------------------------------------------------

    def _check(self, view: Dashboard) -> None:
        """What there is of an earlier demo is cleared, and the database is looked at."""
        view.stage(f"the shop is in {self._plan.data}")
        if self._plan.postgres is not None and not self._plan.keep:
            self._clear_postgres(self._plan.postgres)
        for spec in self._specs:
            if self._plan.redis is not None and spec.name == "cache":
                with spec.sink() as sink:
                    if not self._plan.keep:
                        sink.remove()
                    sink.position()
        self._crew.run_once("tables", self._shop_command("--only-tables"))
        if self._plan.postgres is not None:
            self._check_capture()

    def _check_capture(self) -> None:
        from penstock.capture.sources import open_source
        from penstock.cli.capture_project import configured

        with open_source(configured(self._project, "shop").source) as source:
            missing = [each for each in source.check() if not each.ok and each.required]
        if missing:
            raise PenstockError(
                f"the database cannot be captured: {missing[0].name}: {missing[0].found}",
                advice=missing[0].remedy,
            )

    def _clear_postgres(self, url: str) -> None:
        """What an earlier demo has left in the database: its schema, its slot."""
        from penstock.capture.sources import open_source
        from penstock.cli.capture_project import configured

        with open_source(configured(self._project, "shop").source) as source:
            source.remove()
        import psycopg

        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA IF EXISTS penstock_shop CASCADE")

    def _start_log(self, view: Dashboard) -> None:
        from penstock.cli.demo_parts import penstock

        if self._plan.kafka is None:
            view.stage("starting the log")
            self._crew.start("broker", self._broker_command(self._plan.listen), self._hear_address)
            if not self._crew.wait_ready("broker", self._heard_address.is_set, self._stop):
                return
            # At the same place, if it has to be started again.
            self._crew.again("broker", self._broker_command(self._bootstrap))
            # Commands of other terminals find it by the project file.
            file = self._plan.data / project.FILE_NAME
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(f'"{DEFAULT_LISTEN}"', f'"{self._bootstrap}"'), "utf-8")
        self._crew.run_once("topics", self._shop_command("--only-topics"))
        view.stage(f"the log is at {self._bootstrap}; capturing the database")
        self._crew.start("capture", penstock(
            "capture", "run", "shop", "--plain", "--beside", "--take-over",
            "--bootstrap", self._bootstrap,
        ))  # fmt: skip
        self._crew.wait_ready("capture", self._is_captured, self._stop)

    def _broker_command(self, listen: str) -> list[str]:
        from penstock.cli.demo_parts import penstock

        data = str(self._plan.data / "log")
        return penstock("up", "--data", data, "--listen", listen, "--quiet", "--no-captures")

    def _hear_address(self, text: str) -> None:
        if not self._heard_address.is_set():
            self._bootstrap = text.strip()
            self._heard_address.set()

    def _is_captured(self) -> bool:
        admin = connect(self._bootstrap, []).admin()
        return all(name in admin.list_topics(timeout=10).topics for name in CAPTURED)

    def _shop_command(self, *more: str) -> list[str]:
        command = [sys.executable, "shop.py", "--rate", str(self._plan.rate), *more]
        if self._plan.postgres is not None:
            # Not among the arguments, which anybody can see.
            command = [sys.executable, "-c", _WITH_SECRET, *command[1:]]
        return [*command, "--bootstrap", self._bootstrap] if self._bootstrap else command

    def _start_shop(self, view: Dashboard) -> None:
        from penstock.cli.demo_parts import penstock
        from penstock.spark.archive import is_made

        first = "" if is_made() else ", for the first time here: it takes a minute longer"
        view.stage(f"starting Spark on {self._plan.master}{first}; the shop opens")
        settings = {**parse_pairs(SMALL), **parse_pairs(self._plan.conf)}
        small = [part for pair in settings.items() for part in ("--conf", "=".join(pair))]
        self._crew.start("flows", penstock(
            "run", "flows.py", "--bootstrap", self._bootstrap, "--master", self._plan.master,
            *small, "--plain", "--report", "10s", "--tries", "30",
        ))  # fmt: skip
        self._crew.start("shop", self._shop_command(), self._keeper.hear)

    # ---- while it runs -------------------------------------------------------------------

    def _trade(self, view: Dashboard) -> list[Found]:
        """Until told to stop; then what the comparisons came to."""
        from penstock.cli.demo_parts import memory_bytes
        from penstock.cli.demo_view import Watcher

        if self._stop.is_set() or "flows" not in self._crew.parts:
            return []
        memory = lambda: memory_bytes([os.getpid()])  # noqa: E731
        end: float | None = None
        with Watcher(self._seen, self._plan.data, self._bootstrap, self._specs, memory,
                     self._began) as watcher:  # fmt: skip
            while not self._stop.is_set() and (end is None or time.monotonic() < end):
                self._look(watcher.is_running)
                if end is None and watcher.is_running and self._crew.parts["shop"].was_ready:
                    wanted = self._plan.seconds
                    end = float("inf") if wanted is None else time.monotonic() + wanted
                    view.stage("open; Ctrl-C closes it")
                view.show()
                self._stop.wait(_STEP_S)
            # Nothing is derived yet: there is nothing to wait for.
            return [] if end is None else self._drain(view, watcher)

    def _look(self, running: bool) -> None:
        if running and not self._crew.parts["flows"].is_ready:
            self._crew.ready("flows")
        if self._keeper.heard.is_set() and not self._crew.parts["shop"].is_ready:
            self._crew.ready("shop")
        for name in ("broker", "capture"):
            part = self._crew.parts.get(name)
            if part is not None and part.is_settled and not part.is_ready:
                self._crew.ready(name)
        for name in self._crew.look():
            if name == "shop":
                self._keeper.heard.clear()
                self._keeper.started()
            output.say(f"{name} had ended; it is started again and goes on where it was")
        self._pass_on_warnings()
        self._seen.restarts = self._crew.restarts

    def _pass_on_warnings(self) -> None:
        """A cluster that gives no executor is told of by the flows, in their log."""
        from penstock.cli.demo_parts import last_warning

        if any(each["progress"]["batches"] for each in self._seen.flows):
            return
        told = last_warning(self._crew.parts["flows"].log)
        if told and told != self._warned:
            self._warned = told
            output.warn(told)

    def _drain(self, view: Dashboard, watcher: Watcher) -> list[Found]:
        """Close the shop, and wait until everything that is derived is right."""
        view.stage("the shop closes; waiting for what is derived (Ctrl-C again ends all at once)")
        self._crew.stop("shop")
        self._keeper.closed()
        deadline = time.monotonic() + DRAIN_S
        found: list[Found] = []

        def is_right() -> bool:
            found[:] = self._compare()
            return all(each.is_equal for each in found)

        self._until(is_right, deadline, view, watcher)
        self._drain_flows(view, watcher)
        view.stage("verifying")
        return self._verified(found)

    def _drain_flows(self, view: Dashboard, watcher: Watcher) -> None:
        """Wait for the flows whose results are in no store, and for all results to be counted."""
        from penstock.cli.demo_drain import ends_at, unread
        from penstock.cli.demo_view import RESULTS

        view.stage("waiting for the flows")
        deadline = time.monotonic() + FLOWS_S
        inputs: dict[tuple[str, int], int] = {}
        results: dict[tuple[str, int], int] = {}
        behind: list[str] = []

        def is_read() -> bool:
            # The broker may have been killed, and be just coming back.
            with suppress(PenstockError):
                inputs.update(inputs or ends_at(self._bootstrap, (*CAPTURED, *EVENTS)))
            behind[:] = unread(self._plan.data, self._seen.flows, inputs)
            return bool(inputs) and not behind

        def is_counted() -> bool:
            with suppress(PenstockError):
                results.update(results or ends_at(self._bootstrap, RESULTS))
            return bool(results) and watcher.has_counted(results)

        if not self._until(is_read, deadline, view, watcher):
            told = f"of {', '.join(behind)}" if behind else "of the flows"
            output.warn(f"the results {told} are not complete: they had not read all of it "
                        f"{FLOWS_S:.0f} s after the shop had closed")  # fmt: skip
        self._until(is_counted, deadline, view, watcher)

    def _until(
        self, check: Callable[[], bool], deadline: float, view: Dashboard, watcher: Watcher
    ) -> bool:
        """Look after everything until something is so; False if it takes too long."""
        while True:
            if check():
                return True
            if time.monotonic() > deadline:
                return False
            self._look(watcher.is_running)
            view.show()
            threading.Event().wait(_STEP_S)

    def _compare(self) -> list[Found]:
        from penstock.cli.demo_check import compare

        return [compare(spec, self._plan.database) for spec in self._specs]

    def _verified(self, found: list[Found]) -> list[Found]:
        from penstock.cli.demo_check import verified

        postgres = self._plan.postgres is not None
        flows = self._plan.data / ".penstock" / "flows"
        return [verified(each, self._project, self._bootstrap, flows, postgres=postgres)
                for each in found]  # fmt: skip

    # ---- the end -------------------------------------------------------------------------

    def _finish(self, found: list[Found]) -> bool:
        if not found:
            # What has just begun is of no use; whatever it was at is done again at a next start.
            self._crew.end_all(ORDER, _EARLY_STOP_S)
            output.say(f"stopped before the shop was open; what there is, is in {self._plan.data}")
            # As a command that nobody had prepared for Ctrl-C ends.
            raise typer.Exit(output.EXIT_INTERRUPTED)
        for name in ORDER[1:]:
            if not self._crew.stop(name):
                output.warn(f"{name} did not stop in time, and was ended")
        self._summary(found)
        return all(each.is_equal for each in found)

    def _summary(self, found: list[Found]) -> None:
        seen = self._seen
        done: Mapping[str, int] = seen.done
        print(
            f"\n{done.get('insert', 0):,} inserts, {done.get('update', 0):,} updates, "
            f"{done.get('delete', 0):,} deletes; {done.get('click', 0):,} clicks, "
            f"{done.get('payment', 0):,} payments"
        )
        results = seen.results
        print(
            f"{results['shop.clicks.enriched']:,} clicks enriched, "
            f"{results['shop.carts.abandoned']:,} abandoned carts, "
            f"{results['shop.payments.suspicious']:,} suspicious payments, "
            f"{results['shop.searches.found']:,} finds of standing searches"
        )
        first = "none" if seen.first_s is None else f"{seen.first_s:.1f} s after the start"
        print(f"first result: {first}; most memory: {seen.memory / 1e9:.2f} GB\n")
        output.print_table(
            ("derived system", "store", "compared with", ">rows", "result"),
            ((each.sink, each.store, each.source, f"{each.rows:,}", each.verdict)
             for each in found),
        )  # fmt: skip
        print(f"\nall of it is in {self._plan.data}; penstock demo --keep goes on from there",
              flush=True)  # fmt: skip


# Runs shop.py with the database's URL from the environment.
_WITH_SECRET: Final = (
    "import os, runpy, sys; "
    f"sys.argv = [*sys.argv[1:], '--database', os.environ['{DATABASE}']]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
