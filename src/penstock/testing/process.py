"""A broker as a process of its own: to be killed, stopped and started again.

    with BrokerProcess(data, durability="disk") as broker:
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        broker.kill()
        broker.start()

Its settings are those of `penstock.broker.config.BrokerConfig` as JSON can say them. It keeps its
port (see `ports`) over restarts, so clients find it again. What it logs goes to a file beside its
data.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import penstock
from penstock.errors import PenstockError
from penstock.testing.ports import lasting_port

_STOP_TIMEOUT_S: Final = 60.0


class BrokerProcess:
    """One broker in a child process."""

    def __init__(self, data: str | Path, **settings: Any) -> None:
        self.data = Path(data)
        self.log_file = self.data.with_name(self.data.name + ".log")
        self._settings: dict[str, Any] = {"port": 0, **settings}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """What goes into `bootstrap.servers`."""
        return f"{self._settings.get('host', '127.0.0.1')}:{self._settings['port']}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not running"
        return self._process.pid

    def start(self) -> Self:
        """Start; ready for clients on return."""
        is_new = not self._settings["port"]
        self.launch()
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line.isdigit():
            self.kill()
            if is_new and "cannot listen" in self.log_text():
                # Somebody took the port in between.
                self.log_file.unlink()
                self._settings["port"] = 0
                return self.start()
            raise PenstockError(f"the broker did not start:\n{self.log_text()[-4000:]}")
        self._settings["port"] = int(line)
        return self

    def launch(self) -> None:
        """Begin to start, and wait for nothing."""
        if not self._settings["port"]:
            self._settings["port"] = lasting_port(self._settings.get("host", "127.0.0.1"))
        place = str(Path(penstock.__file__).parent.parent)
        known = os.environ.get("PYTHONPATH")
        path = f"{place}{os.pathsep}{known}" if known else place
        settings = json.dumps({"data": str(self.data), **self._settings})
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.testing.process", settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
            )

    def kill(self) -> None:
        """End it at once, with SIGKILL: it has no chance to do anything."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Ask it to stop, with SIGTERM, and wait; its exit status."""
        return self._end(signal.SIGTERM)

    def log_text(self) -> str:
        """All that it has logged so far, in all its lives."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            return process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise PenstockError("the broker did not stop in time") from None
        finally:
            assert process.stdout is not None
            process.stdout.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def main() -> None:
    """The child: a broker with the settings in the first argument; prints its port when ready."""
    from penstock.broker.main import Broker, BrokerConfig, Limits, serve

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = json.loads(sys.argv[1])
    limits = Limits(**settings.pop("limits", {}))

    def ready(broker: Broker) -> None:
        print(broker.port, flush=True)

    serve(BrokerConfig(limits=limits, **settings), ready)


if __name__ == "__main__":
    main()
