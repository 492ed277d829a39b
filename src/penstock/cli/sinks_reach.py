"""Whether stores answer, asked before Spark is started for them, or before anything is changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar, cast

import typer

from penstock.cli import output
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.sinks import Sink
    from penstock.sinks.spec import SinkSpec

    Answers = SimpleQueue[tuple[SinkSpec, PenstockError | None]]

T = TypeVar("T")

# Longer than this, and it is told what is waited for.
_SILENT_S: Final = 2.0
# One that has said nothing for so long counts as away: clients wait for minutes, as is right for
# those who write, and not for a person who asks.
ANSWER_S: Final = 15.0


def answer_of(spec: SinkSpec, ask: Callable[[Sink], T]) -> T:
    """What a store answers; StoreAwayError if it is silent for too long."""
    from penstock.sinks.errors import StoreAwayError

    answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            with spec.sink() as sink:
                answers.put((ask(sink), None))
        except BaseException as error:  # raised by whoever waits
            answers.put((None, error))

    threading.Thread(target=work, name="ask-store", daemon=True).start()
    try:
        found, error = answers.get(timeout=ANSWER_S)
    except Empty:
        raise StoreAwayError(f"{spec.shown} does not answer within {ANSWER_S:.0f} s") from None
    if error is not None:
        raise error
    return cast("T", found)


def must_answer(spec: SinkSpec) -> None:
    """StoreAwayError if a store is not there, before anything is asked of it that takes time."""
    answer_of(spec, lambda sink: sink.position())


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
        must_answer(spec)
    except StoreAwayError as error:
        away = error
    except Exception:
        away = None
    answers.put((spec, away))
