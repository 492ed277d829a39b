"""pytest's hooks of the harness; loaded by the `conftest.py` of the root."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.harness import failures, needs, schedule
from tests.harness.profiles import PROFILE, Profile
from tests.harness.servers import RemoteServers, ServerHost, Servers, servers_key

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

SERVERS_INPUT: Final = "penstock_servers"
FOLDER_INPUT: Final = "penstock_folder"

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


def worker_input(config: pytest.Config) -> dict[str, Any] | None:
    """What the controller gave to this worker; None in a process that is no worker."""
    return getattr(config, "workerinput", None)


def pytest_configure(config: pytest.Config) -> None:
    given = worker_input(config)
    if given is not None:
        config.stash[folder_key] = Path(given[FOLDER_INPUT])
        config.stash[servers_key] = RemoteServers(given[SERVERS_INPUT])
    else:
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


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Tell a worker where the run's folder and servers are."""
    stash = node.config.stash
    if host_key not in stash:
        servers = stash[servers_key]
        assert isinstance(servers, Servers)
        stash[host_key] = ServerHost(servers, stash[folder_key])
    node.workerinput[SERVERS_INPUT] = stash[host_key].address
    node.workerinput[FOLDER_INPUT] = str(stash[folder_key])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> schedule.LaneScheduling:
    return schedule.LaneScheduling(config, log, config.stash[folder_key])


# ---- which tests -----------------------------------------------------------------------------


# Before pytest selects by marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs.add_marks(items)
    replay = os.environ.get(failures.REPLAY_VARIABLE)
    if replay:
        failed = {outcome.nodeid for outcome in failures.read(Path(replay))}
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in failed])
        items[:] = [item for item in items if item.nodeid in failed]


# Before the worker reports to the controller that it has collected.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    given = worker_input(session.config)
    if given is not None and given["workerid"] == "gw0":
        schedule.write_plan(session.items, session.config.stash[folder_key])


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
    if folder is None or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    if os.environ.get(failures.REPLAY_VARIABLE):
        failures.append(Path(folder) / failures.SECOND_FILE, failures.outcome_of(report))
    elif report.failed:
        failures.append(Path(folder) / failures.FIRST_FILE, failures.outcome_of(report))
