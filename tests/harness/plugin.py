"""pytest's hooks of the harness; loaded by the `conftest.py` of the root."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.harness import costs, failures, needs, parallel
from tests.harness.profiles import PROFILE, Profile
from tests.harness.servers import RemoteServers, ServerHost, Servers, servers_key

folder_key = pytest.StashKey[Path]()
host_key = pytest.StashKey[ServerHost]()

# A loaded machine is slow, not wrong: time is bounded per test, not per example. Examples are
# random in every profile, in CI too; those that fail are kept for the second run.
settings.register_profile(
    "penstock",
    settings.get_profile("default"),
    deadline=None,
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
    named = os.environ.get(failures.RUN_VARIABLE)
    folder = Path(named) if named else Path(tempfile.mkdtemp(prefix="penstock-run-"))
    config.stash[folder_key] = folder
    config.stash[servers_key] = Servers()
    if PROFILE is Profile.CHECK:
        needs.hide_java()


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
    return parallel.run_loop(session, _begin_worker)


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
    replay = os.environ.get(failures.REPLAY_VARIABLE)
    if replay:
        failed = {outcome.nodeid for outcome in failures.read(Path(replay))}
        _leave_out(config, items, [item for item in items if item.nodeid not in failed])


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
    try:
        return (yield)
    finally:
        needs.GUARD.watch(None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the controller, which sees the reports of all workers."""
    folder = os.environ.get(failures.RUN_VARIABLE)
    if folder is None or os.environ.get(parallel.WORKER_VARIABLE):
        return
    if os.environ.get(failures.REPLAY_VARIABLE):
        failures.append(Path(folder) / failures.SECOND_FILE, failures.outcome_of(report))
    elif report.failed:
        failures.append(Path(folder) / failures.FIRST_FILE, failures.outcome_of(report))
