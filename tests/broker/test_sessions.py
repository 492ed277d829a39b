"""Fetch sessions beyond what Apache Kafka is asked too: how many there are, and how they end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.broker.catalog import Catalog
from penstock.broker.config import BrokerConfig
from penstock.broker.fetch_sessions import FetchSessions, SessionError
from penstock.testing.broker import Broker
from penstock.testing.clock import ManualClock
from penstock.wire.errors import ErrorCode
from tests.broker.raw import RawClient
from tests.broker.requests import (
    batch,
    create,
    delete,
    delete_records,
    fetch,
    metadata,
    new_name,
    one,
    produce,
    values_of,
)

MAX_EPOCH = 0x7FFFFFFF


def begin(client: RawClient, topic: str) -> int:
    id_ = int(client.call(fetch(topic, session=(0, 0)), 12).session_id)
    assert id_ > 0
    return id_


def error_of(client: RawClient, session: tuple[int, int]) -> ErrorCode:
    return ErrorCode(client.call(fetch(None, session=session), 12).error_code)


def test_a_session_that_is_not_used_makes_room() -> None:
    clock = ManualClock()
    broker = Broker(clock=clock)
    broker.config = replace(
        broker.config, limits=replace(broker.config.limits, max_fetch_sessions=2)
    )
    with broker, RawClient(broker.bootstrap) as client:
        client.call(create("t"))
        first, second = begin(client, "t"), begin(client, "t")
        assert client.call(fetch("t", session=(0, 0)), 12).session_id == 0
        clock.advance(119_000)
        assert error_of(client, (first, 1)) == ErrorCode.NONE
        clock.advance(2_000)
        third = begin(client, "t")
        assert error_of(client, (second, 1)) == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        assert error_of(client, (first, 2)) == ErrorCode.NONE
        assert error_of(client, (third, 1)) == ErrorCode.NONE
        assert broker.call(lambda server: len(server.fetch_sessions)) == 2


def test_without_room_there_are_no_sessions() -> None:
    broker = Broker()
    broker.config = replace(
        broker.config, limits=replace(broker.config.limits, max_fetch_sessions=0)
    )
    with broker, RawClient(broker.bootstrap) as client:
        client.call(create("t"))
        client.call(produce("t", batch(b"x")), 12)
        answer = client.call(fetch("t", session=(0, 0)), 12)
        assert answer.session_id == 0
        assert values_of(one(answer).records) == [b"x"]


def test_a_session_belongs_to_whoever_knows_it(shared: Broker, topic: str) -> None:
    with RawClient(shared.bootstrap) as one_client, RawClient(shared.bootstrap) as other:
        id_ = begin(one_client, topic)
        assert error_of(other, (id_, 1)) == ErrorCode.NONE
        assert error_of(one_client, (id_, 1)) == ErrorCode.INVALID_FETCH_SESSION_EPOCH
        assert error_of(one_client, (id_, 2)) == ErrorCode.NONE


def test_moved_bounds_are_told(client: RawClient, topic: str) -> None:
    client.call(produce(topic, batch(b"a", b"b")), 12)
    id_ = client.call(fetch(topic, 2, session=(0, 0)), 12).session_id
    assert client.call(fetch(None, session=(id_, 1)), 12).responses == []
    client.call(delete_records(topic, 1))
    part = one(client.call(fetch(None, session=(id_, 2)), 12))
    assert (part.log_start_offset, part.high_watermark, part.records) == (1, 2, b"")
    assert client.call(fetch(None, session=(id_, 3)), 12).responses == []


def test_a_deleted_topic_can_be_forgotten(client: RawClient, topic: str) -> None:
    """Or its error would be told for as long as the session lasts."""
    other = new_name()
    client.call(create(other))
    ids = [told.topic_id for told in client.call(metadata(topic, other)).topics]
    session = client.call(fetch(ids[0], session=(0, 0)), 13).session_id
    client.call(fetch(ids[1], session=(session, 1)), 13)
    client.call(delete(topic))
    answer = client.call(fetch(None, session=(session, 2)), 13)
    assert one(answer).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    answer = client.call(fetch(None, session=(session, 3), forget=[(ids[0], [0])]), 13)
    assert (answer.error_code, answer.responses) == (0, [])
    answer = client.call(fetch(None, session=(session, 4), max_wait_ms=1), 13)
    assert (answer.error_code, answer.responses) == (0, [])


def test_epochs_go_round(tmp_path: object) -> None:
    catalog = Catalog(BrokerConfig(data=str(tmp_path)))
    sessions = FetchSessions(10)
    session = sessions.session_for(fetch("t", session=(0, 0)), 12, catalog)
    session.epoch = MAX_EPOCH
    again = sessions.session_for(fetch(None, session=(session.id, MAX_EPOCH)), 12, catalog)
    assert again is session
    with pytest.raises(SessionError):
        sessions.session_for(fetch(None, session=(session.id, MAX_EPOCH)), 12, catalog)
    # After the last comes the first, and not 0, which would begin anew.
    assert sessions.session_for(fetch(None, session=(session.id, 1)), 12, catalog) is session
