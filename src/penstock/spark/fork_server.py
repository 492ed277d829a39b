"""Forks the processes that plan micro-batches from one that has loaded all they need.

Spark starts a Python process for each stream with a source in Python. Importing pyspark and pyarrow
takes each of them more than half a second of processor time and 45 MB that forks share. So on one
machine Spark is given a program that asks the server here to fork instead: to Spark it looks the
same, for the program ends as the fork does, and the fork ends with the program.

If nobody answers, the program becomes the Python that it stands for.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Final

RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"
_MODULES: Final = (RUNNER, "penstock.spark.source.stream", "penstock.spark.source.table")
_STANDARD_STREAMS: Final = 3

_PROGRAM: Final = """\
#!/bin/sh
if [ "$2" = {runner} ]; then
    exec {instead} -I -S {folder}/ask.py {folder}/socket {instead} "$@"
fi
exec {instead} "$@"
"""
# Without any module that would have to be loaded first.
_ASK: Final = """\
import _socket, posix, sys
asked = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
try:
    asked.connect(sys.argv[1])
except OSError:
    posix.execv(sys.argv[2], sys.argv[2:])
said = [posix.getcwdb(), *(name + b"=" + value for name, value in posix.environ.items())]
text = b"\\0".join(said)
asked.sendmsg([len(text).to_bytes(4, "big")],
    [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(n.to_bytes(4, sys.byteorder)
    for n in (0, 1, 2)))])
asked.sendall(text)
code = asked.recv(1)
posix._exit(code[0] if code else 1)
"""


_SERVE: Final = "import sys; from penstock.spark.fork_server import serve; serve(sys.argv[1])"


class ForkServer:
    """The server, as a child process, and the program to be Spark's Python on this machine.

    It ends with `close`, and at the latest with the process that made it.
    """

    def __init__(self, python: str) -> None:
        # A short path: that of a socket has room for a hundred letters.
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-forks-"))
        self.program = str(self._folder / "python")
        values = {"runner": RUNNER, "folder": quote(str(self._folder)), "instead": quote(python)}
        (self._folder / "ask.py").write_text(_ASK)
        Path(self.program).write_text(_PROGRAM.format(**values))
        Path(self.program).chmod(0o700)
        self._process = subprocess.Popen(
            [python, "-c", _SERVE, str(self._folder)],
            stdin=subprocess.PIPE,
            # As Spark sets it for its own.
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        atexit.register(self.close)

    def close(self) -> None:
        """End the server; processes that it forked end with the programs that asked for them."""
        atexit.unregister(self.close)
        with self._process:
            self._process.terminate()
        shutil.rmtree(self._folder, ignore_errors=True)


def serve(folder: str) -> None:
    """Fork for whoever asks, until the process that started this one is gone."""
    for name in _MODULES:
        __import__(name)
    # It is run as the main module of each fork.
    del sys.modules[RUNNER]
    # What is there by now is never garbage: forks share it for as long as nobody looks.
    gc.collect()
    gc.freeze()
    # Nobody waits for the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Ctrl-C is for those who started us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Later Pythons warn of what is common here: libraries have threads, which do not mind forks.
    warnings.simplefilter("ignore", DeprecationWarning)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"{folder}/socket")
        listening.listen()
        while listening in select.select([sys.stdin, listening], [], [])[0]:
            asking, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                os._exit(_run(asking))
            asking.close()
    # Whoever closes us does this too, but it may have been killed.
    shutil.rmtree(folder, ignore_errors=True)


def _run(asking: socket.socket) -> int:
    """Be the process that was asked for, to its end."""
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if not _become(asking):
        return 1
    threading.Thread(target=_end_with, args=[asking], daemon=True).start()
    code = 0
    try:
        runpy.run_module(RUNNER, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError):
        asking.send(bytes([code]))
    return code


def _become(asking: socket.socket) -> bool:
    """Take the folder, the environment and the streams of who asks; False if it is gone."""
    said, streams, _, _ = socket.recv_fds(asking, 4, _STANDARD_STREAMS)
    if not said:
        return False
    with asking.makefile("rb") as file:
        text = file.read(int.from_bytes(said, "big"))
    folder, *variables = text.split(b"\0")
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environb.clear()
    for name, _, value in (each.partition(b"=") for each in variables):
        os.environb[name] = value
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in paths if each and each not in sys.path]
    return True


def _end_with(asking: socket.socket) -> None:
    """Spark ends the program it started; then there is no need for us."""
    asking.recv(1)
    os._exit(1)
