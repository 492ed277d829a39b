"""Groups that nobody reads with: the commands keep their progress as committed offsets.

Sending dead letters back (`penstock queue redrive`) and moving topics (`penstock migrate`) leave
such a group behind, for the next time. It falls behind whatever is written and loses nothing by
that, so it is neither measured nor shown among the groups that read.
"""

from __future__ import annotations

from typing import Final

PROGRESS_PREFIXES: Final = ("penstock-redrive/", "penstock-migrate-")


def keeps_progress(group: str) -> bool:
    """Whether a group is only a command's progress."""
    return group.startswith(PROGRESS_PREFIXES)
