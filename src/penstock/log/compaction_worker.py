"""The child process that compacts, so that the broker's interpreter is never held.

    python -m penstock.log.compaction_worker

It reads one line of JSON, `{"folder": …, "job": …}`, from its standard input, runs the pass at
the lowest priority, and writes one line to its standard output: `{"result": …}`, or `{"error": …}`
with what went wrong. It touches the segments of that folder and nothing else.

The input stays open while it works. When it closes, the parent has stopped or was killed, and
the child ends at once: what it has written so far is thrown away at the next start. It begins
only once it holds the folder against others and its parent is still there, so the child of a
broker that was killed never meddles with what the next one does.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from select import select
from typing import IO, Any

from penstock.errors import PenstockError
from penstock.log.compaction import Job, compact
from penstock.log.disk import OsDisk

_LOWEST_PRIORITY = 19


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    os.nice(_LOWEST_PRIORITY)
    request = json.loads(line)
    if not _alone(request["folder"]) or select([sys.stdin.buffer], [], [], 0)[0]:
        return 1
    watcher = threading.Thread(target=_end_with_parent, args=(sys.stdin.buffer,), daemon=True)
    watcher.start()
    try:
        sys.stdout.write(json.dumps(answer(request)) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The parent is gone, and nobody wants the answer.
        return 1
    return 0


def _alone(folder: str) -> bool:
    """Whether no other child works here; from now on none does until this one has ended.

    A broker that was killed may be back before its child has noticed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked for; errors that are nobody's fault come back as text."""
    try:
        result = compact(OsDisk(), request["folder"], Job.from_json(request["job"]))
    except (PenstockError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"result": result.to_json()}


def _end_with_parent(stream: IO[bytes]) -> None:
    stream.read()
    os._exit(1)


if __name__ == "__main__":
    # The watcher still waits for the parent: do not wait for it.
    os._exit(main())
