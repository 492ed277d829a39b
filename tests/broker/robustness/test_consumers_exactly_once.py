"""Consume, transform, produce: exactly once though workers, broker and network fail.

`make proof` does it for longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker.robustness.consumers_pipeline import HOLD, PROTOCOLS, Pipeline
from tests.harness.profiles import CONSUMER_FAULTS, PIPELINE_RECORDS


@pytest.mark.parametrize("kind", ["older", "newer"])
@pytest.mark.processes
def test_each_record_is_copied_once(tmp_path: Path, seed: int, kind: str) -> None:
    protocol = PROTOCOLS[0] if kind == "newer" else PROTOCOLS[1 + seed % 2]
    pipeline = Pipeline(tmp_path / "data", seed, total=PIPELINE_RECORDS, protocol=protocol)
    pipeline.run(CONSUMER_FAULTS)
    print(protocol, pipeline.report())


@pytest.mark.processes
def test_each_record_is_copied_once_while_workers_are_held(tmp_path: Path, seed: int) -> None:
    protocol = PROTOCOLS[seed % len(PROTOCOLS)]
    pipeline = Pipeline(tmp_path / "data", seed, total=90, protocol=protocol, faults=[HOLD])
    pipeline.run(2)
    assert pipeline.scene.faults["worker held"] == 2
    print(protocol, pipeline.report())
