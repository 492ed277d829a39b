"""The captures of a project file, run beside the broker of `penstock up`.

Each is a process of its own (`penstock capture run NAME`), so that none slows the broker or another
down. One that ends with an error stays ended: it has tried again for as long as that could help.
They are stopped before the broker is, so that they can still write what they have. Their input is
a pipe from us: if we are killed it ends, and they stop by themselves.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import Final

from penstock.cli.project import Project

STOP_TIMEOUT_S: Final = 20.0
_LOGGER = logging.getLogger(__name__)


class Beside:
    """Processes that run as long as the broker does."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = False
        self._bootstrap = ""

    @property
    def names(self) -> list[str]:
        return list(self._project.named("capture"))

    def start(self, bootstrap: str) -> None:
        """Start them all; what they say goes where our own words go."""
        self._bootstrap = bootstrap
        # They run in its folder, from where a relative path would mean another file.
        path = self._project.path and self._project.path.resolve()
        for name in self.names:
            command = [
                *(sys.executable, "-m", "penstock.cli", "capture", "run", name, "--plain"),
                *("--bootstrap", bootstrap, "--project", str(path), "--beside"),
            ]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, start_new_session=True, cwd=self._project.folder
            )
            self._processes[name] = process
            threading.Thread(
                target=self._watch, args=(name, process), name=f"capture-{name}", daemon=True
            ).start()

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if status and not self._stopping:
            _LOGGER.error(
                "capture %s has ended with status %d, see above; when that is mended, start it "
                "again: penstock capture run %s --bootstrap %s",
                name,
                status,
                name,
                self._bootstrap,
            )

    def stop(self) -> None:
        """Ask all of them to stop, and wait; whoever does not is ended."""
        self._stopping = True
        for process in self._processes.values():
            process.terminate()
        for name, process in self._processes.items():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _LOGGER.warning("capture %s does not stop; it is ended", name)
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
