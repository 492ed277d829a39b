"""`penstock migrate`: move topics, records, group offsets and captures to another cluster.

The work is done by `penstock.cli.migration`; here is what a person sees of it: the plan, the
progress, the summary, and what Ctrl-C means.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import output
from penstock.cli.kafka import (
    BOOTSTRAP_VARIABLE,
    DEFAULT_BOOTSTRAP,
    AsJson,
    chosen_bootstrap,
    complete_topics,
    connect,
)

if TYPE_CHECKING:
    from penstock.cli.migration.engine import Migration, Reporter, Summary
    from penstock.cli.migration.groups import Group
    from penstock.cli.migration.plan import TopicPlan

# Where there is no terminal, progress is said so often.
LINE_EVERY_S: Final = 10.0
ROWS_SHOWN: Final = 200
# Work comes in bursts: the rate is that of so many last seconds, and looked at so often.
RATE_OVER_S: Final = 10.0
RATE_EVERY_S: Final = 0.1
# Before that nobody knows how long it takes.
RATE_AFTER_S: Final = 2.0


To = Annotated[
    str,
    typer.Option(
        "--to",
        "-t",
        metavar="HOST:PORT,...",
        help="Where to: any broker of the target, Apache Kafka's or Penstock's.",
    ),
]
From = Annotated[
    str,
    typer.Option(
        "--from",
        "-f",
        envvar=BOOTSTRAP_VARIABLE,
        callback=chosen_bootstrap,
        metavar="HOST:PORT,...",
        help="Where from: the broker that has the topics now.",
    ),
]
Topics = Annotated[
    list[str],
    typer.Option(
        "--topic",
        metavar="NAME",
        help="Only this topic; may be a pattern such as 'shop-*', and may be repeated.",
        autocompletion=complete_topics,
    ),
]
Excluded = Annotated[
    list[str],
    typer.Option(
        "--exclude",
        metavar="NAME",
        help="Not this topic; may be a pattern, and may be repeated.",
    ),
]
Groups = Annotated[
    list[str],
    typer.Option(
        "--group",
        metavar="NAME",
        help="Offsets of this group only; may be a pattern, and may be repeated.",
    ),
]
Follow = Annotated[
    bool,
    typer.Option(
        "--follow", "-F", help="Go on copying what is written, until Ctrl-C: then finish."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be done.")]
Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Read both sides again and compare them.")
]
Replication = Annotated[
    int | None,
    typer.Option(
        "--replication",
        min=1,
        metavar="N",
        help="Copies of each partition of new topics; without it the target's default.",
    ),
]
Batch = Annotated[
    int,
    typer.Option(
        "--batch", min=1, max=100_000, metavar="N", help="Records in a transaction at most."
    ),
]
FromClient = Annotated[
    list[str],
    typer.Option(
        "--from-client",
        metavar="NAME=VALUE",
        help="Setting of the client library for the source, such as security.protocol=SSL. "
        "May be repeated.",
    ),
]
ToClient = Annotated[
    list[str],
    typer.Option("--to-client", metavar="NAME=VALUE", help="The same for the target."),
]


def migrate(
    to: To,
    from_: From = DEFAULT_BOOTSTRAP,
    topic: Topics = [],  # noqa: B006 - typer copies it
    exclude: Excluded = [],  # noqa: B006
    group: Groups = [],  # noqa: B006
    follow: Follow = False,
    dry_run: DryRun = False,
    verify: Verify = True,
    replication: Replication = None,
    batch: Batch = 10_000,
    json: AsJson = False,
    from_client: FromClient = [],  # noqa: B006
    to_client: ToClient = [],  # noqa: B006
) -> None:
    """Move topics, records and group offsets to another cluster.

    Producers may go on writing to the source meanwhile. Records keep their keys, values, headers,
    timestamps, partitions and order; aborted ones stay behind. Each transaction in the target
    holds records and the position they bring it to, so the command can be stopped or killed at
    any moment: started again it goes on where it was, and nothing is lost or there twice.

    Without --follow it ends when it has copied what was there when it started. With --follow it
    compares that and goes on; when you are ready, stop the producers and press Ctrl-C: it copies
    the rest. Either way it then compares what was not yet compared, commits the groups' offsets in
    the target, translated, and puts the topics' settings into force. Run it again to bring over
    what was written since, as long as nobody else has written to the target.

    \b
    Examples:
      penstock migrate --to kafka.example:9092 --dry-run
      penstock migrate --to kafka.example:9092 --follow
      penstock migrate --to kafka.example:9092 --topic orders --topic 'shop-*' --replication 3
      penstock migrate --from kafka.example:9092 --to 127.0.0.1:9092 --json
    """
    from penstock.cli.migration.ends import End
    from penstock.cli.migration.engine import Migration, Options

    options = Options(topic, exclude, group, replication, follow, verify, batch)
    source = End(connect(from_, from_client, option="--from"), "source")
    target = End(connect(to, to_client, option="--to"), "target")
    with _reporter() as reporter:
        migration = Migration(source, target, options, reporter)
        if dry_run:
            plans, groups = migration.plan()
        else:
            with _ctrl_c(migration, follow=follow):
                summary = migration.run()
    if dry_run:
        _show_plan(plans, groups, migration.summary, json=json)
        return
    _show(summary, json=json)
    raise typer.Exit(0 if summary.ok else output.EXIT_FAILURE)


# ---- Ctrl-C ------------------------------------------------------------------------------


@contextmanager
def _ctrl_c(migration: Migration, *, follow: bool) -> Iterator[None]:
    """Ctrl-C ends the command; with --follow the first one only asks to finish.

    In the middle of its calls the client library may lose the exception, and raise another or none:
    so it is remembered.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked, stopped = threading.Event(), threading.Event()
    migration.cut_over, migration.stopped = asked.is_set, stopped.is_set

    def on_signal(_number: int, _frame: Any) -> None:
        if follow and not asked.is_set():
            asked.set()
            output.say("finishing: copying the rest; Ctrl-C again stops at once")
            return
        stopped.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    except Exception:
        if stopped.is_set():
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)


# ---- progress ----------------------------------------------------------------------------


@contextmanager
def _reporter() -> Iterator[Reporter]:
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
        transient=True,
    ) as bars:
        yield Bar(bars)


class Pace:
    """How fast records are done, over the last seconds, and how long the rest takes."""

    def __init__(self, now: float, total: int | None) -> None:
        self._began, self._total = now, total
        self._seen = deque([(now, 0)])
        self.rate = 0.0

    def saw(self, now: float, done: int) -> None:
        """So many are done by now."""
        if now - self._seen[-1][0] < RATE_EVERY_S:
            return
        self._seen.append((now, done))
        while self._seen[1][0] <= now - RATE_OVER_S:
            self._seen.popleft()
        then, before = self._seen[0]
        self.rate = (done - before) / (now - then)

    def left_s(self, now: float, done: int) -> float | None:
        """Seconds until all are done; None if that cannot be said."""
        if self._total is None or now - self._began < RATE_AFTER_S or not self.rate:
            return None
        return max(0, self._total - done) / self.rate


class Bar:
    """Progress for a person at a terminal."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._task: Any = None
        self._pace = Pace(0.0, None)
        self._done = 0

    def phase(self, name: str, total: int | None) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(name, total=total, rate="", left="")
        self._pace, self._done = Pace(time.monotonic(), total), 0

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        self._pace.saw(now, self._done)
        left_s = self._pace.left_s(now, self._done)
        left = "" if left_s is None else f"{timedelta(seconds=round(left_s))} left"
        rate = f"{self._pace.rate:,.0f}/s"
        self._bars.update(self._task, advance=count, rate=rate, left=left)

    def lag(self, records: int) -> None:
        self._bars.update(self._task, description=f"following, {records:,} behind")

    def note(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, markup=False)


class Lines:
    """Progress as lines, now and then."""

    def __init__(self) -> None:
        self._name = ""
        self._done, self._said = 0, time.monotonic()
        self._pace = Pace(self._said, None)

    def phase(self, name: str, total: int | None) -> None:
        self._name, self._done, self._said = name, 0, time.monotonic()
        self._pace = Pace(self._said, total)
        output.say(name if total is None else f"{name}: {output.count(total, 'record')}")

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        self._pace.saw(now, self._done)
        if count and now - self._said >= LINE_EVERY_S:
            self._said = now
            left_s = self._pace.left_s(now, self._done)
            left = "" if left_s is None else f", about {left_s:.0f} s left"
            output.say(f"{self._name}: {self._done:,} records, {self._pace.rate:,.0f}/s{left}")

    def lag(self, records: int) -> None:
        if time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            output.say(f"following: {output.count(records, 'record')} behind")

    def note(self, text: str) -> None:
        output.warn(text)


# ---- the plan and the summary ------------------------------------------------------------


def _show_plan(
    plans: Sequence[TopicPlan], groups: Sequence[Group], summary: Summary, *, json: bool
) -> None:
    if json:
        output.write_json(
            {
                "topics": [
                    {
                        "name": plan.name,
                        "partitions": plan.partitions,
                        "exists": plan.target_partitions > 0,
                        "settings": dict(plan.settings),
                        "left_out": [
                            {"name": item.name, "value": item.value, "reason": item.reason}
                            for item in plan.left_out
                        ],
                    }
                    for plan in plans
                ],
                "groups": [
                    {"group": group.name, "offsets": len(group.offsets), "busy": group.busy}
                    for group in groups
                ],
                "captures": summary.captures,
                "share_groups_not_moved": list(summary.queues),
            }
        )
        return
    rows = [
        (plan.name, str(plan.partitions), _what_happens(plan), _pairs(plan.settings))
        for plan in plans[:ROWS_SHOWN]
    ]
    output.print_table(("topic", ">partitions", "in the target", "settings"), rows)
    _say_left_out(plans)
    for group in groups[:ROWS_SHOWN]:
        offsets = output.count(len(group.offsets), "offset")
        print(f"group {group.name}: {offsets}{' (has members now)' if group.busy else ''}")
    for name in summary.captures:
        print(f"capture {name}: where it stands in its database")
    _say_queues(summary.queues)
    output.say("nothing was done; without --dry-run it will be")


def _what_happens(plan: TopicPlan) -> str:
    if plan.target_partitions == 0:
        return "will be made"
    more = plan.partitions - plan.target_partitions
    return "is there" if not more else f"is there, gets {output.count(more, 'partition')} more"


def _pairs(settings: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _say_left_out(plans: Sequence[TopicPlan]) -> None:
    for plan in plans:
        for item in plan.left_out:
            output.warn(f"{plan.name}: {item.name}={item.value} is left out: {item.reason}")


def _say_queues(queues: Sequence[str]) -> None:
    if queues:
        output.warn(
            f"{output.count(len(queues), 'share group')} not moved ({', '.join(queues[:10])}): "
            "their records are moved, what they have acknowledged is not"
        )


def _show(summary: Summary, *, json: bool) -> None:
    from penstock.cli.migration.engine import as_json
    from penstock.cli.migration.verify import OK

    if json:
        output.write_json(as_json(summary))
    else:
        _print_summary(summary)
        for name in summary.captures:
            print(f"capture {name} goes on in the target, when it is started there")
    _say_left_out(summary.topics)
    _say_queues(summary.queues)
    if summary.clamped:
        output.warn(
            f"{output.count(summary.clamped, 'record')} had a timestamp of 1970 or none; they "
            "carry 1 ms after 1970 now, the earliest that can be written"
        )
    for found in summary.comparisons:
        if found.foreign is not None:
            output.say(
                f"error: {found.place}: the target's record at offset {found.foreign} was not "
                "written by this migration"
            )
        elif found.verdict not in OK:
            output.say(
                f"error: {found.place}: {_seen(found.copied)} copied, the source has "
                f"{_seen(found.source)}, the target {_seen(found.target)}"
            )
    for moved in summary.groups:
        if moved.outcome == "failed":
            output.say(f"error: group {moved.group}, {moved.place}: {moved.reason}")
    if not summary.ok:
        output.say(
            "       If records differ, someone else has written to the target. If it is in use "
            "there already, leave it out with --exclude; otherwise delete the topic there and "
            "start again. If a group could not be moved, stop its members in the target and start "
            "again."
        )


def _seen(seen: Any) -> str:
    return "nothing" if seen is None else f"{seen.count:,} ({seen.digest.hex()[:8]})"


def _print_summary(summary: Summary) -> None:
    compared = {found.place: found for found in summary.comparisons}
    rows = []
    for plan in summary.topics[:ROWS_SHOWN]:
        places = plan.places()
        verdicts = {compared[place].verdict for place in places if place in compared}
        rows.append(
            (
                plan.name,
                str(plan.partitions),
                f"{sum(summary.copied.get(place, 0) for place in places):,}",
                ", ".join(sorted(verdicts)) or "nothing new",
            )
        )
    output.print_table(("topic", ">partitions", ">copied", "both sides"), rows)
    moved = [item for item in summary.groups if item.outcome == "moved"]
    kept = [item for item in summary.groups if item.outcome == "further already"]
    own = [item for item in summary.groups if item.outcome == "changed there"]
    if moved:
        names = len({item.group for item in moved})
        print(f"{output.count(len(moved), 'offset')} of {output.count(names, 'group')} moved")
    if kept:
        print(f"{output.count(len(kept), 'offset')} left alone: further in the target already")
    if own:
        print(f"{output.count(len(own), 'offset')} left alone: committed in the target by others")
    print(f"{output.count(sum(summary.copied.values()), 'record')} in {summary.seconds:.1f} s")
