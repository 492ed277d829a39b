"""A million frames that no decent client sends; see `tests/broker/robustness/test_fuzz.py`."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest

from penstock.broker.config import Limits
from tests.broker.robustness.fuzzer import FuzzProcess
from tests.broker.robustness.test_fuzz import GROWTH_MAX_BYTES, check_outcomes, fuzz_work
from tests.broker.robustness.watch import (
    Witness,
    memory_bytes,
    no_errors,
    quick_broker,
    wait_for_quiet,
)
from tests.harness.profiles import SOAK_FUZZ_FRAMES, SOAK_FUZZ_ROUNDS, SOAK_FUZZ_STREAMS
from tests.proof.progress import say


@pytest.mark.proof
def test_a_million_frames(seed: int) -> None:
    begun = time.monotonic()
    outcomes: Counter[str] = Counter()
    limits = Limits(max_topics=40, max_partitions=300, max_fetch_sessions=50)
    with quick_broker(limits=limits, housekeeping_interval_ms=200) as broker:
        with Witness(broker) as witness, no_errors(broker):
            work = fuzz_work(broker, seed, SOAK_FUZZ_FRAMES, SOAK_FUZZ_STREAMS)
            before = 0
            for number in range(SOAK_FUZZ_ROUNDS):
                outcomes += FuzzProcess(replace(work, seed=seed + 100 * number)).outcomes()
                # What is loaded and cached in the first round is not growth.
                before = before or memory_bytes()
                grown = memory_bytes() - before
                say(f"{outcomes.total()} frames: {dict(outcomes)}, {grown >> 20} MiB more", begun)
        wait_for_quiet(broker)
    check_outcomes(outcomes, SOAK_FUZZ_ROUNDS * (SOAK_FUZZ_FRAMES + SOAK_FUZZ_STREAMS))
    assert outcomes.total() >= 1_000_000
    assert grown < GROWTH_MAX_BYTES
    say(
        f"summary: {outcomes.total()} frames, no exception, {grown >> 20} MiB more memory, "
        f"{witness.rounds} rounds of an undisturbed witness; seed {seed}",
        begun,
    )
