"""Load for a long time: retention, compaction, topics that come and go, a restart now and then.

`PENSTOCK_SOAK_MINUTES` says how long; five minutes unless set. Everything is read back and compared
again and again, and neither memory nor open files may grow.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from penstock.log.store import CLEAN_MARKER
from tests.broker.robustness.killing import KillTest
from tests.harness.profiles import SOAK_MINUTES
from tests.proof.progress import say

ROUND_S = 20.0
MEMORY_MAX_BYTES = 400 << 20
FILES_MAX = 1_000
BOUNDED = {"segment_bytes": "500000", "retention_bytes": "5000000"}
TOPICS = {
    "on-disk": {"durability": "disk", **BOUNDED},
    "in-cache": {"durability": "os", **BOUNDED},
    "short": {"durability": "disk", "segment_bytes": "20000", "retention_bytes": "60000"},
    "compacted": {
        "durability": "disk", "segment_bytes": "100000", "cleanup_policy": "compact",
        "min_cleanable_dirty_ratio": "0.1",
    },
}  # fmt: skip


@pytest.mark.proof
def test_a_long_time_under_load(tmp_path: Path, seed: int) -> None:
    begun = time.monotonic()
    test = KillTest(tmp_path / "data", seed, TOPICS)
    memory = files = restarts = 0
    with test.running():
        while time.monotonic() - begun < SOAK_MINUTES * 60:
            round_end = time.monotonic() + ROUND_S
            while time.monotonic() < round_end:
                test.wait_for_load()
            process = psutil.Process(test.broker.pid)
            memory = max(memory, process.memory_info().rss)
            files = max(files, process.num_fds())
            assert memory < MEMORY_MAX_BYTES
            assert files < FILES_MAX
            test.verify()
            say(f"{test.report}, {memory >> 20} MiB, {files} open files", begun)
            if test.rng.random() < 0.3:
                assert test.broker.stop() == 0
                assert (test.broker.data / CLEAN_MARKER).exists()
                test.broker.start()
                restarts += 1
    test.broker.start()
    test.verify()
    test.stop_cleanly()
    say(
        f"summary: {test.report}, {restarts} restarts, at most {memory >> 20} MiB and {files} "
        f"open files; seed {seed}",
        begun,
    )
