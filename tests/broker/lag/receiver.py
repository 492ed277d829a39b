"""An HTTP server that takes alerts, for tests of whoever sends them."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

TIMEOUT_S = 60.0


class Receiver:
    """Answers with the statuses it is given, and 200 after them; waits while its gate is shut."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        # Content type and message of each request.
        self.got: list[tuple[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.headers["Content-Type"], orjson.loads(body)))
                receiver.gate.wait(TIMEOUT_S)
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the tests say what is wrong."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/alerts"

    @property
    def messages(self) -> list[Any]:
        return [message for _, message in self.got]

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
