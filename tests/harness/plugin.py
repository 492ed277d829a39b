"""pytest's hooks of the harness; loaded by the `conftest.py` of the root."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.harness import clients, costs, failures, needs, parallel, seeds, terminal
from tests.harness.profiles import PROFILE, Profile, examples
from tests.harness.servers import RemoteServers, ServerHost, Servers, servers_key

folder_key = pytest.StashKey[Path]()
host_key = pytest.StashKey[ServerHost]()
# The id of the one test that is run once more.
replay_key = pytest.StashKey[str | None]()

# A loaded machine is slow, not wrong: time is bounded per test, not per example. Examples are
# random in every profile, in CI too; those that fail are kept for the second run.
settings.register_profile(
    "penstock",
    settings.get_profile("default"),
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
)
settings.load_profile("penstock")


def pytest_addoption(parser: pytest.Parser) -> None:
    parallel.options(parser)
    parser.addoption(
        "--costs",
        type=int,
        default=0,
        metavar="N",
        help="show the N tests that cost most processor time",
    )


def pytest_configure(config: pytest.Config) -> None:
    terminal.keep()
    # A pytest that a test starts is none of this run.
    named = os.environ.pop(failures.RUN_VARIABLE, None)
    replay = config.stash[replay_key] = os.environ.pop(failures.REPLAY_VARIABLE, None)
    folder = Path(named) if named else Path(tempfile.mkdtemp(prefix="penstock-run-"))
    if not named:
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.stash[folder_key] = folder
    servers = config.stash[servers_key] = Servers()
    config.pluginmanager.register(
        _Results(servers, folder if named else None, replay is not None), "penstock-results"
    )
    if PROFILE is Profile.CHECK:
        needs.hide_java()


def pytest_report_header() -> str:
    return f"seed: {seeds.run_seed()}; to repeat the run: {seeds.RUN_VARIABLE}={seeds.run_seed()}"


def pytest_unconfigure(config: pytest.Config) -> None:
    host = config.stash.get(host_key, None)
    if host is not None:
        host.close()
    servers = config.stash.get(servers_key, None)
    if servers is not None:
        servers.close()


# ---- workers ---------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In several processes, if that is asked for."""
    stash = session.config.stash
    servers = stash[servers_key]
    assert isinstance(servers, Servers)
    stash[host_key] = ServerHost(servers, stash[folder_key])
    # What is run once more may end its process or never end.
    alone = stash[replay_key] is not None
    return parallel.run_loop(session, stash[folder_key], _begin_worker, always=alone)


def _begin_worker(config: pytest.Config) -> None:
    # The controller owns the servers.
    config.stash[servers_key] = RemoteServers(config.stash[host_key].address)
    name = os.environ[parallel.WORKER_VARIABLE]
    costs.start(config, name, config.stash[folder_key] / costs.FILE)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    count = config.getoption("costs")
    if count:
        terminalreporter.section("processor time, time, test")
        for line in costs.report(config.stash[folder_key] / costs.FILE, count):
            terminalreporter.line(line)


# ---- which tests -----------------------------------------------------------------------------


# Before pytest selects by marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs.add_marks(items)
    if PROFILE is not Profile.PROOF:
        # Their budgets are those of another profile.
        _leave_out(config, items, [item for item in items if item.get_closest_marker("proof")])
    replay = config.stash[replay_key]
    if replay is not None:
        _leave_out(config, items, [item for item in items if item.nodeid != replay])


def _leave_out(
    config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]
) -> None:
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def pytest_collection_finish() -> None:
    # Modules and tests stay: to look at them in every collection costs 0.2 s each time.
    gc.collect()
    gc.freeze()


# ---- while they run --------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    needs.GUARD.watch(item)
    seeds.seed_hypothesis(seeds.seed_of(item.nodeid))
    try:
        return (yield)
    finally:
        needs.GUARD.watch(None)
        clients.COLLECTOR.look()


class _Results:
    """Keeps the results of all workers, in the controller."""

    def __init__(self, servers: Servers, folder: Path | None, is_second_run: bool) -> None:
        self._servers = servers
        self._folder = folder
        self._is_second_run = is_second_run
        self._ended = 0
        self._is_collected = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._is_collected = self._is_collected and not report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if os.environ.get(parallel.WORKER_VARIABLE):
            return
        self._ended += report.when == "teardown"
        if report.failed:
            report.sections += [("Shared servers", text) for text in self._servers.dead()]
        if self._folder is None:
            return
        if self._is_second_run:
            failures.append(self._folder / failures.SECOND_FILE, failures.outcome_of(report))
        elif report.failed:
            failures.append(self._folder / failures.FIRST_FILE, failures.outcome_of(report))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._folder is None or self._is_second_run:
            return
        if self._is_collected and self._ended == len(session.items):
            (self._folder / failures.COMPLETE_FILE).touch()
