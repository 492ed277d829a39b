"""A task that fails after it has written, and that Spark runs again: nothing is there twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.testing import Broker
from tests.spark.sink.log import make_topic, values

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.java
@pytest.mark.timeout(400)
def test_a_batch_is_written_anew_if_spark_repeats_a_task(
    log_broker: Broker, tmp_path: Path
) -> None:
    address = log_broker.bootstrap
    topic, flag = make_topic(address), tmp_path / "failed"
    place = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.sink.retry_child", address, topic, str(flag)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": place},
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "written: 2000" in done.stdout
    assert "is written anew" in done.stderr
    assert flag.exists()
    assert values(address, topic) == sorted(b"%d" % number for number in range(2000))
