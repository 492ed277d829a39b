"""Asking and commanding flows that run in another process of this machine.

A Unix socket in a folder that only its owner can enter. One question a connection: a line of JSON,
answered by a line of JSON, `{"answer": ...}` or `{"error": ..., "advice": ...}`. The socket's path
stands in `run.json`, since the data folder's own may be too long for one.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.errors import PenstockError
from penstock.spark.flows.errors import FlowError, NotRunningError
from penstock.spark.flows.folder import Folder

log = logging.getLogger(__name__)

MAX_QUESTION_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 16 << 20
MAX_WAITING: Final = 8
# A connection that says nothing does not hold up the next for longer.
QUESTION_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 120.0

Question = dict[str, Any]


class ControlServer:
    """Answers questions, one at a time, for as long as it is open; a context manager."""

    def __init__(self, folder: Folder, answer: Callable[[Question], Any]) -> None:
        self._folder = folder
        self._answer = answer
        self._place = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._serve, name="flows-control", daemon=True)
        self._closing = False

    def __enter__(self) -> ControlServer:
        path = self._place / "control"
        self._socket.bind(str(path))
        self._socket.listen(MAX_WAITING)
        self._folder.write_run({"pid": os.getpid(), "socket": str(path)})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._folder.remove_run()
        # Wakes the thread up where closing alone would not.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waker:
            waker.connect(str(self._place / "control"))
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(QUESTION_TIMEOUT_S)
        self._socket.close()
        shutil.rmtree(self._place, ignore_errors=True)

    def _serve(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                with suppress(OSError):
                    self._handle(connection)

    def _handle(self, connection: socket.socket) -> None:
        connection.settimeout(QUESTION_TIMEOUT_S)
        line = _line(connection, MAX_QUESTION_BYTES)
        if not line:
            return
        try:
            question = orjson.loads(line)
            if not isinstance(question, dict):
                raise FlowError("the question is not a JSON object")
            reply: dict[str, Any] = {"answer": self._answer(question)}
        except PenstockError as error:
            reply = {"error": str(error), "advice": error.advice}
        except orjson.JSONDecodeError:
            reply = {"error": "the question is not JSON", "advice": ""}
        except Exception as error:  # the next question must still be answered
            log.exception("answering %r", line[:200])
            reply = {"error": f"{type(error).__name__}: {error}", "advice": "See its log."}
        connection.sendall(orjson.dumps(reply) + b"\n")


def ask(folder: Folder, question: Question) -> Any:
    """The answer of the process that runs flows with this folder; NotRunningError if none does."""
    found = folder.run()
    if found is None:
        raise _nobody(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(found.get("socket", "")))
        except (FileNotFoundError, ConnectionError):
            # It was killed, and what it had written of itself is left over.
            raise _nobody(folder) from None
        try:
            connection.sendall(orjson.dumps(question) + b"\n")
            line = _line(connection, MAX_ANSWER_BYTES)
        except OSError as error:
            raise NotRunningError(
                f"the process {found['pid']}, which runs the flows, does not answer: {error}",
                advice="It may be busy, or stopping; try again.",
            ) from error
    if not line:
        raise _nobody(folder)
    reply = orjson.loads(line)
    if "error" in reply:
        raise FlowError(str(reply["error"]), advice=str(reply.get("advice", "")))
    return reply["answer"]


def _nobody(folder: Folder) -> NotRunningError:
    return NotRunningError(
        f"no `penstock run` works with {folder.path}",
        advice="Start it with `penstock run FILE`, or name its folder with --data.",
    )


def _line(connection: socket.socket, most: int) -> bytes:
    """What is sent up to the end of the line; empty if the other side says nothing."""
    parts = bytearray()
    while not parts.endswith(b"\n"):
        data = connection.recv(65536)
        if not data:
            return b""
        parts += data
        if len(parts) > most:
            raise OSError("the line is too long")
    return bytes(parts)
