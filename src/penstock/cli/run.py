"""`penstock run`: run the flows of a file on Spark until told to stop."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer

from penstock.cli import output, project
from penstock.cli.kafka import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    ClientSettings,
    connect,
    is_given,
    project_of,
)
from penstock.cli.needs import need_sinks
from penstock.cli.old_rows import without_old_rows
from penstock.cli.sinks_file import declared
from penstock.cli.sinks_reach import must_reach_some
from penstock.cli.up import LOOPBACK, LogLevel, LogLevelOption
from penstock.cli.values import parse_address, parse_duration_ms, parse_pairs
from penstock.errors import ConfigError, PenstockError
from penstock.extras import require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.cli.run_cluster import Executors
    from penstock.cli.run_reach import BrokerWatch
    from penstock.cli.sinks_view import Together
    from penstock.sinks.spec import SinkSpec
    from penstock.spark.flows.declare import Collected
    from penstock.spark.flows.folder import Folder
    from penstock.spark.flows.manager import Manager
    from penstock.spark.flows.overseeing import Settings
    from penstock.spark.sinking.folder import SinkFolder
    from penstock.spark.sinking.manager import SinkManager

DEFAULT_DATA: Final = Path(".penstock") / "flows"
SINKS_DATA: Final = Path(".penstock") / "sinks"
_STEP_S: Final = 0.2

File = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]", help="A Python file that declares flows; not needed with --views."
    ),
]
Views = Annotated[
    bool, typer.Option("--views", help="Run the views of the project, `penstock view list`.")
]
Data = Annotated[
    Path,
    typer.Option(
        "--data",
        "-d",
        metavar="DIR",
        envvar="PENSTOCK_FLOWS",
        file_okay=False,
        help="Where flows keep how far they have come.",
    ),
]
Checkpoints = Annotated[
    str | None,
    typer.Option(
        "--checkpoints",
        metavar="URL",
        help="Where Spark keeps checkpoints, if not in --data: a store that all machines of the "
        "cluster can reach.",
    ),
]
Master = Annotated[
    str,
    typer.Option("--master", "-m", metavar="URL", envvar="PENSTOCK_MASTER",
                 help="The Spark to run on: local[*], spark://HOST:PORT, yarn, k8s://..."),
]  # fmt: skip
Only = Annotated[
    list[str],
    typer.Option("--only", "-o", metavar="NAME", help="Run only this flow. May be repeated."),
]
Once = Annotated[
    bool, typer.Option("--once", help="Stop when all that is there now has been read.")
]
SparkConf = Annotated[
    list[str],
    typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark. May be repeated."),
]
MetricsAt = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Serve metrics for Prometheus over HTTP there, at /metrics, and /healthz.",
    ),
]
Tries = Annotated[
    int,
    typer.Option("--tries", min=0, metavar="N", help="How often a flow is started again before it "
                 "is given up; a completed micro-batch begins the count anew."),
]  # fmt: skip
StopTimeout = Annotated[
    str,
    typer.Option("--stop-timeout", metavar="DURATION", help="How long a stop waits for the "
                 "micro-batch that runs, such as 30s or 5m."),
]  # fmt: skip
Report = Annotated[
    str,
    typer.Option("--report", metavar="DURATION", help="Without a terminal: how often to print "
                 "progress, such as 5s or 1m."),
]  # fmt: skip
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of the live table.")]
NoSinks = Annotated[
    bool, typer.Option("--no-sinks", help="Do not feed the sinks of the project file.")
]


def chosen_data(context: typer.Context, param: typer.CallbackParam, value: Path) -> Path:
    """The folder of a project's sinks, if nobody has given one: the same from everywhere below."""
    if is_given(context, param) or context.resilient_parsing:
        return value
    path = project_of(context) or project.find()
    if path is None or path.parent.resolve() == Path.cwd():
        return value
    return path.parent / value


SinksData = Annotated[
    Path,
    typer.Option(
        "--sinks-data",
        metavar="DIR",
        envvar="PENSTOCK_SINKS",
        file_okay=False,
        callback=chosen_data,
        help="Where it is kept which sinks are paused, and who runs them; in the folder of the "
        "project file, unless given.",
    ),
]


def run(
    file: File = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    views: Views = False,
    master: Master = "local[*]",
    data: Data = DEFAULT_DATA,
    checkpoints: Checkpoints = None,
    only: Only = [],  # noqa: B006
    once: Once = False,
    conf: SparkConf = [],  # noqa: B006
    metrics: MetricsAt = None,
    tries: Tries = 10,
    stop_timeout: StopTimeout = "60s",
    report: Report = "10s",
    plain: Plain = False,
    log_level: LogLevelOption = LogLevel.WARNING,
    no_sinks: NoSinks = False,
    sinks_data: SinksData = SINKS_DATA,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Run the flows of a file, and the views of the project, on Spark, until Ctrl-C or SIGTERM.

    Each flow runs by itself. One that fails is started again after a pause, unless trying
    again cannot help; then it stops, says why, and the others go on. A stop finishes the
    micro-batches that run. Everything is written exactly once, whatever happens in between: start
    the same file with the same --data again, and all flows go on where they were.

    Sinks that the project file declares (`[sinks.NAME]`) are fed beside the flows. The status is 0
    if no flow and no sink has failed for good, else 1. `penstock flows` and `penstock sinks` show
    and command them from another terminal.

    \b
    Examples:
      penstock run flows.py
      penstock run flows.py --once
      penstock run --views
      penstock run flows.py --only enriched --metrics 9645
      penstock run flows.py --bootstrap kafka-1:9092,kafka-2:9092
      penstock run flows.py --master spark://spark:7077 --checkpoints s3a://bucket/flows
    """
    need_spark()
    found = project.load()
    if not no_sinks and found.named("sinks"):
        need_sinks(found)
    from penstock.spark.flows.folder import Folder
    from penstock.spark.flows.load import NeedsSparkError
    from penstock.spark.flows.manager import Manager

    _log_to_stderr(log_level)
    settings = _settings(bootstrap, client, once=once, tries=tries, stop_timeout=stop_timeout,
                         file=file)  # fmt: skip
    every_s = seconds(report, "--report")
    address = parse_address(metrics, default_host=LOOPBACK) if metrics is not None else None
    try:
        known = _known(file, views=views)
        flows = chosen(known, only)
    except NeedsSparkError:
        # Read again when there is a session; most files, and most mistakes, are known before.
        known = None
    specs = [] if no_sinks else declared(found)
    connect(bootstrap, client)
    folder = Folder(data, checkpoints)
    with ExitStack() as stack:
        stack.enter_context(folder.locked())
        stack.enter_context(_warnings_in_lines())
        if specs:
            stack.enter_context(_locked(sinks_data))
        spark = _session(file, master, parse_pairs(conf), resident=1 if specs else 0)
        try:
            if log_level in {LogLevel.WARNING, LogLevel.ERROR}:
                # What a person needs of Spark's reports is in our errors, without the stacks.
                spark.sparkContext.setLogLevel("FATAL")
            if known is None:
                known = _known(file, views=views)
                flows = chosen(known, only)
            manager = Manager(spark, flows, folder, settings, known=known)
            manager.ask_old_rows = without_old_rows
            sinks = _sinks(spark, specs, sinks_data, settings, manager) if specs else None
            ok = _run(spark, manager, sinks, folder, address, plain=plain, every_s=every_s,
                      broker=_watch(bootstrap, once=once))  # fmt: skip
        finally:
            # Fails where Java is gone already, which was told.
            with suppress(Exception):
                spark.stop()
    if not ok:
        raise typer.Exit(output.EXIT_FAILURE)


def _settings(
    bootstrap: str,
    client: list[str],
    *,
    once: bool,
    tries: int,
    stop_timeout: str,
    file: Path | None = None,
) -> Settings:
    from penstock.spark.flows.overseeing import Settings
    from penstock.spark.flows.supervisor import Policy

    return Settings(
        bootstrap=bootstrap,
        options={f"kafka.{name}": value for name, value in parse_pairs(client).items()},
        once=once,
        policy=Policy(max_tries=tries),
        stop_timeout_s=seconds(stop_timeout, "--stop-timeout"),
        file=str(file.resolve()) if file is not None else "",
    )


def _log_to_stderr(level: LogLevel) -> None:
    logging.basicConfig(level=level.value.upper(), stream=sys.stderr, force=True,
                        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")  # fmt: skip
    quieten_spark()


@contextmanager
def _warnings_in_lines() -> Iterator[None]:
    """Show what flows warn of in a line each: Python would add its class and a line of code."""
    from penstock.spark.state.bounds import UnboundedStateWarning

    before = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, UnboundedStateWarning):
            output.warn(f"{filename}:{lineno}: {message}")
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _known(file: Path | None, *, views: bool) -> Collected:
    """The flows of the file, and those of the views, if they are wanted."""
    from penstock.spark.flows.declare import Collected
    from penstock.spark.flows.load import load

    found = list(load(file)) if file is not None else []
    if views:
        from penstock.cli import project
        from penstock.spark.views import definitions

        path = project.find()
        found += definitions.flows(path.resolve().parent if path is not None else Path.cwd())
    if not found:
        raise ConfigError(
            "there is nothing to run: " + ("the project has no views" if views else "no FILE"),
            advice="Name a Python file that declares flows, or make views with "
            "`penstock view create` and give --views.",
        )
    return Collected.of(found)


def run_sinks(
    specs: Sequence[SinkSpec],
    data: Path,
    *,
    bootstrap: str,
    master: str,
    once: bool,
    conf: list[str],
    metrics: str | None,
    tries: int,
    stop_timeout: str,
    report: str,
    plain: bool,
    log_level: LogLevel,
    client: list[str],
) -> None:
    """Feed sinks until told to stop, without flows."""
    _log_to_stderr(log_level)
    settings = _settings(bootstrap, client, once=once, tries=tries, stop_timeout=stop_timeout)
    every_s = seconds(report, "--report")
    address = parse_address(metrics, default_host=LOOPBACK) if metrics is not None else None
    connect(bootstrap, client)
    with _locked(data):
        must_reach_some(specs, data)
        spark = _session(None, master, parse_pairs(conf), resident=1)
        try:
            if log_level in {LogLevel.WARNING, LogLevel.ERROR}:
                spark.sparkContext.setLogLevel("FATAL")
            sinks = _sinks(spark, specs, data, settings)
            ok = _run(spark, None, sinks, None, address, plain=plain, every_s=every_s,
                      broker=_watch(bootstrap, once=once))  # fmt: skip
        finally:
            with suppress(Exception):
                spark.stop()
    if not ok:
        raise typer.Exit(output.EXIT_FAILURE)


def _locked(data: Path) -> AbstractContextManager[None]:
    from penstock.spark.sinking.folder import SinkFolder

    return SinkFolder(data).locked()


def _sinks(
    spark: SparkSession,
    specs: Sequence[SinkSpec],
    data: Path,
    settings: Settings,
    flows: Manager | None = None,
) -> tuple[SinkManager, SinkFolder]:
    from penstock.cli.sinks_alerts import SinkAlerts
    from penstock.spark.sinking.folder import SinkFolder
    from penstock.spark.sinking.manager import SinkManager

    folder = SinkFolder(data)
    if flows is not None:
        # Flows, and sinks after them, start in one order.
        settings = replace(settings, turns=flows.turns)
        made = SinkManager(spark, specs, folder, settings, flows.resolve, flows.make)
    else:
        made = SinkManager(spark, specs, folder, settings, flows_folder().resolve)
    made.on_alarm = SinkAlerts({each.name: each.alert_webhook for each in specs})
    return made, folder


def flows_folder() -> Folder:
    """What flows of this folder keep, for who reads their outputs: which version of them counts."""
    from penstock.spark.flows.folder import Folder

    return Folder(Path(os.environ.get("PENSTOCK_FLOWS") or DEFAULT_DATA))


def _watch(bootstrap: str, *, once: bool) -> BrokerWatch | None:
    from penstock.cli.run_reach import BrokerWatch

    return BrokerWatch(bootstrap) if once else None


def need_spark(what: str = "flows") -> None:
    """MissingExtraError if what flows are made of is not installed."""
    require(["spark"], what)


def quieten_spark() -> None:
    """Let Spark's Python side not write to stderr what the flow's own error says in a line."""
    from pyspark.logger import PySparkLogger

    # It tells of each call between Python and Java.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    # And of each micro-batch that has failed, with a stack trace: flows and sinks say why.
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)
    # They write each refused query with a stack trace, before anybody has asked for its reason.
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


def seconds(text: str, option: str) -> float:
    duration_ms = parse_duration_ms(text)
    if duration_ms is None:
        raise typer.BadParameter(f"{option}: {text!r} is not a duration such as 10s or 1m")
    return duration_ms / 1000


def chosen(flows: Collected, only: list[str]) -> Collected:
    """The flows that were asked for by name."""
    from penstock.spark.flows.errors import UnknownFlowError

    for name in only:
        if flows.named(name) is None:
            raise UnknownFlowError(
                f"the file has no flow {name!r}",
                advice=f"It has: {', '.join(each.name for each in flows)}.",
            )
    return type(flows)(each for each in flows if not only or each.name in only)


def _session(
    file: Path | None, master: str, conf: dict[str, str], *, resident: int = 0
) -> SparkSession:
    from penstock.cli.run_cluster import check_master
    from penstock.spark.session import RESIDENT_TASKS, session

    check_master(master)
    # Spark's workers import what stands beside the file too.
    beside = str(file.resolve().parent if file is not None else Path.cwd())
    paths = [beside, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    output.say(f"starting Spark on {master}")
    # Java keeps ignoring what it finds ignored. Whoever stops a service tells all of its processes,
    # and Java would be gone before the micro-batches are finished.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        # Two flows share the machine instead of waiting for each other.
        ours = {"spark.scheduler.mode": "FAIR", RESIDENT_TASKS: str(resident)}
        return session("penstock run", master, **ours | conf)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(
    spark: SparkSession,
    flows: Manager | None,
    sinks: tuple[SinkManager, SinkFolder] | None,
    folder: Folder | None,
    address: tuple[str, int] | None,
    *,
    plain: bool,
    every_s: float,
    broker: BrokerWatch | None,
) -> bool:
    """Run until all is over; whether all went well. With a `broker` to watch it is a run with an
    end."""
    from penstock.cli.run_cluster import executors_of
    from penstock.cli.run_metrics import MetricsServer
    from penstock.cli.run_view import View, kind_of
    from penstock.cli.sinks_view import Together
    from penstock.spark.flows.control import ControlServer

    manager = Together(flows, sinks[0] if sinks is not None else None,
                       once=broker is not None)  # fmt: skip
    with ExitStack() as stack:
        stack.callback(manager.close)
        if flows is not None and folder is not None:
            stack.enter_context(ControlServer(folder, flows.answer))
        if sinks is not None:
            stack.enter_context(ControlServer(sinks[1], sinks[0].answer))
        if address is not None:
            server = stack.enter_context(MetricsServer(*address, manager.status))
            output.say(f"metrics at {server.address}")
        view = stack.enter_context(View(plain=plain, every_s=every_s))
        manager.on_change = view.changed
        with _stopped_by_signals(manager):
            manager.start()
            names = ", ".join(f"{kind_of(each)} {each.name}" for each in manager.status())
            output.say(f"running {names}; Ctrl-C stops after the micro-batches")
            _look_on(manager, view, executors_of(spark), broker)
        view.finish(manager.status())
    if manager.broken is None:
        for each in manager.status():
            view.tell_failure(each)
    if manager.broken is not None:
        output.fail(PenstockError(manager.broken.message, advice=manager.broken.advice))
        if broker is not None and broker.is_away:
            _leave(spark)
        return False
    return not manager.failed


def _leave(spark: SparkSession) -> None:
    """End here: for a minute yet threads would wait for the broker, and Java tell of it."""
    java = getattr(spark.sparkContext._gateway, "proc", None)
    if java is not None:
        java.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(output.EXIT_FAILURE)


def _look_on(
    manager: Together, view: Any, executors: Executors | None, broker: BrokerWatch | None
) -> None:
    pause = threading.Event()
    while not manager.step():
        view.show(manager.status())
        if broker is not None and (gone := broker.look()) is not None:
            manager.give_up(gone)
        if executors is not None:
            executors.look()
        pause.wait(_STEP_S)
    view.show(manager.status())


@contextmanager
def _stopped_by_signals(manager: Together) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM stops after the micro-batch; the second at once."""
    asked: list[int] = []

    def stop(number: int, _: object) -> None:
        if asked:
            output.say("stopping at once; what was begun runs again at the next start")
            os._exit(128 + number)
        asked.append(number)
        output.say("stopping after the micro-batches; once more to stop at once")
        # Not here: the loop that this interrupts may hold what stopping needs.
        threading.Thread(target=manager.stop, name="flows-stop", daemon=True).start()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
