"""The brokers that scenarios run on, each for the whole run; a skipped scenario is a failed one.

Apache Kafka and its Java client come from the fixtures that all tests share. Without the jars the
scenarios fail: a green run means that both brokers were there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from penstock.testing.broker import Broker


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure."""
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a scenario may not be skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def embedded() -> Iterator[Broker]:
    """The embedded broker, with the durability that is the default outside of tests."""
    with Broker(durability="disk") as broker:
        yield broker
