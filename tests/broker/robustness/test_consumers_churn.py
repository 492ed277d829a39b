"""Groups whose members come, go, die and hang: everything is read, nobody owns what another does.

`make proof` does it for longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker.robustness.consumers_churn import Churn, Order, Ownership, orders
from tests.broker.robustness.consumers_pipeline import PROTOCOLS
from tests.harness.profiles import CHURN_RECORDS, CONSUMER_FAULTS


@pytest.mark.parametrize("kind", ["older", "newer"])
@pytest.mark.processes
def test_the_work_goes_on(tmp_path: Path, seed: int, kind: str) -> None:
    protocol = PROTOCOLS[0] if kind == "newer" else PROTOCOLS[1 + seed % 2]
    churn = Churn(tmp_path / "data", seed, total=CHURN_RECORDS, protocol=protocol)
    churn.run(CONSUMER_FAULTS)
    print(protocol, churn.report())


def test_two_owners_are_seen() -> None:
    owners = Ownership()
    owners.assigned("a", [0, 1], 1.0)
    owners.given_up("a", [0], 2.0)
    owners.assigned("b", [0], 2.5)
    assert owners.conflicts() == []
    owners.assigned("b", [1], 2.5)
    assert len(owners.conflicts()) == 1
    owners.given_up("a", [1], 3.0, excused=True)
    assert owners.conflicts() == []


def test_a_member_that_was_removed_hears_late_what_it_was_assigned_before() -> None:
    """As seen: its callbacks ran when the partition had gone to another already."""
    owners = Ownership()
    owners.orders = [
        Order("a", 1.0, frozenset({0, 1})),
        Order("a", 3.0, None),
        Order("b", 3.5, frozenset({0, 1})),
    ]
    owners.assigned("a", [0], 1.1)
    owners.assigned("b", [0, 1], 3.6)
    # Assigned before it was removed, told of after; and never told that it is lost.
    owners.assigned("a", [1], 3.7)
    owners.given_up("a", [0, 1], 3.8)
    assert owners.conflicts() == []
    # Once the broker assigns it again while the other has it, that is a fault.
    owners.orders.append(Order("a", 3.65, frozenset({1})))
    assert len(owners.conflicts()) == 1
    # And so is a partition that goes to another while its owner is not removed.
    del owners.orders[1]
    assert len(owners.conflicts()) == 2


def test_the_log_of_a_broker_says_what_it_has_ordered() -> None:
    at = "2026-11-19 08:00:0"
    found = orders(
        f"{at}1,500 INFO penstock.broker.groups.assigned: group readers: member id-1 of client "
        "member-1 is assigned, in epoch 3: readings-0, readings-5\n"
        f"{at}2,000 INFO penstock.broker.groups.assigned: group readers: member id-1 is removed: "
        "it was silent\n"
        f"{at}2,250 INFO penstock.broker.groups.assigned: group others: member id-1 is removed: "
        "it was silent\n"
    )
    assert [(one.member, one.assigned) for one in found] == [
        ("member-1", {0, 5}),
        ("member-1", None),
    ]
    assert round(found[1].at - found[0].at, 3) == 0.5
