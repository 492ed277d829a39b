"""Share groups whose consumers and broker die: what was acknowledged never comes again.

`make proof` does it for longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.server import Broker as Server
from penstock.broker.shares.partition import DYING
from penstock.testing.broker import Broker
from tests.broker.raw import RawClient
from tests.broker.requests import create
from tests.broker.robustness.consumers_queue import QueueTest
from tests.broker.shares.members import ACCEPT, REJECT, Taker, fill, new_queue
from tests.broker.waits import wait_until
from tests.harness.profiles import CONSUMER_FAULTS, SHARED_RECORDS


@pytest.mark.processes
def test_nothing_acknowledged_comes_again(tmp_path: Path, seed: int) -> None:
    test = QueueTest(tmp_path / "data", seed, total=SHARED_RECORDS, ordered=seed % 2 == 1)
    test.run(CONSUMER_FAULTS)
    print(test.report())


def test_a_record_that_may_come_back_has_no_dead_letter_yet() -> None:
    """Rejected, and the broker dies before that is safe: it is accepted by another instead."""
    with Broker(durability="disk") as broker:
        with RawClient(broker.bootstrap) as client:
            client.call(create("dead"))
        topic, group = new_queue(broker, errors_deadletterqueue_topic_name="dead")
        fill(broker, topic, b"0")
        with Taker(broker, group, topic) as taker:
            assert taker.fetch().offsets == [0]
            broker.call(_without_rounds)
            taker.send([(0, 0, REJECT)])
            wait_until(broker, lambda server: _dying(server, group) == 1)
            # Enough for a letter to be written, if it were to be.
            for number in range(20):
                fill(broker, topic, b"%d" % number)
            broker.crash()
        broker.start()
        with Taker(broker, group, topic) as taker:
            assert 0 in taker.fetch().offsets
            assert taker.acknowledge((0, 0, ACCEPT)) == "NONE"
        assert broker.call(lambda server: _log_end(server, "dead")) == 0


def _without_rounds(server: Server) -> None:
    """What is answered from now on does not get to the journal."""
    server.queues.rounds._write = lambda: None  # type: ignore[method-assign]


def _dying(server: Server, group: str) -> int:
    return server.coordination.shares.queues_of(group)[0].share.sizes[DYING]


def _log_end(server: Server, topic: str) -> int:
    partition = server.partition(topic, 0)
    assert partition is not None
    return partition.log_end
