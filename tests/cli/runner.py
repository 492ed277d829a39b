"""Run the command in this process, as a shell would see it: status, output, errors."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import orjson

from penstock.cli.main import main


@dataclass(frozen=True, slots=True)
class Ran:
    """What came out of a command."""

    status: int
    out_bytes: bytes
    err: str

    @property
    def out(self) -> str:
        return self.out_bytes.decode()

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        return orjson.loads(self.out_bytes)

    @property
    def json_lines(self) -> list[Any]:
        return [orjson.loads(line) for line in self.out_bytes.splitlines()]

    def ok(self) -> Ran:
        """Itself, having checked that the command succeeded."""
        assert self.status == 0, f"status {self.status}: {self.err}"
        return self


def run(*args: str, stdin: bytes = b"") -> Ran:
    """`penstock ARGS`, with `stdin` piped in."""
    out, err = io.BytesIO(), io.BytesIO()
    status = 0
    # Kept by name: a wrapper that is thrown away closes what was captured.
    out_text = io.TextIOWrapper(out, write_through=True)
    err_text = io.TextIOWrapper(err, write_through=True)
    with (
        patch.object(sys, "argv", ["penstock", *args]),
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        patch.object(sys, "stdout", out_text),
        patch.object(sys, "stderr", err_text),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Ran(status, out.getvalue(), err.getvalue().decode())
