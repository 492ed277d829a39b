"""Zombies: workers that were held, replaced, and let go again write and commit nothing any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from penstock.testing.broker import Broker
from penstock.testing.tcp_proxy import TcpProxy
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from tests.broker.raw import RawClient
from tests.broker.requests import create, one
from tests.broker.robustness.consumers_pipeline import PROTOCOLS, Pipeline
from tests.broker.transactions.raw_producer import RawProducer, read
from tests.harness.profiles import ZOMBIE_RECORDS

FENCED: Final = {
    ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_TXN_STATE,
}  # fmt: skip


@pytest.mark.processes
def test_a_worker_that_was_held_at_the_brink(tmp_path: Path, seed: int) -> None:
    """Stopped between its last write and its commit; its successor does the work meanwhile."""
    pipeline = Pipeline(tmp_path / "data", seed, total=ZOMBIE_RECORDS, protocol=PROTOCOLS[seed % 3])
    with pipeline.running() as scene:
        calm = {"abort_share": 0.0, "instance": ""}
        zombie = pipeline.start_worker(0, name="zombie", brink="commit", lives=1, **calm)
        pipeline.source.finish()
        scene.wait_for(lambda: zombie.counts["at the brink"] > 0, "it is about to commit")
        zombie.hold()
        pipeline.start_worker(0, name="successor", **calm)
        scene.wait_for(pipeline.is_done, "the successor has done all the work")
        zombie.let_go()
        zombie.say("go")
        scene.wait_for(lambda: zombie.counts["stopped"] > 0, "the zombie has given up")
        # It has tried, and it was told.
        assert zombie.counts["committing"] == 1
        assert zombie.counts["ended"] == 0
        assert len(zombie.troubles) == 1
        assert pipeline.is_done()
        scene.stop_children()
        pipeline.finish_transactions()
        pipeline.verify()
        assert pipeline.is_done()
        scene.stop_cleanly()


@pytest.mark.processes
def test_a_worker_whose_partitions_were_given_to_another(tmp_path: Path, seed: int) -> None:
    """Held before it commits its offsets. Nobody has taken its id, but its group has left it."""
    pipeline = Pipeline(tmp_path / "data", seed, total=ZOMBIE_RECORDS, protocol=PROTOCOLS[seed % 3])
    with pipeline.running() as scene:
        calm = {"abort_share": 0.0, "instance": ""}
        zombie = pipeline.start_worker(0, name="zombie", brink="offsets", **calm)
        pipeline.source.finish()
        scene.wait_for(lambda: zombie.counts["at the brink"] > 0, "it is about to commit")
        zombie.hold()
        pipeline.start_worker(1, name="heir", **calm)
        scene.wait_for(pipeline.is_done, "the heir has done all the work")
        zombie.let_go()
        zombie.say("go")
        scene.wait_for(lambda: zombie.counts["refused"] > 0, "the zombie was refused")
        assert zombie.counts["committing"] == 0
        scene.stop_children()
        pipeline.finish_transactions()
        pipeline.verify()
        assert pipeline.is_done()
        scene.stop_cleanly()


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(durability="disk") as own:
        yield own


def committed_offset(client: RawClient, group: str, topic: str) -> int:
    wanted = OffsetFetchRequestTopics(name=topic, partition_indexes=[0])
    asked = OffsetFetchRequestGroup(group_id=group, topics=[wanted])
    answer = client.call(OffsetFetchRequest(groups=[asked]), 8)
    return int(answer.groups[0].topics[0].partitions[0].committed_offset)


@pytest.mark.parametrize("form", ["older", "newer"])
@pytest.mark.parametrize("restart", [False, True], ids=["", "over a restart"])
def test_what_was_under_way_when_it_was_fenced(broker: Broker, form: str, restart: bool) -> None:
    """A batch is on its way, held by the network, when the successor takes over."""
    with TcpProxy(broker.bootstrap) as proxy, RawClient(proxy.address) as held:
        with RawClient(broker.bootstrap) as client:
            client.call(create("t"))
            zombie = RawProducer(held, "id", form)
            zombie.init()
            assert zombie.send("t", b"before") == ErrorCode.NONE
            assert zombie.send_offset("g", "t", 1) == ErrorCode.NONE
            proxy.pause()
            zombie.begin_send("t", b"late")
            successor = RawProducer(client, "id", form)
            assert not successor.init().error_code
            assert successor.send("t", b"good") == ErrorCode.NONE
            assert successor.send_offset("g", "t", 7) == ErrorCode.NONE
            assert successor.end() == ErrorCode.NONE
            proxy.resume()
            assert one(held.receive()).error_code in FENCED
        if restart:
            broker.restart()
        with RawClient(broker.bootstrap) as client, RawClient(proxy.address) as again:
            zombie.client = again
            assert zombie.send("t", b"later") in FENCED
            assert zombie.send("t", b"later", say_so=False) in FENCED
            assert zombie.send_offset("g", "t", 1) in FENCED
            assert zombie.send_offset("g", "t", 1, say_so=False) in FENCED
            for commit in (True, False):
                assert zombie.end(commit=commit) in FENCED
            assert read(client, "t") == [b"good"]
            # Not even those who read what is not committed see what it wrote too late.
            assert read(client, "t", committed=False) == [b"before", b"good"]
            assert committed_offset(client, "g", "t") == 7
