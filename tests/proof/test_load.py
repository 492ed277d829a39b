"""Load for a long time: retention, compaction, topics that come and go, a restart now and then.

`PENSTOCK_SOAK_MINUTES` says how long in `make proof`, five minutes unless set; `make test` does two
rounds. Everything is read back and compared again and again, and neither memory nor open files may
grow.
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


class LoadTest(KillTest):
    """A broker under load, whose memory and open files are watched."""

    def __init__(self, data: Path, seed: int) -> None:
        super().__init__(data, seed, TOPICS)
        self.memory_bytes = self.open_files = self.restarts = 0

    def check(self) -> None:
        """Compare all records with what was acknowledged, and resources with their bounds."""
        process = psutil.Process(self.broker.pid)
        self.memory_bytes = max(self.memory_bytes, process.memory_info().rss)
        self.open_files = max(self.open_files, process.num_fds())
        assert self.memory_bytes < MEMORY_MAX_BYTES
        assert self.open_files < FILES_MAX
        self.verify()

    def restart(self) -> None:
        assert self.broker.stop() == 0
        assert (self.broker.data / CLEAN_MARKER).exists()
        self.broker.start()
        self.restarts += 1

    def finish(self) -> None:
        """The load has ended: everything is there after one more restart."""
        self.broker.start()
        self.verify()
        self.stop_cleanly()

    def __str__(self) -> str:
        return (
            f"{self.report}, {self.restarts} restarts, at most {self.memory_bytes >> 20} MiB and "
            f"{self.open_files} open files"
        )


@pytest.mark.processes
def test_a_short_time_under_load(tmp_path: Path, seed: int) -> None:
    test = LoadTest(tmp_path / "data", seed)
    with test.running():
        for _ in range(2):
            test.wait_for_load()
            test.check()
            test.restart()
    test.finish()
    print(test)


@pytest.mark.proof
def test_a_long_time_under_load(tmp_path: Path, seed: int) -> None:
    begun = time.monotonic()
    test = LoadTest(tmp_path / "data", seed)
    with test.running():
        while time.monotonic() - begun < SOAK_MINUTES * 60:
            round_end = time.monotonic() + ROUND_S
            while time.monotonic() < round_end:
                test.wait_for_load()
            test.check()
            say(str(test), begun)
            if test.rng.random() < 0.3:
                test.restart()
    test.finish()
    say(f"summary: {test}; seed {seed}", begun)
