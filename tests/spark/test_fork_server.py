"""What Spark is given for Python: a fork where a stream is planned, plain Python otherwise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.spark.fork_server import RUNNER, ForkServer
from penstock.spark.python import worker_python
from tests.waiting import eventually

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="only there is anything forked"),
]
SECRET = b"between you and me"
OWNER = """
from penstock.spark.fork_server import ForkServer
from penstock.spark.python import worker_python
print(ForkServer(worker_python()).program, flush=True)
input()
"""


@pytest.fixture(scope="module")
def program() -> Iterator[str]:
    server = ForkServer(worker_python())
    yield server.program
    server.close()
    assert not Path(server.program).parent.exists()


class Started:
    """The program, as Spark starts it, and the connection that it makes to Spark."""

    def __init__(self, program: str) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as listening:
            listening.settimeout(60)
            environment = {
                "PYTHON_WORKER_FACTORY_PORT": str(listening.getsockname()[1]),
                "PYTHON_WORKER_FACTORY_SECRET": SECRET.decode(),
            }
            self.process = subprocess.Popen(
                [program, "-m", RUNNER], env=os.environ | environment, stderr=subprocess.DEVNULL
            )
            connection, _ = listening.accept()
        connection.settimeout(60)
        with connection:
            self.file = connection.makefile("rwb")
        assert self.file.read(self._number()) == SECRET
        self.file.write(b"\0\0\0\2ok")
        self.file.flush()
        self.pid = self._number()

    def _number(self) -> int:
        return int.from_bytes(self.file.read(4), "big")

    @property
    def is_fork(self) -> bool:
        return self.pid != self.process.pid

    def close(self) -> int:
        self.file.close()
        return self.process.wait(60)


def test_a_fork_ends_with_its_program_and_the_program_with_its_fork(program: str) -> None:
    def forked() -> Started | None:
        started = Started(program)
        if not started.is_fork:
            # There was nobody to ask yet.
            started.close()
            return None
        return started

    started = eventually(forked)
    assert started is not None
    folder = Path(f"/proc/{started.pid}")
    assert b"penstock.spark.fork_server" in (folder / "cmdline").read_bytes()
    # Spark hangs up.
    assert started.close() != 0
    killed = Started(program)
    assert killed.is_fork
    killed.process.terminate()
    assert killed.process.wait(60) != 0
    with killed.file:
        assert killed.file.read() == b""


def test_everything_else_is_plain_python(program: str) -> None:
    for options, wanted in (
        (["-c", "import sys; print(sys.argv[1:])", "a b"], "['a b']"),
        (["-m", "this_is_no_module"], ""),
    ):
        ran = subprocess.run([program, *options], check=False, capture_output=True, text=True)
        assert ran.stdout.strip() == wanted
        assert (ran.returncode == 0) == bool(wanted)


def test_without_anybody_to_ask_it_is_plain_python_too(program: str, tmp_path: Path) -> None:
    copy = tmp_path / "python"
    copy.write_text(Path(program).read_text().replace("/socket", "/nobody"))
    copy.chmod(0o700)
    started = Started(str(copy))
    assert not started.is_fork
    assert started.close() != 0


def test_a_server_ends_with_whoever_started_it() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip()).parent
        eventually((folder / "socket").exists)
        owner.kill()
    eventually(lambda: not folder.exists())
