"""Dead letters as people see them: of queues, flows and sinks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import output
from penstock.cli.kafka import Connection
from penstock.cli.values import show_time
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.cli.dead_letters import Letter, LetterKind, Outcome

Letters = Annotated[
    int,
    typer.Option("--letters", "-n", min=0, metavar="N", help="Show the last N dead letters."),
]
Execute = Annotated[
    bool, typer.Option("--execute", help="Do it. Without this, only say what would be done.")
]
To = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="TOPIC", help="Send them there, instead of to where they came from."
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Send at most N.")]
SHOWN_LETTERS: Final = 10


def show(
    connection: Connection,
    owner: str,
    topics: Sequence[str],
    wanted: Callable[[LetterKind], bool],
    *,
    count: int,
    json: bool,
) -> None:
    """Show how many dead letters there are in some topics, and the last of them."""
    from penstock.cli.dead_letters import Reader

    counts: Counter[LetterKind] = Counter()
    last: deque[Letter] = deque(maxlen=count)
    for topic in topics:
        if not exists(connection, topic):
            continue
        reader = Reader(connection, topic)
        try:
            for letter in reader.letters():
                if wanted(letter.kind):
                    counts[letter.kind] += 1
                    last.append(letter)
        finally:
            reader.close()
    if json:
        kinds = [{"topic": kind.topic, "count": number} for kind, number in sorted(counts.items())]
        output.write_json(
            {"of": owner, "topics": list(topics), "dead_letters": kinds,
             "letters": [letter_json(each) for each in last]}
        )  # fmt: skip
    elif counts:
        print_counts(counts, "dead letters", f"dead letters in {', '.join(topics)}")
        print_letters(last)
    else:
        output.say(f"{owner} has no dead letters in {', '.join(topics) or 'any topic'}")


def send_back(
    connection: Connection,
    topics: Iterable[str],
    wanted: Callable[[LetterKind], bool],
    *,
    execute: bool,
    limit: int | None,
    to: str | None,
    json: bool,
) -> None:
    """Send the letters of some topics back, or say what would be sent."""
    from penstock.cli import dead_letters

    there = [topic for topic in topics if exists(connection, topic)]
    if not there:
        raise PenstockError("there is no dead-letter topic", advice="No record has gone aside yet.")
    whole = dead_letters.Outcome()
    for topic in there:
        left = None if limit is None else limit - whole.sent.total()
        if left == 0:
            break
        whole.add(
            dead_letters.redrive(connection, topic, wanted, execute=execute, limit=left, target=to)
        )
    tell(whole, execute=execute, json=json)


def exists(connection: Connection, topic: str) -> bool:
    return topic in connection.admin().list_topics(timeout=10).topics


def letter_json(letter: Letter) -> dict[str, Any]:
    return {
        "topic": letter.kind.topic,
        "partition": letter.source_partition,
        "offset": letter.source_offset,
        "reason": letter.kind.reason,
        "message": letter.message,
        "deliveries": letter.delivery_count,
        "time_ms": letter.timestamp_ms,
        "key": output.json_bytes(letter.key),
        "value": output.json_bytes(letter.value),
        "headers": {name: output.json_bytes(value) for name, value in letter.headers},
    }


def print_counts(counts: Counter[LetterKind], column: str, title: str = "") -> None:
    output.print_table(
        ("from topic", "reason", f">{column}"),
        ((kind.topic, kind.reason, str(count)) for kind, count in sorted(counts.items())),
        title=title,
    )


def print_letters(letters: deque[Letter]) -> None:
    output.print_table(
        ("died", "record", ">deliveries", "why", "key", "value"),
        (
            (
                show_time(letter.timestamp_ms),
                f"{letter.kind.topic}-{letter.source_partition}@{letter.source_offset}",
                _number(letter.delivery_count),
                letter.message,
                _short(letter.key),
                _short(letter.value),
            )
            for letter in letters
        ),
    )


def tell(outcome: Outcome, *, execute: bool, json: bool) -> None:
    if json:
        output.write_json(
            {
                "executed": execute,
                "sent": outcome.sent.total(),
                "sent_before": outcome.before.total(),
                "without_record": outcome.bare.total(),
                "kinds": [
                    {"topic": kind.topic, "reason": kind.reason, "count": count}
                    for kind, count in sorted(outcome.sent.items())
                ],
            }
        )
        return
    if outcome.sent:
        print_counts(outcome.sent, "sent back" if execute else "to send back")
    said = "sent back" if execute else "would send back"
    output.say(f"{said} {outcome.sent.total()} dead letters")
    if outcome.before:
        output.say(f"{outcome.before.total()} were sent back before")
    if outcome.bare:
        output.warn(
            f"{outcome.bare.total()} say only where their record is and cannot be sent back; "
            "errors.deadletterqueue.copy.record.enable=true of a queue keeps them in the letters"
        )
    if outcome.sent and not execute:
        output.say("run it again with --execute to do it")


def _short(data: bytes | None) -> str:
    text = output.text_bytes(data)
    return text if len(text) <= 60 else text[:59] + "…"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
