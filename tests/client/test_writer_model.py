"""The writer against a model: random writes, commits and aborts, while everything fails.

Connections are cut at random bytes, both ways; the embedded broker also dies and comes back. In the
end each partition holds exactly what was committed, once and in the order of writing.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from penstock.client import topics
from penstock.client.reading import read_all
from penstock.client.writer import LogWriter
from penstock.testing.broker import Broker
from penstock.testing.tcp_proxy import TcpProxy
from tests.client.conftest import KEEP, unique
from tests.client.reader import Through
from tests.harness.profiles import WRITER_STEPS

PARTITIONS = 3


class Model:
    """What must be in the topic: by partition, what was committed, and what is still open."""

    def __init__(self) -> None:
        self.committed: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
        self.open: list[tuple[int, bytes]] = []
        self.count = 0

    def values(self, partition: int, count: int) -> list[bytes]:
        """New ones, that become part of what is open."""
        made = [b"%d" % number for number in range(self.count, self.count + count)]
        self.count += count
        self.open += [(partition, value) for value in made]
        return made

    def commit(self) -> None:
        for partition, value in self.open:
            self.committed[partition].append(value)
        self.open.clear()


def disturb(dice: random.Random, proxy: TcpProxy, crash: Callable[[], None] | None) -> None:
    what = dice.random()
    if what < 0.3:
        proxy.cut(reset=dice.random() < 0.5)
    elif what < 0.7:
        towards = dice.choice(["client", "server"])
        proxy.cut_after(
            dice.randrange(1, 5_000), towards="client" if towards == "client" else "server"
        )
        if dice.random() < 0.5:
            proxy.cut()
    elif crash is not None and what < 0.9:
        crash()


def run(
    dice: random.Random,
    proxy: TcpProxy,
    transactional_id: str | None,
    crash: Callable[[], None] | None,
) -> None:
    topic, model = unique("model"), Model()
    with Through(proxy) as cluster:
        topics.create(cluster, topic, partitions=PARTITIONS, config=KEEP)
        with LogWriter(
            cluster,
            transactional_id=transactional_id,
            codec=dice.choice(["none", "lz4", "zstd"]),
            batch_bytes=dice.choice([100, 1_000, 100_000]),
            linger_ms=dice.choice([0, 1, 1_000]),
        ) as writer:
            writer.begin()
            for _ in range(WRITER_STEPS):
                step = dice.random()
                if step < 0.6:
                    partition = dice.randrange(PARTITIONS)
                    values = model.values(partition, dice.choice([1, 3, 200]))
                    writer.write(topic, None, values, partition=partition)
                elif step < 0.7:
                    writer.flush()
                elif step < 0.8:
                    writer.commit()
                    model.commit()
                    writer.begin()
                elif step < 0.85 and transactional_id is not None:
                    writer.abort()
                    model.open.clear()
                    writer.begin()
                else:
                    disturb(dice, proxy, crash)
            writer.commit()
            model.commit()
        found: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
        for row in read_all(cluster, topic, settled=True):
            found[row.partition].append(row.value or b"")
    assert found == model.committed


@pytest.mark.parametrize("is_transactional", [False, True])
def test_connections_fail(bootstrap: str, seed: int, is_transactional: bool) -> None:
    dice = random.Random(seed)
    with TcpProxy(bootstrap) as proxy:
        run(dice, proxy, unique("txn") if is_transactional else None, None)


@pytest.mark.parametrize("is_transactional", [False, True])
def test_the_broker_fails(seed: int, is_transactional: bool) -> None:
    dice = random.Random(seed)
    with Broker() as broker, TcpProxy(broker.bootstrap) as proxy:

        def crash() -> None:
            broker.crash()
            broker.start()

        run(dice, proxy, unique("txn") if is_transactional else None, crash)
