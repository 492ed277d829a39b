"""What can go wrong with windows."""

from __future__ import annotations

from penstock.errors import PenstockError


class WindowError(PenstockError):
    """A window cannot be computed from what came."""
