"""What a process that does nothing but run a capture sets up for itself."""

from __future__ import annotations

import gc


def settle() -> None:
    """Let the garbage collector look less often: rows are many small tuples, none in a cycle, and
    looking at those that wait in the handover took a tenth of a capture's time. To be called when
    everything is imported, and only by who owns the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
