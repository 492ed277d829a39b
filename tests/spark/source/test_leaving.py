"""The end of the process that plans a stream's micro-batches, once Spark has gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from importlib.machinery import ModuleSpec
from penstock.spark.source import stream

sys.modules["__main__"].__spec__ = ModuleSpec({name!r}, None)
stream._leave_quietly()
raise {error}("gone")
"""
RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"


@pytest.mark.parametrize(
    ("name", "error", "is_told"),
    [
        (RUNNER, "BrokenPipeError", False),
        (RUNNER, "ValueError", True),
        ("anything", "BrokenPipeError", True),
    ],
)
@pytest.mark.processes
def test_only_that_spark_has_gone_is_not_told(name: str, error: str, is_told: bool) -> None:
    code = PROGRAM.format(name=name, error=error)
    ran = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 1
    assert ("Traceback" in ran.stderr) == is_told, ran.stderr
