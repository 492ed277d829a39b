"""`penstock migrate` killed, stopped and cut off in the middle, and cut over on request."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

from penstock.cli.kafka import Connection
from penstock.cli.migration import engine
from penstock.cli.migration.copier import Copier
from penstock.cli.migration.ends import End
from penstock.testing.apache_kafka import ApacheKafka
from penstock.testing.broker import Broker
from penstock.testing.process import BrokerProcess
from tests.cli import migrating
from tests.cli.migrating import (
    Command,
    Writer,
    clients,  # noqa: F401
    commit,
    committed,
    create,
    extent,
    fill,
    numbers,
    read,
    rows,
    short_waits,  # noqa: F401
    values,
)
from tests.cli.runner import Live, run, run_until
from tests.harness.profiles import MIGRATION_KILLS, MIGRATION_STOPS, some

PARTITIONS = 2


def count_of(bootstrap: str, topic: str) -> int:
    return sum(len(read(bootstrap, topic, number)) for number in range(PARTITIONS))


def test_killed_again_and_again_nothing_is_lost_or_twice(
    broker: Broker, apache_kafka: ApacheKafka, topic: str, seed: int
) -> None:
    chance = random.Random(seed)
    create(broker.bootstrap, topic, PARTITIONS)
    way = ("--from", broker.bootstrap, "--to", apache_kafka.bootstrap, "--topic", topic)
    # Small transactions, so that there is a middle to be killed in.
    how = ("--batch", "20", "--follow")
    with Writer(broker.bootstrap, topic, PARTITIONS) as writer:
        migrating.until(lambda: extent(broker.bootstrap, topic, PARTITIONS) > 200)
        there = 0
        for _ in range(MIGRATION_KILLS):
            with Command(*way, *how) as command:
                wanted = there + chance.randrange(1, 200)
                migrating.until(lambda: extent(apache_kafka.bootstrap, topic, PARTITIONS) >= wanted)  # noqa: B023
                command.kill()
            there = extent(apache_kafka.bootstrap, topic, PARTITIONS)
    commit(broker.bootstrap, f"g-{topic}", TopicPartition(topic, 1, 17))
    summary = run("migrate", *way, "--json").ok().json
    assert {part["verdict"] for part in summary["topics"][0]["partitions"]} == {"same"}
    for number in range(PARTITIONS):
        expected = rows(broker.bootstrap, topic, number)
        assert rows(apache_kafka.bootstrap, topic, number) == expected
    assert count_of(apache_kafka.bootstrap, topic) == writer.count
    # Offsets are translated across all the runs, each of which has left markers.
    place, _ = committed(apache_kafka.bootstrap, f"g-{topic}")[topic, 1]
    expected_values = values(broker.bootstrap, topic, 1, start=17)
    assert values(apache_kafka.bootstrap, topic, 1, start=place) == expected_values


@pytest.mark.parametrize(
    ("way", "batch", "target_is"),
    some(
        [
            ("stopped", 7, "apache"),
            ("killed", 1000, "penstock"),
            ("killed", 1000, "apache"),
            ("stopped", 1000, "penstock"),
            ("killed", 7, "penstock"),
        ],
        test=2,
    ),
)
def test_ended_inside_the_first_transaction(
    way: str,
    batch: int,
    target_is: str,
    broker: Broker,
    apache_kafka: ApacheKafka,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it wrote is aborted, by itself or by the next run, and takes offsets all the same."""
    create(broker.bootstrap, topic, 6)
    for number in range(6):
        fill(broker.bootstrap, topic, numbers(number * 100, 20), number)
    commit(broker.bootstrap, f"g-{topic}", *(TopicPartition(topic, n, 3 * n) for n in range(6)))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Broker() as other:
        target = apache_kafka.bootstrap if target_is == "apache" else other.bootstrap
        way_there = ("migrate", "--from", broker.bootstrap, "--to", target, "--topic", topic)
        with monkeypatch.context() as patch:
            patch.setattr(Copier, "_commit", interrupted)
            if way == "killed":
                patch.setattr(Copier, "close", lambda _: None)
            # The second time it is taken up and ended there again.
            for _ in range(2):
                assert run(*way_there, "--batch", str(batch)).status == 130
        assert extent(target, topic, 6, committed=False) > 0
        done = run(*way_there, "--batch", str(batch), "--json").ok().json
        assert done["records"] == 120
        assert {part["verdict"] for part in done["topics"][0]["partitions"]} == {"same"}
        for number in range(6):
            assert values(target, topic, number) == numbers(number * 100, 20)
            place, _ = committed(target, f"g-{topic}")[topic, number]
            expected = numbers(number * 100, 20)[3 * number :]
            assert values(target, topic, number, start=place) == expected
        assert run(*way_there, "--json").ok().json["records"] == 0


def test_stopped_again_and_again(
    broker: Broker, apache_kafka: ApacheKafka, topic: str, seed: int
) -> None:
    """Ctrl-C at any moment is status 130, and the next run goes on."""
    chance = random.Random(seed)
    create(broker.bootstrap, topic, 6)
    for number in range(6):
        fill(broker.bootstrap, topic, numbers(0, 2000), number)
    there = apache_kafka.bootstrap
    way = ("--from", broker.bootstrap, "--to", there, "--topic", topic, "--batch", "300")
    for _ in range(MIGRATION_STOPS):
        wanted = extent(there, topic, 6, committed=False) + chance.randrange(1, 2500)
        with Command(*way) as command:
            migrating.until(
                lambda: (
                    command.process.poll() is not None
                    or extent(there, topic, 6, committed=False) >= wanted  # noqa: B023
                )
            )
            command.interrupt()
            status, _, err = command.wait()
        assert status in (0, 130), err
    run("migrate", *way).ok()
    for number in range(6):
        assert values(there, topic, number) == numbers(0, 2000)


def test_what_is_copied_while_following_is_compared_then(
    broker: Broker, apache_kafka: ApacheKafka, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the cut-over only the rest is left to be compared."""
    monkeypatch.setattr(engine, "COMPARE_RECORDS", 1)
    monkeypatch.setattr(engine, "REFRESH_S", 0.0)
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, numbers(0, 50))
    source, target = (
        End(Connection(bootstrap, {}), what)
        for bootstrap, what in ((broker.bootstrap, "source"), (apache_kafka.bootstrap, "target"))
    )
    phases = Phases()
    options = engine.Options(topics=[topic], follow=True)
    migration = engine.Migration(source, target, options, phases)

    # What comes when so many have been compared, on both sides.
    coming = {100: numbers(50, 10), 120: numbers(60, 5)}

    def cut_over() -> bool:
        fill(broker.bootstrap, topic, coming.pop(phases.compared, []))
        return not coming

    migration.cut_over = cut_over
    summary = migration.run()
    assert summary.ok
    assert phases.totals[-1] == ("moving group offsets", None)
    assert ("verifying", 10) in phases.totals
    assert phases.totals[0:2] == [("copying", 50), ("verifying", 100)]
    assert values(apache_kafka.bootstrap, topic) == numbers(0, 65)


class Phases:
    """A reporter that keeps the phases, and how many records were compared."""

    def __init__(self) -> None:
        self.totals: list[tuple[str, int | None]] = []
        self.compared = 0

    def phase(self, name: str, total: int | None) -> None:
        self.totals.append((name, total))

    def advance(self, count: int) -> None:
        if self.totals[-1][0] == "verifying":
            self.compared += count

    def lag(self, records: int) -> None:
        """Nobody asks."""

    def note(self, text: str) -> None:
        raise AssertionError(text)


def test_following_until_the_cut_over(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic, PARTITIONS)
    there = apache_kafka.bootstrap
    writer = Writer(broker.bootstrap, topic, PARTITIONS)

    def look(_: Live) -> None:
        with writer:
            migrating.until(lambda: extent(there, topic, PARTITIONS) > 300)
        # Producers have stopped; now finish.

    way = ("--from", broker.bootstrap, "--to", there, "--topic", topic, "--follow", "--json")
    ran = run_until(look, "migrate", *way, stop=signal.SIGINT).ok()
    assert "finishing" in ran.err
    assert ran.json["ok"]
    assert ran.json["records"] == writer.count
    for number in range(PARTITIONS):
        expected = rows(broker.bootstrap, topic, number)
        assert rows(there, topic, number) == expected


@pytest.mark.processes
def test_the_target_dies_and_comes_back(broker: Broker, topic: str, tmp_path: Path) -> None:
    """The command goes on by itself: what was open is tried again, what was decided counts."""
    create(broker.bootstrap, topic, PARTITIONS)
    writer = Writer(broker.bootstrap, topic, PARTITIONS)
    with BrokerProcess(tmp_path / "data", durability="disk") as target:

        def look(_: Live) -> None:
            with writer:
                migrating.until(lambda: extent(target.bootstrap, topic, PARTITIONS) > 100)
                target.kill()
                target.start()
                migrating.until(lambda: extent(target.bootstrap, topic, PARTITIONS) > 500)

        way = ("--from", broker.bootstrap, "--to", target.bootstrap, "--topic", topic)
        how = ("--follow", "--batch", "20", "--json")
        ran = run_until(look, "migrate", *way, *how, stop=signal.SIGINT).ok()
        assert ran.json["records"] == writer.count
        for number in range(PARTITIONS):
            expected = rows(broker.bootstrap, topic, number)
            assert rows(target.bootstrap, topic, number) == expected
