"""Machine code is kept where it can be: workers load it and do not compile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.records.columns.compiled import private_folder
from tests.harness.profiles import some

PACKAGE = Path(penstock.__file__).parent
# A kernel that is compiled within a second; all of them together take ten times as long.
SMALL_KERNEL = """
from penstock.records.columns.compiled import kernel

@kernel("int64(int64)")
def double(n):
    return n * 2
"""
# They say where the code was found, whether it was compiled, and whose it is.
SMALL = """
import json
from penstock.records.columns import small
assert small.double(21) == 42
stats = small.double.stats
print(json.dumps([stats.cache_path, len(stats.cache_hits), small.__file__]))
"""
ALL_KERNELS = """
import json
from penstock.records.columns import kernels
from penstock.records.columns.decode import decode
from penstock.records.record import Record, encode
assert decode(encode([Record(0, 0, b"k", b"v")]), first_offset=0).batch.num_rows == 1
stats = kernels.measure.stats
print(json.dumps([stats.cache_path, len(stats.cache_hits), kernels.__file__]))
"""


def copy_of_the_package(folder: Path) -> Path:
    """Only what kernels need; where numba would like to write stands a file."""
    target = folder / "penstock"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE / "records", target / "records", ignore=skip)
    for name in ("__init__.py", "errors.py"):
        shutil.copy(PACKAGE / name, target / name)
    (target / "records" / "columns" / "small.py").write_text(SMALL_KERNEL)
    (target / "records" / "columns" / "__pycache__").write_text("read-only, even for root")
    return folder


def run(package: Path, script: str, **environment: str) -> tuple[str, int]:
    """The cache folder, and how many kernels came from it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**kept, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        cwd=package,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path, hits, file = json.loads(done.stdout)
    assert Path(file).is_relative_to(package)
    return path or "", hits


SCRIPTS = pytest.mark.parametrize(
    "script", some([pytest.param(SMALL, id="small"), pytest.param(ALL_KERNELS, id="all")], test=1)
)


# What is compiled by a program of its own takes a while on a busy machine.
@SCRIPTS
@pytest.mark.timeout(420)
@pytest.mark.processes
def test_a_package_that_cannot_be_written_to(tmp_path: Path, script: str) -> None:
    package = copy_of_the_package(tmp_path / "site")
    home = tmp_path / "home"
    home.mkdir()
    variables = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    path, hits = run(package, script, **variables)
    assert Path(path).is_relative_to(home)
    assert hits == 0
    assert run(package, script, **variables) == (path, 1)


@SCRIPTS
@pytest.mark.timeout(420)
@pytest.mark.processes
def test_no_home_either(tmp_path: Path, script: str) -> None:
    package = copy_of_the_package(tmp_path / "site")
    no_home, temporary = tmp_path / "file", tmp_path / "tmp"
    no_home.write_text("not a folder")
    temporary.mkdir()
    variables = {
        "HOME": str(no_home),
        "XDG_CACHE_HOME": str(no_home / "cache"),
        "TMPDIR": str(temporary),
    }
    path, hits = run(package, script, **variables)
    assert Path(path).is_relative_to(temporary)
    assert hits == 0
    assert run(package, script, **variables) == (path, 1)


def test_code_is_loaded_from_nobody_elses_folder(tmp_path: Path) -> None:
    folder = private_folder(tmp_path)
    assert folder is not None
    assert private_folder(tmp_path) == folder
    folder.chmod(0o777)
    assert private_folder(tmp_path) is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert private_folder(tmp_path) is None
    folder.unlink()
    folder.write_text("")
    assert private_folder(tmp_path) is None
