"""What transactional producers are answered.

Kafka carries out an end in the background and says CONCURRENT_TRANSACTIONS meanwhile; there it is
asked again, as every client does. Penstock answers when it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Final
from uuid import uuid4

from conformance.scenario import scenario
from penstock.broker.transactions.state import Ids
from penstock.records import record
from penstock.records.batch import headers
from penstock.records.record import BatchOptions
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
)
from penstock.wire.messages.describe_transactions import DescribeTransactionsRequest
from penstock.wire.messages.find_coordinator import FindCoordinatorRequest
from penstock.wire.messages.init_producer_id import InitProducerIdRequest
from penstock.wire.messages.list_transactions import ListTransactionsRequest
from tests.broker.protocol_client import READY_TIMEOUT_S, ProtocolClient, error_name
from tests.broker.requests import batch, fetch, now_ms, one, produce
from tests.broker.transactions.raw_producer import RawProducer

INIT_VERSION: Final = 5
NOT_YET: Final = frozenset(
    {
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
    }
)


def new_id() -> str:
    return f"txn-{uuid4().hex[:10]}"


def settled(ask: Callable[[], int]) -> str:
    """The error's name, once the broker has come to an answer."""
    deadline = monotonic() + READY_TIMEOUT_S
    while (code := ask()) in NOT_YET:
        assert monotonic() < deadline, error_name(code)
    return error_name(code)


def init(producer: RawProducer, version: int = INIT_VERSION, **asked: Any) -> Any:
    """The error's name and the epoch."""
    answers: list[Any] = []

    def ask() -> int:
        answers.append(producer.init(version=version, **asked))
        return int(answers[-1].error_code)

    return settled(ask), answers[-1].producer_epoch


def fresh(client: ProtocolClient, form: str = "newer", name: str | None = None) -> RawProducer:
    """A producer that has asked for nothing yet, of an id that is coordinated."""
    name = name or new_id()
    # Kafka makes the topics of groups and transactions when they are first asked for.
    for kind, key in enumerate(("g", name)):
        request = FindCoordinatorRequest(key_type=kind, coordinator_keys=[key])
        assert settled(lambda r=request: client.call(r, 4).coordinators[0].error_code) == "NONE"  # type: ignore[misc]
    return RawProducer(client.connection, name, form)


def started(client: ProtocolClient, form: str = "newer", name: str | None = None) -> RawProducer:
    producer = fresh(client, form, name)
    assert init(producer)[0] == "NONE"
    return producer


def end(producer: RawProducer, *, commit: bool = True, version: int | None = None) -> str:
    return settled(lambda: producer.end(commit=commit, version=version))


def ended(producer: RawProducer, *, commit: bool) -> tuple[str, int]:
    return end(producer, commit=commit), producer.ids.epoch


def send(producer: RawProducer, topic: str, **how: Any) -> str:
    return settled(lambda: producer.send(topic, b"x", **how))


def wait_for_state(producer: RawProducer, state: str) -> None:
    deadline = monotonic() + READY_TIMEOUT_S
    while producer.describe().transaction_state != state:
        assert monotonic() < deadline, producer.describe()


# ---- beginning ---------------------------------------------------------------------------


@scenario()
def bad_timeouts(client: ProtocolClient) -> Any:
    """Neither 0, nor negative, nor more than 15 minutes."""
    producer = started(client)
    return [init(producer, timeout_ms=t)[0] for t in (0, -1, 900_000, 900_001)]


@scenario()
def epochs_of_one_id(client: ProtocolClient) -> Any:
    """Each producer that starts with a transactional id gets the next epoch."""
    producer = fresh(client)
    return [init(producer) for _ in range(3)]


@scenario()
def a_producer_names_its_last_epoch(client: ProtocolClient) -> Any:
    """It may ask for the next epoch, and repeat that; an older epoch is fenced."""
    producer = started(client)
    first = producer.ids
    answers = [init(producer, expected=first), init(producer, expected=first)]
    second = producer.ids
    stranger = Ids(first.producer_id + 1_000_000, first.epoch)
    answers += [init(producer, expected=stranger), init(producer, 3, expected=stranger)]
    answers += [init(producer, expected=second), init(producer)]
    answers += [init(producer, expected=second), init(producer, 3, expected=second)]
    return answers


@scenario()
def a_new_id_with_an_old_producer_id(client: ProtocolClient) -> Any:
    """An unknown transactional id starts with epoch 0, whatever it names."""
    return init(fresh(client), expected=Ids(1_000_000, 5))


@scenario()
def a_producer_id_without_its_epoch(client: ProtocolClient) -> Any:
    """Refused, and an epoch without its id."""
    producer = fresh(client)
    return [init(producer, expected=Ids(*ids)) for ids in ((5, -1), (-1, 5))]


# ---- strangers and zombies ---------------------------------------------------------------


def codes_of_everything(client: ProtocolClient, producer: RawProducer, topic: str) -> Any:
    """What a producer is answered to each request, in older and newer versions."""
    codes: list[Any] = []
    asks: list[tuple[str, int, Callable[[], int]]] = []
    for version in (0, 1, 2, 3):
        asks.append(("add", version, partial(producer.add, topic, 0, version=version)))
        asks.append(("group", version, partial(producer.add_group, "g", version=version)))
        asks.append(("end", version, partial(producer.end, version=version)))
    asks.append(("end", 5, partial(producer.end, version=5)))
    codes += [(what, version, settled(ask)) for what, version, ask in asks]
    for version in (9, 10, 11, 12):
        producer.produce_version = version
        codes.append(("produce", version, send(producer, topic, say_so=False)))
    for version in (2, 3, 4, 5):
        producer.offsets_version = version
        answer = settled(lambda: producer.send_offset("g", topic, 1, say_so=False))
        codes.append(("offsets", version, answer))
    return codes


@scenario()
def an_unknown_transactional_id(client: ProtocolClient) -> Any:
    """Every request fails, in all versions, because the producer id does not belong to it."""
    topic = client.topic()
    producer = fresh(client)
    producer.ids = Ids(1_000_000, 0)
    return codes_of_everything(client, producer, topic)


@scenario()
def a_foreign_producer_id(client: ProtocolClient) -> Any:
    """Every request fails if the producer id belongs to another transactional id."""
    topic, producer = client.topic(), started(client)
    producer.ids = Ids(producer.ids.producer_id + 1_000_000, 0)
    return codes_of_everything(client, producer, topic)


@scenario()
def a_zombie(client: ProtocolClient) -> Any:
    """A producer whose epoch is over is fenced by every request."""
    topic, zombie = client.topic(), started(client)
    started(client, name=zombie.name)
    return codes_of_everything(client, zombie, topic)


@scenario()
def an_epoch_from_the_future(client: ProtocolClient) -> Any:
    """An epoch that was never given is fenced like an old one."""
    topic, producer = client.topic(), started(client)
    producer.ids = Ids(producer.ids.producer_id, producer.ids.epoch + 1)
    return codes_of_everything(client, producer, topic)


@scenario()
def an_empty_transactional_id(client: ProtocolClient) -> Any:
    """Refused."""
    topic, producer = client.topic(), started(client)
    producer.name = ""
    return [
        settled(lambda: producer.add(topic, 0)),
        settled(lambda: producer.add_group("g")),
        end(producer),
    ]


@scenario()
def an_open_transaction_is_aborted_by_the_successor(client: ProtocolClient) -> Any:
    topic, first = client.topic(), started(client)
    sent = send(first, topic)
    second = started(client, name=first.name)
    state = second.describe().transaction_state
    return sent, state, second.ids.epoch > first.ids.epoch + 1, end(first), send(first, topic)


# ---- writing -----------------------------------------------------------------------------


@scenario()
def writes_to_partitions_that_were_not_added(client: ProtocolClient) -> Any:
    """Fatal up to Produce version 10; since 11 the error asks for an abort."""
    topic = client.topic()
    answers = []
    for version in (9, 10, 11):
        producer = started(client, "older")
        producer.produce_version = version
        answers.append(send(producer, topic, say_so=False))
    return answers


@scenario()
def offsets_of_groups_that_were_not_added(client: ProtocolClient) -> Any:
    """Fatal up to TxnOffsetCommit version 3; since 4 the error asks for an abort."""
    topic = client.topic()
    answers = []
    for version in (2, 3, 4):
        producer = started(client, "older")
        producer.offsets_version = version
        answers.append(settled(partial(producer.send_offset, "g", topic, 1, say_so=False)))
    return answers


@scenario()
def unknown_partitions(client: ProtocolClient) -> Any:
    """If one partition cannot be added, none is."""
    topic, producer = client.topic(), started(client, "older")
    request = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=producer.name,
        v3_and_below_producer_id=producer.ids.producer_id,
        v3_and_below_producer_epoch=producer.ids.epoch,
        v3_and_below_topics=[
            AddPartitionsToTxnTopic(name=topic, partitions=[0, 7]),
            AddPartitionsToTxnTopic(name="not-there", partitions=[0]),
        ],
    )
    results = client.call(request, 3).results_by_topic_v3_and_below
    codes = {
        (item.name == topic, part.partition_index): error_name(part.partition_error_code)
        for item in results
        for part in item.results_by_partition
    }
    return codes, producer.describe().transaction_state


def transactional(ids: Ids) -> bytes:
    options = BatchOptions(
        producer_id=ids.producer_id, producer_epoch=ids.epoch, base_sequence=0, transactional=True
    )
    return record.simple_batch([b"x"], timestamp_ms=1_700_000_000_000, options=options)


@scenario()
def transactional_records_without_an_id(client: ProtocolClient) -> Any:
    """Refused."""
    topic, producer = client.topic(), started(client)
    return error_name(one(client.call(produce(topic, transactional(producer.ids)), 12)).error_code)


@scenario()
def plain_records_with_an_id(client: ProtocolClient) -> Any:
    """Taken."""
    topic, producer = client.topic(), started(client)
    request = produce(topic, batch(b"plain"), transactional_id=producer.name)
    return error_name(one(client.call(request, 12)).error_code)


@scenario()
def plain_records_in_an_open_transaction(client: ProtocolClient) -> Any:
    """Refused."""
    topic, producer = client.topic(), started(client)
    sent = send(producer, topic)
    plain = batch(b"plain", producer=(*producer.ids, 1))
    answer = one(client.call(produce(topic, plain), 12))
    return sent, error_name(answer.error_code)


# ---- ending ------------------------------------------------------------------------------


@scenario()
def the_older_form_without_a_transaction(client: ProtocolClient) -> Any:
    """Neither commit nor abort is possible."""
    producer = started(client, "older")
    return ended(producer, commit=True), ended(producer, commit=False)


@scenario()
def the_newer_form_without_a_transaction(client: ProtocolClient) -> Any:
    """Abort gives a new epoch, commit is refused."""
    producer = started(client)
    answers = [ended(producer, commit=commit) for commit in (True, False, False, True)]
    topic = client.topic()
    answers.append((send(producer, topic), 0))
    answers += [ended(producer, commit=commit) for commit in (True, True, False)]
    return answers


@scenario()
def ends_in_the_older_form_are_repeated(client: ProtocolClient) -> Any:
    """The same end succeeds again, the other one is refused."""
    topic, producer = client.topic(), started(client, "older")
    answers = []
    for commit in (True, False):
        answers += [send(producer, topic), ended(producer, commit=commit)]
        answers += [ended(producer, commit=commit), ended(producer, commit=not commit)]
    return answers


@scenario()
def ends_in_the_newer_form_are_repeated(client: ProtocolClient) -> Any:
    """The same end succeeds again, with the same new epoch; the other one is refused."""
    topic, producer = client.topic(), started(client)
    answers: list[Any] = []
    for commit in (True, False):
        answers.append(send(producer, topic))
        before = producer.ids
        answers.append(ended(producer, commit=commit))
        after = producer.ids
        producer.ids = before
        answers.append(ended(producer, commit=commit))
        producer.ids = before
        answers.append(ended(producer, commit=not commit))
        producer.ids = after
    return answers


@scenario()
def a_transaction_that_timed_out(client: ProtocolClient) -> Any:
    """It is aborted and its producer fenced, until it asks for a new epoch."""
    topic, producer = client.topic(), fresh(client)
    init(producer, timeout_ms=50)
    sent = send(producer, topic)
    wait_for_state(producer, "CompleteAbort")
    late = producer.ids
    codes = codes_of_everything(client, producer, topic)
    return sent, codes, init(producer, expected=late)[0], init(producer)[0]


# ---- questions ---------------------------------------------------------------------------


@scenario()
def descriptions(client: ProtocolClient) -> Any:
    """State, timeout, start and partitions, from empty to ongoing to committed."""
    topic, producer = client.topic(2), started(client)

    def described() -> Any:
        state = producer.describe()
        topics = [(item.topic == topic, sorted(item.partitions)) for item in state.topics]
        is_own = (state.producer_id, state.producer_epoch) == producer.ids
        return (
            error_name(state.error_code),
            state.transaction_state,
            state.transaction_timeout_ms,
            state.transaction_start_time_ms > 0,
            is_own,
            topics,
        )

    answers = [described()]
    send(producer, topic)
    send(producer, topic, number=1)
    answers.append(described())
    end(producer)
    wait_for_state(producer, "CompleteCommit")
    answers.append(described())
    request = DescribeTransactionsRequest(transactional_ids=["", new_id()])
    strange = [
        (error_name(item.error_code), item.transaction_state, item.producer_id)
        for item in client.call(request).transaction_states
    ]
    return answers, strange


@scenario()
def listings(client: ProtocolClient) -> Any:
    """Transactions are filtered by state, producer id, duration and pattern."""
    topic, idle, busy = client.topic(), started(client), started(client)
    send(busy, topic)
    names = {idle.name: "idle", busy.name: "busy"}

    def listed(version: int = 2, **filters: Any) -> Any:
        answer = client.call(ListTransactionsRequest(**filters), version)
        ours = {
            (names[item.transactional_id], item.transaction_state)
            for item in answer.transaction_states
            if item.transactional_id in names
        }
        return error_name(answer.error_code), sorted(ours), sorted(answer.unknown_state_filters)

    return [
        listed(0),
        listed(1, duration_filter=0),
        listed(1, duration_filter=3_600_000),
        listed(state_filters=["Ongoing", "Nonsense"]),
        listed(state_filters=["Nonsense"]),
        listed(producer_id_filters=[idle.ids.producer_id]),
        listed(transactional_id_pattern=f"{busy.name[:-2]}.."),
        listed(transactional_id_pattern=busy.name[:-2]),
        listed(transactional_id_pattern=""),
        listed(transactional_id_pattern="("),
    ]


@scenario()
def a_producer_without_an_id(client: ProtocolClient) -> Any:
    """Its transaction timeout is not looked at."""
    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=-5)
    answer = client.call(request, INIT_VERSION)
    return error_name(answer.error_code), answer.producer_epoch


# ---- markers -----------------------------------------------------------------------------


def written_as(client: ProtocolClient, topic: str, ids: Ids, sequence: int) -> str:
    """What a batch outside of transactions is answered."""
    options = BatchOptions(
        producer_id=ids.producer_id, producer_epoch=ids.epoch, base_sequence=sequence
    )
    item = record.simple_batch([b"x"], timestamp_ms=now_ms(), options=options)
    return client.produced(produce(topic, {0: item}))[0]


@scenario()
def partitions_without_records(client: ProtocolClient) -> Any:
    """A partition that was named and not written to gets a marker, which fences older epochs."""
    results = []
    for form in ("older", "newer"):
        for commit in (True, False):
            topic, producer = client.topic(), started(client, form)
            zombie = producer.ids
            init(producer)
            assert settled(lambda p=producer, t=topic: p.add(t, 0)) == "NONE"  # type: ignore[misc]
            current = producer.ids
            outcome = end(producer, commit=commit)
            wait_for_state(producer, "CompleteCommit" if commit else "CompleteAbort")
            part = one(client.call(fetch(topic, isolation_level=1, max_wait_ms=10_000), 12))
            marks = [h.is_control for _, h in headers(bytes(part.records or b""))]
            later = [
                written_as(client, topic, ids, sequence)
                for ids, sequence in ((zombie, 0), (current, 5), (current, 0), (producer.ids, 0))
            ]
            results.append((form, commit, outcome, marks, later))
    return results
