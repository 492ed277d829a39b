"""The pages of docs/ as programs: their code blocks, taken in the order in which a reader has them.

What a block is says the word behind its language; a block without one is only shown.

    ```python file=flows.py      a file in the reader's folder; any language
    ```console run               commands; lines below a command are what it prints
    ```python run                a program; a block `text output` below it is what it prints
    ```python test               tests of flows, called with a tester as pytest would

A line `...` in what is printed stands for any lines; what `penstock consume` prints may come in
another order, for flows promise none over different keys. Commands run in this process, those of
Spark on the session that all tests share, and know the page's own broker as 127.0.0.1:9092.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.testing.flows import FlowTester
from tests.cli.runner import run as run_penstock

SHOWN_BOOTSTRAP: Final = re.compile(r"(?:127\.0\.0\.1|localhost):9092")
_FENCE: Final = re.compile(r"^(\s*)```(\w*)[ ]*(.*)$")
_REDIRECT: Final = re.compile(r"\s<\s*(\S+)\s*$")
_TIMEOUT_S: Final = 60


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    word: str
    text: str
    # The line of its first line, from 1.
    line: int


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, lines = list[Block](), page.splitlines()
    at = 0
    while at < len(lines):
        opened = _FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        indent, language, word = opened.groups()
        end = next(each for each in range(at + 1, len(lines)) if lines[each].strip() == "```")
        body = "\n".join(each.removeprefix(indent) for each in lines[at + 1 : end])
        found.append(Block(language, word.strip(), body + "\n", at + 2))
        at = end + 1
    return found


def is_run(block: Block) -> bool:
    return block.word in {"run", "test"}


@dataclass(slots=True)
class Reader:
    """Somebody who does what a page says, in a folder of his own."""

    page: Path
    folder: Path
    bootstrap: str
    tester: Callable[[], FlowTester]
    names: dict[str, Any] = field(default_factory=dict)

    def read(self) -> None:
        """Do all of it; an AssertionError names the line of the page."""
        found = blocks(self.page.read_text())
        for block, after in zip(found, [*found[1:], None], strict=True):
            kind, _, name = block.word.partition("=")
            if kind == "file":
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._here(block.text))
            elif block.language == "console" and kind == "run":
                self._commands(block)
            elif block.language == "python" and kind == "run":
                wanted = after.text if after is not None and after.word == "output" else ""
                self._program(block, wanted)
            elif kind == "test":
                self._tests(block)

    def _here(self, text: str) -> str:
        return SHOWN_BOOTSTRAP.sub(self.bootstrap, text)

    def _where(self, line: int) -> str:
        return f"{self.page.name}:{line}"

    # ---- commands ------------------------------------------------------------------------

    def _commands(self, block: Block) -> None:
        for line, command, shown in commands(block):
            status, printed, told = self._command(self._here(command))
            where = f"{self._where(line)}: {command}"
            assert status == 0, f"{where}\nstatus {status}\n{printed}{told}"
            lines, wanted = printed.splitlines(), shown
            if command.startswith("penstock consume") and "..." not in shown:
                # After a try that failed a dead letter may be there twice.
                once = set(lines) if ".dead" in command else lines
                lines, wanted = sorted(once), sorted(shown)
            if wanted:
                same(lines, wanted, where)

    def _command(self, command: str) -> tuple[int, str, str]:
        fed = b""
        before, bar, last = command.rpartition(" | ")
        if bar and last.startswith("penstock ") and not before.startswith("penstock "):
            fed, command = self._shell(before)[1].encode(), last
        if not command.startswith("penstock ") or " | " in command:
            return self._shell(command)
        if redirect := _REDIRECT.search(command):
            fed = (self.folder / redirect[1]).read_bytes()
            command = command[: redirect.start()]
        ran = run_penstock(*shlex.split(command, comments=True)[1:], stdin=fed)
        return ran.status, ran.out, ran.err

    def _shell(self, command: str) -> tuple[int, str, str]:
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        return ran.returncode, ran.stdout, ran.stderr

    # ---- programs ------------------------------------------------------------------------

    def _program(self, block: Block, wanted: str) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(self._compiled(block), self.names)
        if wanted:
            same(printed.getvalue().splitlines(), wanted.splitlines(), self._where(block.line))

    def _tests(self, block: Block) -> None:
        names: dict[str, Any] = {}
        exec(self._compiled(block), names)
        found = [each for name, each in names.items() if name.startswith("test_")]
        assert found, f"{self._where(block.line)}: no tests"
        for each in found:
            each(**{name: self.tester() for name in inspect.signature(each).parameters})

    def _compiled(self, block: Block) -> Any:
        # The lines of errors are those of the page.
        text = "\n" * (block.line - 1) + self._here(block.text)
        return compile(text, str(self.page), "exec")


def commands(block: Block) -> Iterator[tuple[int, str, list[str]]]:
    """The commands of a block: line, command, and what it prints."""
    command, start, wanted = "", 0, list[str]()
    for number, line in enumerate(block.text.splitlines(), block.line):
        if line.startswith("$ "):
            if command:
                yield start, command, wanted
            command, start, wanted = line[2:], number, []
        elif command.endswith("\\"):
            command = command[:-1] + line.strip()
        else:
            wanted.append(line.rstrip())
    if command:
        yield start, command, wanted


def same(printed: Sequence[str], wanted: Sequence[str], where: str) -> None:
    """Whether something was printed as the page shows it."""
    shown = [re.escape(each.rstrip()) + "\n" for each in wanted if each.strip()]
    pattern = "".join(r"(?:.*\n)*?" if each == re.escape("...") + "\n" else each for each in shown)
    text = "".join(f"{each.rstrip()}\n" for each in printed if each.strip())
    if re.fullmatch(pattern, text) is None:
        raise AssertionError(f"{where}\nprints\n{text}and not\n" + "\n".join(wanted))
