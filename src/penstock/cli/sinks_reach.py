"""Whether stores answer, asked before Spark is started for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import typer

from penstock.cli import output
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.sinks.spec import SinkSpec

    Answers = SimpleQueue[tuple[SinkSpec, PenstockError | None]]

# Longer than this, and it is told what is waited for.
_SILENT_S: Final = 2.0


def must_reach_some(specs: Sequence[SinkSpec], data: Path) -> None:
    """End here, with what is wrong, if no store of these answers: there is nothing to do then.

    If one does it is fed at once, and the others are tried again beside it.
    """
    from penstock.spark.sinking.folder import SinkFolder

    folder = SinkFolder(data)
    wanted = [spec for spec in specs if not folder.sink(spec.name).paused]
    answers: Answers = SimpleQueue()
    for spec in wanted:
        # One that does not answer for a long time must hold up neither the start nor the end.
        threading.Thread(target=_ask, args=(spec, answers), daemon=True).start()
    away: dict[str, PenstockError] = {}
    while len(away) < len(wanted):
        spec, error = _next(answers, [each for each in wanted if each.name not in away])
        if error is None:
            return
        away[spec.name] = error
    for spec in wanted:
        told = PenstockError(f"sink {spec.name}: {away[spec.name]}", advice=away[spec.name].advice)
        output.fail(told)
    if away:
        raise typer.Exit(output.EXIT_FAILURE)


def _next(answers: Answers, waiting: Sequence[SinkSpec]) -> tuple[SinkSpec, PenstockError | None]:
    try:
        return answers.get(timeout=_SILENT_S)
    except Empty:
        output.say(f"waiting for an answer of {', '.join(each.shown for each in waiting)}")
        return answers.get()


def _ask(spec: SinkSpec, answers: Answers) -> None:
    """Why a store does not answer; None if it does. Whatever else is wrong is told later."""
    from penstock.sinks.errors import StoreAwayError

    away: PenstockError | None = None
    try:
        with spec.sink() as sink:
            sink.position()
    except StoreAwayError as error:
        away = error
    except Exception:
        away = None
    answers.put((spec, away))
