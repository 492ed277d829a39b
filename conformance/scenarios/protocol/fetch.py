"""What consumers are answered: records, fetch sessions, versions of requests."""

from __future__ import annotations

from functools import partial
from time import monotonic
from typing import Any

from conformance.scenario import scenario
from penstock.wire import encoder, request_header
from penstock.wire.messages.api_versions import ApiVersionsRequest
from tests.broker.protocol_client import ProtocolClient, error_name
from tests.broker.raw import RawClient
from tests.broker.requests import (
    batch,
    batch_of_size,
    delete_records,
    fetch,
    one,
    produce,
    records_of,
    values_of,
)


def fetched(client: ProtocolClient, request: Any, version: int = 12) -> Any:
    answer = client.call(request, version)
    if answer.error_code:
        return error_name(answer.error_code)
    part = one(answer)
    return (
        error_name(part.error_code),
        part.high_watermark,
        part.last_stable_offset,
        part.log_start_offset,
        [(r.offset, r.value) for r in records_of(part.records)],
    )


@scenario()
def fetching_from_every_offset(client: ProtocolClient) -> Any:
    """Offsets before the start and after the end are out of range; one inside a batch is not."""
    topic = client.topic()
    client.fill(topic, batch(b"a"), batch(b"b", b"c"), batch(b"d"))
    client.call(delete_records(topic, 1))
    return [fetched(client, fetch(topic, offset)) for offset in (0, 1, 2, 3, 4, 5, -1, 1 << 40)]


@scenario()
def fetching_unknown_partitions(client: ProtocolClient) -> Any:
    """A topic or partition that does not exist is an error of that partition."""
    topic = client.topic()
    return [
        fetched(client, fetch("nowhere")),
        fetched(client, fetch(topic, {7: 0})),
        fetched(client, fetch(topic, {-1: 0})),
    ]


@scenario()
def fetching_by_id(client: ProtocolClient) -> Any:
    """A topic is read by its id from version 13 on; an unknown id is an error of its own."""
    topic = client.topic()
    client.fill(topic, batch(b"a"))
    id_ = client.ids[topic]
    return (
        [fetched(client, fetch(id_), version) for version in (13, 14, 15, 16, 17, 18)],
        fetched(client, fetch(type(id_)(int=id_.int ^ 1)), 13),
        fetched(client, fetch(type(id_)(int=0)), 13),
    )


@scenario()
def leader_epochs_of_fetches(client: ProtocolClient) -> Any:
    """A consumer that knows a newer leader epoch than the broker is refused."""
    topic = client.topic()
    client.fill(topic, batch(b"a"))
    now = client.leader_epoch(topic)
    return [fetched(client, fetch(topic, leader_epoch=e)) for e in (-1, now, now + 1)]


@scenario()
def the_first_batch_is_returned_whole(client: ProtocolClient) -> Any:
    """The first batch is returned even if it exceeds the limits; further ones keep to them."""
    topic = client.topic()
    client.fill(topic, batch_of_size(500), batch_of_size(500), batch_of_size(500))
    sizes = []
    for partition_max, total_max in (
        (0, 1 << 20), (1, 1 << 20), (500, 1 << 20), (999, 1 << 20), (1000, 1 << 20),
        (1 << 20, 0), (1 << 20, 1), (1 << 20, 1000), (1 << 20, 1 << 20),
    ):  # fmt: skip
        request = fetch(topic, partition_max_bytes=partition_max, max_bytes=total_max)
        records = one(client.call(request, 12)).records
        # Kafka may cut the last batch in the middle; whole ones are what counts.
        sizes.append(len(values_of(records)))
    return sizes


@scenario()
def only_the_first_partition_exceeds_its_limit(client: ProtocolClient) -> Any:
    """The other partitions of the response keep within their limits."""
    topic = client.topic(2)
    for number in (0, 1):
        client.produced(produce(topic, {number: batch_of_size(500)}))
    answer = client.call(fetch(topic, {0: 0, 1: 0}, partition_max_bytes=10), 12)
    parts = sorted(answer.responses[0].partitions, key=lambda part: part.partition_index)
    return [len(values_of(part.records)) for part in parts]


@scenario()
def nothing_arrives_in_time(client: ProtocolClient) -> Any:
    """A fetch that waits in vain is answered without records and without an error."""
    topic = client.topic()
    return [fetched(client, fetch(topic, max_wait_ms=wait)) for wait in (0, 1, 50)]


@scenario()
def empty_records_and_aborted_transactions(client: ProtocolClient) -> Any:
    """No records are an empty string; aborted transactions are listed for read_committed only."""
    topic = client.topic()
    answers = []
    for level in (0, 1):
        part = one(client.call(fetch(topic, isolation_level=level), 12))
        answers.append((part.records, part.aborted_transactions))
    return answers


@scenario()
def a_fetch_without_topics(client: ProtocolClient) -> Any:
    """It is answered at once, however long it would wait, and opens no session."""
    begun = monotonic()
    answer = client.call(fetch(None, max_wait_ms=30_000), 12)
    in_time = monotonic() - begun < 15
    return error_name(answer.error_code), answer.responses, answer.session_id, in_time


# ---- sessions --------------------------------------------------------------------------------


def summary(answer: Any) -> Any:
    return error_name(answer.error_code), sorted(
        (part.partition_index, error_name(part.error_code), values_of(part.records))
        for topic in answer.responses
        for part in topic.partitions
    )


@scenario()
def a_session_from_beginning_to_end(client: ProtocolClient) -> Any:
    """A session reports what has changed, drops partitions, and is unknown once closed."""
    topic = client.topic(3)
    client.produced(produce(topic, {1: batch(b"a")}))
    story = []
    first = client.call(fetch(topic, dict.fromkeys(range(3), 0), session=(0, 0)), 12)
    id_ = first.session_id
    story.append((id_ != 0, summary(first)))
    for request in (
        fetch(None, session=(id_, 1)),
        fetch(topic, {1: 1}, session=(id_, 2)),
        fetch(None, session=(id_, 3)),
        fetch(None, session=(id_, 4), forget=[(topic, [0])]),
    ):
        answer = client.call(request, 12)
        story.append((answer.session_id == id_, summary(answer)))
    for number, value in ((0, b"unseen"), (2, b"seen")):
        client.produced(produce(topic, {number: batch(value)}))
    answer = client.call(fetch(None, session=(id_, 5)), 12)
    story.append((answer.session_id == id_, summary(answer)))
    closed = client.call(fetch(None, session=(id_, -1)), 12)
    story.append((closed.session_id, summary(closed)))
    after = client.call(fetch(None, session=(id_, 6)), 12)
    story.append((after.session_id, summary(after)))
    return story


@scenario()
def wrong_session_ids_and_epochs(client: ProtocolClient) -> Any:
    """They are refused, and the session goes on with the right epoch."""
    topic = client.topic()
    first = client.call(fetch(topic, session=(0, 0)), 12)
    id_ = first.session_id
    story = []
    for session in ((id_, 2), (id_ ^ 1, 1), (0, 1), (0, 5), (id_, 1), (id_, 1), (id_, 2)):
        answer = client.call(fetch(None, session=session), 12)
        story.append((error_name(answer.error_code), answer.session_id == id_))
    return story


@scenario()
def a_session_without_partitions_ends(client: ProtocolClient) -> Any:
    """When the last partition is forgotten, so is the session; nothing is waited for."""
    topic = client.topic()
    first = client.call(fetch(topic, session=(0, 0)), 12)
    id_ = first.session_id
    begun = monotonic()
    request = fetch(None, session=(id_, 1), forget=[(topic, [0])], max_wait_ms=30_000)
    emptied = client.call(request, 12)
    in_time = monotonic() - begun < 15
    after = client.call(fetch(None, session=(id_, 2)), 12)
    return emptied.session_id, summary(emptied), summary(after), in_time


@scenario()
def partitions_of_a_session_take_turns(client: ProtocolClient) -> Any:
    """A partition that was served goes to the end of the queue."""
    topic = client.topic(3)
    for number in range(3):
        client.fill_partition(topic, number, *(batch_of_size(500) for _ in range(4)))
    first = client.call(fetch(topic, dict.fromkeys(range(3), 0), session=(0, 0), max_bytes=600), 12)
    served = []
    for epoch in range(1, 7):
        # Where it reads on does not matter here: who is served does.
        answer = client.call(fetch(None, session=(first.session_id, epoch), max_bytes=600), 12)
        served.append(
            [p.partition_index for t in answer.responses for p in t.partitions if p.records]
        )
    return served


@scenario()
def a_session_is_replaced(client: ProtocolClient) -> Any:
    """A full fetch that names a session closes it and opens another."""
    topic = client.topic(2)
    first = client.call(fetch(topic, {0: 0, 1: 0}, session=(0, 0)), 12)
    second = client.call(fetch(topic, {1: 0}, session=(first.session_id, 0)), 12)
    third = client.call(fetch(None, session=(first.session_id, 1)), 12)
    return (
        second.session_id not in (0, first.session_id),
        summary(second),
        summary(third),
    )


@scenario()
def names_and_ids_in_one_session(client: ProtocolClient) -> Any:
    """A session keeps to names or to ids, as it began."""
    topic = client.topic()
    by_name = client.call(fetch(topic, session=(0, 0)), 12)
    by_id = client.call(fetch(client.ids[topic], session=(0, 0)), 13)
    return [
        error_name(client.call(fetch(None, session=(by_name.session_id, 1)), 13).error_code),
        error_name(client.call(fetch(None, session=(by_id.session_id, 1)), 12).error_code),
        error_name(client.call(fetch(None, session=(by_id.session_id, 1)), 13).error_code),
    ]


@scenario()
def errors_are_repeated_in_a_session(client: ProtocolClient) -> Any:
    """A partition with an error is reported in every response."""
    topic = client.topic()
    client.fill(topic, batch(b"a"))
    first = client.call(fetch(topic, {0: 0, 5: 0}, session=(0, 0)), 12)
    later = [client.call(fetch(None, session=(first.session_id, epoch)), 12) for epoch in (1, 2)]
    return [summary(answer) for answer in (first, *later)]


# ---- versions --------------------------------------------------------------------------------


@scenario()
def api_versions_too_new(client: ProtocolClient) -> Any:
    """A version of ApiVersions that is too new is answered in version 0, with the list."""

    def ask(connection: RawClient) -> Any:
        body = encoder(ApiVersionsRequest, 4)(ApiVersionsRequest(client_software_name="x"))
        connection.send_frame(request_header(18, 99, 7, "x") + body)
        frame = connection.receive_frame()
        # Version 0: correlation id, error code, then the list.
        return frame[:6], frame[6:10] != b"\0\0\0\0"

    return client.outcome_of(ask)


@scenario()
def client_names_in_api_versions(client: ProtocolClient) -> Any:
    """A name or version of the client software that is empty or malformed is refused."""
    answers = []
    for name, version in (("", ""), ("ok", "1.0"), ("-bad", "1"), ("ok", "b@d"), ("a b", "1")):
        request = ApiVersionsRequest(client_software_name=name, client_software_version=version)
        answers.append(client.outcome_of(partial(_asked_versions, request)))
    return answers


def _asked_versions(request: ApiVersionsRequest, connection: RawClient) -> str:
    return error_name(connection.call(request, 3).error_code)


@scenario()
def unknown_apis_and_versions(client: ProtocolClient) -> Any:
    """The connection is closed."""

    def ask(key: int, version: int) -> Any:
        def send(connection: RawClient) -> Any:
            connection.send_frame(request_header(key, version, 1, "x") + bytes(100))
            return connection.wait_closed()

        return client.outcome_of(send)

    return [ask(key, version) for key, version in ((1, 19), (1, 3), (2, 0), (3, 14), (999, 0))]
