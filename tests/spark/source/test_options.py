"""Options: those of the connector, each checked, and each mistake named."""

from __future__ import annotations

import pytest

from penstock.spark.source.errors import OptionError
from penstock.spark.source.options import EARLIEST, LATEST, Options, parse

GOOD = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "orders"}


def stream(**given: str) -> Options:
    return parse(GOOD | given, streaming=True)


def batch(**given: str) -> Options:
    return parse(GOOD | given, streaming=False)


def test_what_is_left_out() -> None:
    read, table = stream(), batch()
    assert (read.start.everywhere, table.start.everywhere) == (LATEST, EARLIEST)
    assert table.end.everywhere == LATEST
    assert read.fail_on_data_loss
    assert not read.headers
    assert read.access.read_committed
    assert read.topics.names == ("orders",)


def test_names_are_known_in_any_case() -> None:
    given = {"KAFKA.bootstrap.SERVERS": "h:1", "Subscribe": "a, b ,a", "FAILONDATALOSS": "False"}
    options = parse(given, streaming=True)
    assert options.access.bootstrap == "h:1"
    assert options.topics.names == ("a", "b")
    assert not options.fail_on_data_loss


def test_offsets_as_the_connector_writes_them() -> None:
    start = stream(startingOffsets='{"a":{"0":23,"1":-1},"b":{"0":-2}}').start
    assert dict(start.places) == {("a", 0): 23, ("a", 1): LATEST, ("b", 0): EARLIEST}
    assert start.has_latest
    assert stream(startingOffsets=" Earliest ").start.everywhere == EARLIEST
    # A time goes before offsets, and a time for all before times of each.
    both = stream(startingOffsets="earliest", startingTimestamp="5")
    assert (both.start.everywhere, both.start.by_time) == (5, True)
    each = stream(startingOffsetsByTimestamp='{"orders":{"0":7}}').start
    assert (each.places, each.by_time) == (((("orders", 0), 7),), True)


def test_limits() -> None:
    options = stream(
        maxOffsetsPerTrigger="100",
        minOffsetsPerTrigger="10",
        maxTriggerDelay="30s",
        minPartitions="4",
        maxRecordsPerPartition="1000",
    )
    assert (options.max_offsets, options.min_offsets, options.max_delay_ms) == (100, 10, 30_000)
    assert (options.min_partitions, options.max_records) == (4, 1000)


def test_settings_of_a_consumer_that_mean_nothing_here_are_accepted() -> None:
    options = parse(
        GOOD | {"kafka.group.id": "g", "kafka.session.timeout.ms": "9", "groupIdPrefix": "p"},
        streaming=True,
    )
    assert options.access.bootstrap == "127.0.0.1:9092"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"startingOffset": "earliest"}, "Did you mean startingOffsets?"),
        ({"bootstrap.servers": "x:1"}, "kafka.bootstrap.servers"),
        ({"nonsense": "1"}, "there is no option 'nonsense'"),
        ({"kafka.nonsense": "1"}, "there is no consumer setting 'kafka.nonsense'"),
        ({"kafka.auto.offset.reset": "latest"}, "startingOffsets"),
        ({"kafka.enable.auto.commit": "true"}, "checkpoint"),
        ({"kafka.bootstrap.servers": "nowhere:x"}, "HOST:PORT"),
        ({"kafka.bootstrap.servers": " "}, "kafka.bootstrap.servers is not set"),
        ({"kafka.isolation.level": "dirty"}, "read_committed or read_uncommitted"),
        ({"subscribePattern": "x"}, "only one of"),
        ({"subscribe": " , "}, "subscribe names no topic"),
        ({"startingOffsets": "soon"}, "startingOffsets is 'soon'"),
        ({"startingOffsets": '{"a":{"0":-3}}'}, "-2 for earliest"),
        ({"startingOffsets": '{"a":{"x":3}}'}, "It should look like"),
        ({"startingOffsets": '{"a":{"0":true}}'}, "It should look like"),
        ({"startingTimestamp": "noon"}, "startingTimestamp is 'noon'"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "error or latest"),
        ({"maxOffsetsPerTrigger": "0"}, "from 1 on"),
        ({"minPartitions": "many"}, "minPartitions is 'many'"),
        ({"maxOffsetsPerTrigger": "1", "minOffsetsPerTrigger": "2"}, "larger than"),
        ({"maxTriggerDelay": "1 fortnight"}, "15m"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"endingOffsets": "latest"}, "has no meaning in a stream"),
    ],
)
def test_mistakes_of_streams(given: dict[str, str], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(GOOD | given, streaming=True)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"startingOffsets": "latest"}, "nothing to read"),
        ({"startingOffsets": '{"orders":{"0":-1}}'}, "nothing to read"),
        ({"endingOffsets": "earliest"}, "nothing to read"),
        (
            {"startingOffsets": '{"a":{"0":5}}', "endingOffsets": '{"a":{"0":4}}'},
            "a-0 begins at 5 and ends before it, at 4",
        ),
        (
            {"startingOffsets": '{"a":{"0":5}}', "endingOffsets": '{"a":{"1":9}}'},
            "different partitions",
        ),
    ],
)
def test_mistakes_of_tables(given: dict[str, str], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(GOOD | given, streaming=False)
    assert says in str(caught.value)


def test_one_of_three_ways_to_name_topics() -> None:
    server = {"kafka.bootstrap.servers": "h:1"}
    assigned = parse(server | {"assign": '{"a":[0,2]}'}, streaming=True)
    assert assigned.topics.assigned == {("a", 0), ("a", 2)}
    pattern = parse(server | {"subscribePattern": "a.*"}, streaming=True)
    assert pattern.topics.pattern == "a.*"
    for wrong in ({}, {"assign": "a"}, {"assign": "{}"}, {"subscribePattern": "("}):
        with pytest.raises(OptionError):
            parse(server | wrong, streaming=True)


def test_tls_and_passwords_are_passed_on() -> None:
    options = parse(
        GOOD
        | {
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required "
                'username="alice" password="secret";'
            ),
            "kafka.ssl.ca.location": "/ca.pem",
        },
        streaming=True,
    )
    security = options.access.security
    assert security is not None
    assert (security.protocol, security.username) == ("SASL_SSL", "alice")
    assert "secret" not in repr(options)
    with pytest.raises(OptionError, match="PEM"):
        parse(
            GOOD
            | {
                "kafka.security.protocol": "SSL",
                "kafka.ssl.truststore.location": "store.jks",
                "kafka.ssl.truststore.type": "JKS",
            },
            streaming=True,
        )
