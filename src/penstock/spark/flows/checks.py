"""What is said in a declaration, checked while it is declared: the error names the user's line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.source.options import parse

if TYPE_CHECKING:
    from penstock.spark.flows.dead_letters import DeadLetterLimit
    from penstock.spark.flows.declare import Flow

_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")


def source_options(
    topic: str, options: Mapping[str, str] | None, *, streaming: bool = True
) -> dict[str, str]:
    """The options of the source, as texts; DeclarationError if it does not know one, or its value.

    Found out here, and not when Spark runs: by then a wrong option would be an error of the query.
    """
    if not options:
        return {}
    if not isinstance(options, Mapping):
        raise DeclarationError(
            f"{topic!r}: options={options!r} are no options",
            advice='Give them by name, as in options={"maxOffsetsPerTrigger": "100000"}.',
        )
    found = {str(name): str(value) for name, value in options.items()}
    place = {"kafka.bootstrap.servers": "localhost:9092", "subscribe": topic}
    try:
        parse(place | found, streaming=streaming)
    except PenstockError as error:
        raise DeclarationError(f"{topic!r}, options: {error}", advice=error.advice) from error
    return found


def check_texts(what: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise DeclarationError(
                f"{what}: {name}={value!r} is no text", advice=f'Write it in quotes: {name}="...".'
            )


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_topic(name: Any) -> None:
    if not isinstance(name, str) or not _TOPIC.fullmatch(name) or name in {".", ".."}:
        raise DeclarationError(
            f"{name!r} is no name of a topic",
            advice="A name has 1 to 249 letters, digits, dots, dashes and underscores.",
        )


def check_limit(limit: DeadLetterLimit, place: str) -> None:
    """DeclarationError for a limit of dead letters that is none."""
    # What a user gives may be anything.
    share: Any = limit.share
    count: Any = limit.count
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise DeclarationError(
            f"{place}: max_dead_share={share!r} is no share",
            advice="Give a number above 0, up to 1: 0.5 is half of the records, 1 never stops.",
        )
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise DeclarationError(
            f"{place}: max_dead_letters={count!r} is no number of records",
            advice="Give a whole number from 1, or None for any number.",
        )


def check_names(made: Flow, place: str) -> None:
    """DeclarationError for a flow that reads what it writes, or writes a topic twice."""
    written = [each.name for each in made.topics]
    read = {each.topic for each in made.inputs}
    for target in written:
        if written.count(target) > 1:
            raise DeclarationError(f"{place} has two outputs to topic {target!r}")
        if target in read:
            raise DeclarationError(
                f"{place} writes topic {target!r}, which it reads: it would never come to an end",
                advice="Write to another topic.",
            )


def check_parameters(made: Flow, place: str) -> None:
    """DeclarationError for a function that does not take the inputs."""
    try:
        inspect.signature(made.function).bind(*made.inputs)
    except TypeError:
        takes = ", ".join(inspect.signature(made.function).parameters)
        raise DeclarationError(
            f"{place} has {len(made.inputs)} inputs, but its function takes ({takes})",
            advice="Give the function one parameter for each input, in the same order.",
        ) from None
