"""The end of a server that a test has started: asked, waited for, and killed if it does not go."""

from __future__ import annotations

import signal
import subprocess
from typing import Any


def end(process: subprocess.Popen[Any], number: signal.Signals, timeout_s: float) -> bool:
    """Send a signal and wait; whether it went in time. It is gone afterwards in any case."""
    process.send_signal(number)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True
