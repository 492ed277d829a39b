"""Groups whose members come, go, die and hang: everything is read, nobody owns what another does.

`make proof` does it for longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker.robustness.consumers_churn import Churn, Ownership
from tests.broker.robustness.consumers_pipeline import PROTOCOLS
from tests.harness.profiles import CONSUMER_FAULTS

TOTAL = 600


@pytest.mark.parametrize("kind", ["older", "newer"])
@pytest.mark.processes
def test_the_work_goes_on(tmp_path: Path, seed: int, kind: str) -> None:
    protocol = PROTOCOLS[0] if kind == "newer" else PROTOCOLS[1 + seed % 2]
    churn = Churn(tmp_path / "data", seed, total=TOTAL, protocol=protocol)
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
