"""The numbers of running flows for Prometheus, over HTTP.

Labels are bounded: the names of the flows that were declared. A flow whose output is rebuilt has
its second query under its name with `-rebuild` behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.metrics.exposition import CONTENT_TYPE, Family
from penstock.cli.sinks_view import families as of_sinks
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.spark.flows.manager import Status

TIMEOUT_S: Final = 5.0
STATES: Final = ("starting", "running", "waiting", "stopping", "stopped", "failed", "finished")


def expose(statuses: Sequence[Status]) -> bytes:
    """All metrics as text."""
    families = {
        "in": Family("penstock_flow_rows_in_total", "counter", "Rows that the flow has read."),
        "out": Family("penstock_flow_rows_out_total", "counter", "Rows that it has written."),
        "dead": Family("penstock_flow_dead_letters_total", "counter",
                       "Records that could not be read and went to the dead-letter topic."),
        "late": Family("penstock_flow_late_rows_total", "counter",
                       "Rows that came too late for the watermark."),
        "set_aside": Family("penstock_flow_set_aside_rows", "gauge",
                            "Rows of views that cannot be computed as they are now."),
        "batches": Family("penstock_flow_batches_total", "counter", "Micro-batches completed."),
        "restarts": Family("penstock_flow_restarts_total", "counter",
                           "How often the flow was started again after a failure."),
        "lag": Family("penstock_flow_lag_records", "gauge",
                      "Records in the log that the flow has not read yet."),
        "batch_s": Family("penstock_flow_batch_seconds", "gauge",
                          "How long the last micro-batch took."),
        "watermark": Family("penstock_flow_watermark_timestamp_seconds", "gauge",
                            "The watermark as seconds since 1970."),
        "rows": Family("penstock_flow_state_rows", "gauge", "Rows that are kept as state."),
        "bytes": Family("penstock_flow_state_bytes", "gauge", "Memory that the state takes."),
        "state": Family("penstock_flow_state", "gauge",
                        "1 for the state that the flow is in, 0 for the others."),
    }  # fmt: skip
    sinks: list[Any] = [each for each in statuses if hasattr(each, "store")]
    for each in (each for each in statuses if not hasattr(each, "store")):
        labels = {"flow": f"{each.name}-rebuild" if each.rebuilding else each.name}
        numbers = each.progress
        families["in"].add(numbers.rows_in, labels)
        families["out"].add(numbers.rows_out, labels)
        families["dead"].add(numbers.dead_letters, labels)
        families["late"].add(numbers.late_rows, labels)
        families["set_aside"].add(numbers.set_aside, labels)
        families["batches"].add(numbers.batches, labels)
        families["restarts"].add(each.restarts, labels)
        if numbers.lag is not None:
            families["lag"].add(numbers.lag, labels)
        families["batch_s"].add(numbers.batch_ms / 1000, labels)
        watermark_s = numbers.watermark_s()
        if watermark_s is not None:
            families["watermark"].add(watermark_s, labels)
        families["rows"].add(numbers.state_rows, labels)
        families["bytes"].add(numbers.state_bytes, labels)
        for state in STATES:
            families["state"].add(int(each.state == state), {**labels, "state": state})
    every = [*families.values(), *(of_sinks(sinks) if sinks else ())]
    lines = [line for family in every for line in family.lines()]
    return "".join(f"{line}\n" for line in lines).encode()


class MetricsServer:
    """`/metrics`, and `/healthz`: whether no flow has failed; a context manager."""

    def __init__(self, host: str, port: int, look: Callable[[], Sequence[Status]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            # A connection that says nothing does not hold up the next for longer.
            timeout = TIMEOUT_S

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                status, kind, body = HTTPStatus.OK, "text/plain; charset=utf-8", b"ok\n"
                if path == "/metrics":
                    kind, body = CONTENT_TYPE, expose(look())
                elif path == "/healthz":
                    failed = [each for each in look() if each.state == "failed"]
                    if failed:
                        status = HTTPStatus.SERVICE_UNAVAILABLE
                        body = "".join(f"{each.name}: {each.error}\n" for each in failed).encode()
                else:
                    status, body = HTTPStatus.NOT_FOUND, b"see /metrics and /healthz\n"
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(ConnectionError):
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Who asks is nobody's concern."""

        try:
            self._server = HTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}",
                advice="Choose another address with --metrics, or stop what uses this one.",
            ) from error
        self._host = host
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="flows-metrics", daemon=True
        )

    @property
    def address(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}/metrics"

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(TIMEOUT_S)
        self._server.server_close()
