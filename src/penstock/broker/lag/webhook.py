"""Alerts to a URL, as JSON by POST, from a thread of its own.

The broker hands an alert over and goes on; it never waits for the other side. What waits to be
sent is bounded: when the other side is slower than alerts come, the oldest that wait are dropped
and counted. An attempt has a time-out, and after a few attempts an alert is given up: by then the
next one says more. Answers of 4xx are not asked for again, except 408 and 429.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

log = logging.getLogger(__name__)

MAX_WAITING: Final = 100
ATTEMPTS: Final = 4
TIMEOUT_S: Final = 5.0
_FIRST_PAUSE_S: Final = 1.0
_CLOSE_PATIENCE_S: Final = 1.0
_WORTH_ANOTHER_TRY: Final = frozenset({408, 429})


class Webhook:
    """One URL. The thread starts with the first alert."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = TIMEOUT_S,
        first_pause_s: float = _FIRST_PAUSE_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._url = url
        # For the log; the rest of a URL is often a secret.
        self._host = urlsplit(url).hostname
        self._timeout_s = timeout_s
        self._first_pause_s = first_pause_s
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.sent = 0
        self.failed = 0
        self.dropped = 0

    def post(self, message: Mapping[str, Any]) -> None:
        """Have a message sent soon; returns at once."""
        with self._changed:
            if self._closing.is_set():
                return
            if len(self._waiting) >= self._max_waiting:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Send no more; an attempt that is under way is left to itself."""
        with self._changed:
            self._closing.set()
            self._waiting.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_PATIENCE_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
                if self._closing.is_set():
                    return
                message = self._waiting.popleft()
            try:
                delivered = self._deliver(orjson.dumps(message))
            except Exception:
                # A bug; the next alert must still find this thread.
                log.exception("telling %s of an alert", self._host)
                delivered = False
            if delivered:
                self.sent += 1
            else:
                self.failed += 1

    def _deliver(self, body: bytes) -> bool:
        pause_s = self._first_pause_s
        for attempt in range(1, ATTEMPTS + 1):
            problem, final = self._attempt(body)
            if problem is None:
                return True
            if final or attempt == ATTEMPTS or self._closing.wait(pause_s):
                log.warning("an alert could not be sent to %s: %s", self._host, problem)
                return False
            pause_s *= 2
        return False

    def _attempt(self, body: bytes) -> tuple[str | None, bool]:
        """What went wrong, if anything, and whether there is no use in trying again."""
        # Here, because most brokers never need it and it takes long to load.
        import urllib.error
        import urllib.request

        headers = {"Content-Type": "application/json", "User-Agent": "penstock"}
        request = urllib.request.Request(self._url, body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s):
                return None, False
        except urllib.error.HTTPError as error:
            error.close()
            refused = 400 <= error.code < 500 and error.code not in _WORTH_ANOTHER_TRY
            return f"it answers {error.code}", refused
        except (OSError, ValueError) as error:
            # URLError and time-outs are OSErrors; a broken answer is a ValueError or HTTPException.
            return str(error), False
        except Exception as error:
            return repr(error), False
