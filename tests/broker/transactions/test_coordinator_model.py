"""The coordinator under any order of requests, deadlines, half-done ends, restarts and losses.

Around the state machine is a world as simple as can be: partitions that note which records of
which transaction were admitted, and what a marker made of them. Producers come and go, repeat what
they did not hear the answer to, and are replaced; some leave the decision to others. Whatever
happens:

- a transaction is committed in all its partitions or in none;
- what its producer was told of its end is what happened to every record in it;
- nobody writes after being replaced, timed out or fenced;
- what is to be decided by somebody else stays open until it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.broker.transactions.coordinator import Then
from penstock.broker.transactions.state import Ids, State
from penstock.wire.errors import ErrorCode
from tests.broker.transactions.machine import TIMEOUT_MS, Machine, topic
from tests.harness.profiles import examples

NAMES = ("s", "t")
PLACES = tuple((topic(name), number) for name in ("a", "b") for number in (0, 1))
FENCED = {
    ErrorCode.PRODUCER_FENCED,
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.INVALID_PRODUCER_ID_MAPPING,
}


@dataclass(eq=False)
class Record:
    """One admitted record, and what became of it."""

    transaction: int
    fate: str = "open"
    # Whether a commit was asked for.
    wanted: bool = False


@dataclass(eq=False)
class Producer:
    """A client: what it holds, and what it has written since its last end."""

    name: str
    ids: Ids
    newer_form: bool
    two_phase: bool
    transaction: int = 0
    records: list[Record] = field(default_factory=list)
    # It resumed a transaction, which it may only end.
    is_keeper: bool = False
    # An end that it has not heard the answer to.
    ending: bool | None = None
    fenced: bool = False
    # It was aborted for taking long, and may go on if it says so.
    timed_out: bool = False
    # It will see whether it is fenced when it asks again.
    uncertain: bool = False


@dataclass
class Place:
    """A partition: open transactions by producer id, with their epochs."""

    open: dict[int, tuple[int, list[Record]]] = field(default_factory=dict)

    def append(self, ids: Ids, record: Record) -> None:
        epoch, records = self.open.setdefault(ids.producer_id, (ids.epoch, []))
        assert epoch == ids.epoch, "two epochs in one transaction"
        records.append(record)

    def end(self, marker: Ids, fate: str) -> None:
        epoch, records = self.open.pop(marker.producer_id, (marker.epoch, []))
        assert epoch <= marker.epoch
        for record in records:
            assert record.fate == "open"
            record.fate = fate


class CoordinatorRules(RuleBasedStateMachine):
    """What can happen."""

    @initialize()
    def start(self) -> None:
        self.machine = Machine()
        self.places = {(where.name, number): Place() for where, number in PLACES}
        self.producers: dict[str, Producer] = {}
        self.former: list[Producer] = []
        self.records: list[Record] = []
        self.transactions = 0

    # ---- the world -----------------------------------------------------------------------

    def markers_of(self, name: str, places: int = len(PLACES)) -> None:
        txn = self.machine.of(name)
        assert txn.marker is not None
        fate = "committed" if txn.state == State.PREPARE_COMMIT else "aborted"
        for where, number in PLACES[:places]:
            place = self.places[where.name, number]
            epoch, _ = place.open.get(txn.txn_ids.producer_id, (-1, []))
            if txn.holds(where.id, number) and epoch == txn.txn_ids.epoch:
                place.end(txn.marker, fate)

    def finish_all(self) -> None:
        self.machine.wait_durable()
        for name in self.machine.coordinator.undone:
            self.markers_of(name)
        self.machine.finish()

    def replace_producer(self, new: Producer) -> None:
        old = self.producers.get(new.name)
        if old is not None:
            self.former.append(old)
        self.producers[new.name] = new

    # ---- beginning -----------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES),
        newer_form=st.booleans(),
        two_phase=st.booleans(),
        keep=st.booleans(),
    )
    def begin(self, name: str, newer_form: bool, two_phase: bool, keep: bool) -> None:
        self.finish_all()
        outcome = self.machine.ask_init(name, two_phase=two_phase, keep_prepared=keep)
        while outcome.then != Then.ANSWER:
            if outcome.then == Then.FINISH:
                self.finish_all()
            outcome = self.machine.ask_init(
                name, self.machine.new_id(), two_phase=two_phase, keep_prepared=keep
            )
        assert not outcome.code
        self.machine.wait_durable()
        new = Producer(name, outcome.ids, newer_form, two_phase)
        if outcome.ongoing.producer_id >= 0:
            assert keep
            new.is_keeper = True
            new.records = [
                record
                for place in self.places.values()
                for record in place.open.get(outcome.ongoing.producer_id, (0, []))[1]
            ]
        self.replace_producer(new)

    @precondition(lambda self: self.producers)
    @rule(data=st.data())
    def go_on_after_an_error(self, data: st.DataObject) -> None:
        producer = self.one_of(data, [p for p in self.producers.values() if not p.is_keeper])
        if producer is None or producer.ending is not None:
            return
        self.finish_all()
        outcome = self.machine.ask_init(
            producer.name, expected=producer.ids, two_phase=producer.two_phase
        )
        while outcome.then != Then.ANSWER:
            if outcome.then == Then.FINISH:
                self.finish_all()
            outcome = self.machine.ask_init(
                producer.name,
                self.machine.new_id(),
                expected=producer.ids,
                two_phase=producer.two_phase,
            )
        self.machine.wait_durable()
        if outcome.code:
            assert producer.fenced
            return
        assert all(record.fate == "aborted" for record in producer.records)
        producer.ids, producer.records, producer.fenced = outcome.ids, [], False
        producer.timed_out = False

    def one_of(self, data: st.DataObject, producers: list[Producer]) -> Producer | None:
        return data.draw(st.sampled_from(producers)) if producers else None

    # ---- writing -------------------------------------------------------------------------

    @precondition(lambda self: self.producers)
    @rule(data=st.data(), place=st.integers(0, len(PLACES) - 1))
    def write(self, data: st.DataObject, place: int) -> None:
        producer = self.one_of(data, list(self.producers.values()))
        assert producer is not None
        if producer.ending is not None:
            return
        code = self.ask_to_write(producer, place)
        if producer.is_keeper:
            assert code in {*FENCED, ErrorCode.INVALID_TXN_STATE, ErrorCode.CONCURRENT_TRANSACTIONS}
        elif code:
            assert producer.fenced, code
        else:
            assert not producer.fenced

    @precondition(lambda self: self.former)
    @rule(data=st.data(), place=st.integers(0, len(PLACES) - 1), commit=st.booleans())
    def zombies_do_nothing(self, data: st.DataObject, place: int, commit: bool) -> None:
        zombie = self.one_of(data, self.former)
        assert zombie is not None
        assert self.ask_to_write(zombie, place) in FENCED
        before = len(self.machine.journal)
        code = self.machine.decide(zombie.name, zombie.ids, commit=commit, bumps=False).code
        assert code in FENCED
        assert len(self.machine.journal) == before

    def ask_to_write(self, producer: Producer, place: int) -> ErrorCode:
        where, number = PLACES[place]
        name, ids = producer.name, producer.ids
        if not producer.newer_form:
            code = self.machine.add(name, ids, PLACES[place])
            if code:
                return code
        code = self.machine.write_to(name, ids, where, number, implicit=producer.newer_form)
        if code:
            return code
        if self.machine.coordinator.endures(name):
            self.machine.wait_durable()
        if not producer.records:
            self.transactions += 1
            producer.transaction = self.transactions
        record = Record(producer.transaction)
        self.records.append(record)
        producer.records.append(record)
        self.places[where.name, number].append(ids, record)
        return code

    # ---- ending --------------------------------------------------------------------------

    @precondition(lambda self: self.producers)
    @rule(data=st.data(), commit=st.booleans(), heard=st.booleans())
    def end(self, data: st.DataObject, commit: bool, heard: bool) -> None:
        producer = self.one_of(data, list(self.producers.values()))
        assert producer is not None
        self.end_of(producer, commit=commit, heard=heard)

    @precondition(lambda self: self.producers)
    @rule(data=st.data(), place=st.integers(0, len(PLACES) - 1), commit=st.booleans())
    def one_after_the_other(self, data: st.DataObject, place: int, commit: bool) -> None:
        """Ends are soon followed by the next beginning: of what is confused then, most is here."""
        producer = self.one_of(data, [p for p in self.producers.values() if not p.fenced])
        if producer is None or producer.is_keeper or producer.ending is not None:
            return
        self.finish_all()
        if not self.ask_to_write(producer, place):
            self.end_of(producer, commit=commit, heard=True)
            assert not self.ask_to_write(producer, place)

    def end_of(self, producer: Producer, *, commit: bool, heard: bool) -> None:
        if producer.ending is not None:
            commit = producer.ending
        elif not producer.records and not producer.newer_form:
            # Clients do not end what they have not begun.
            return
        for record in producer.records:
            record.wanted |= commit
        outcome = self.machine.decide(
            producer.name, producer.ids, commit=commit, bumps=producer.newer_form
        )
        if outcome.code == ErrorCode.INVALID_TXN_STATE:
            assert commit
            assert not producer.records or producer.fenced
            return
        if outcome.code:
            assert producer.fenced or producer.uncertain, outcome.code
            producer.fenced = True
            return
        assert not producer.fenced or (producer.timed_out and producer.newer_form and not commit)
        if not heard:
            producer.ending = commit
            return
        self.finish_all()
        fate = "committed" if commit else "aborted"
        assert all(record.fate == fate for record in producer.records)
        producer.ids = outcome.ids
        producer.records, producer.ending, producer.is_keeper = [], None, False
        producer.uncertain = producer.fenced = producer.timed_out = False

    @rule(places=st.integers(0, len(PLACES)))
    def carry_out_partly(self, places: int) -> None:
        """The markers are in some partitions when everything stops."""
        self.machine.wait_durable()
        for name in self.machine.coordinator.undone:
            self.markers_of(name, places)

    @rule()
    def carry_out(self) -> None:
        self.finish_all()

    # ---- time and failures ---------------------------------------------------------------

    @rule(by_ms=st.sampled_from([1, TIMEOUT_MS // 2, TIMEOUT_MS]))
    def pass_time(self, by_ms: int) -> None:
        before = {n: t.state for n, t in self.machine.coordinator.transactions.items()}
        self.machine.pass_time(by_ms)
        for name, txn in self.machine.coordinator.transactions.items():
            if txn.state != before[name]:
                assert (before[name], txn.state) == (State.ONGOING, State.PREPARE_ABORT)
                assert not txn.enduring
                assert txn.started_ms + TIMEOUT_MS <= self.machine.now_ms
                self.fence(name)

    def fence(self, name: str) -> None:
        producer = self.producers[name]
        producer.fenced = producer.timed_out = True

    @rule()
    def restart(self) -> None:
        self.machine.restart()

    @rule(share=st.floats(0, 1))
    def lose_power(self, share: float) -> None:
        """What was not waited for may be gone from the journal; the partitions have it."""
        loose = len(self.machine.journal) - self.machine.durable
        open_before = {n: t for n, t in self.machine.coordinator.transactions.items() if t.enduring}
        self.machine.restart(lost=True, without_last=round(loose * share))
        # Of the older form only the completion is lost: nothing was begun since.
        ended_again = {
            name
            for name in self.machine.coordinator.undone
            if not self.machine.of(name).bumped and not self.producers[name].records
        }
        self.finish_all()
        for where, number in PLACES:
            place = self.places[where.name, number]
            for producer_id, (epoch, _) in list(place.open.items()):
                ids = Ids(producer_id, epoch)
                ours, entries = self.machine.coordinator.adopt(
                    where, number, ids, self.machine.now_ms
                )
                self.machine.write(entries)
                if not ours:
                    place.end(ids, "aborted")
        for name, producer in self.producers.items():
            if producer.ending is not None:
                producer.uncertain = True
            elif not self.machine.of(name).endures and name not in ended_again:
                producer.fenced = True
        for name, txn in open_before.items():
            if txn.state == State.ONGOING:
                assert self.machine.state(name) == State.ONGOING

    # ---- what always holds ---------------------------------------------------------------

    @invariant()
    def all_or_nothing(self) -> None:
        fates: dict[int, set[str]] = {}
        for record in self.records:
            fates.setdefault(record.transaction, set()).add(record.fate)
        for transaction, seen in fates.items():
            assert not {"committed", "aborted"} <= seen, transaction
            if not self.machine.coordinator.undone:
                assert len(seen) == 1, (transaction, seen)

    @invariant()
    def nothing_is_committed_unasked(self) -> None:
        assert all(record.wanted for record in self.records if record.fate == "committed")

    @invariant()
    def only_what_is_open_has_partitions(self) -> None:
        for txn in self.machine.coordinator.transactions.values():
            decided = txn.name in self.machine.coordinator.undone
            assert (txn.marker is not None) == decided
            assert not txn.partitions or decided or txn.state == State.ONGOING


CoordinatorRules.TestCase.settings = settings(
    max_examples=examples(66),
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCoordinator = CoordinatorRules.TestCase
