"""Captures: where each stands in its database, taken along to the target.

A capture's position is one of the database, and lies in the log with the events that it speaks of;
so in the target it goes on with the next change. It must not run meanwhile: events that it writes
to the source behind what was copied would be written to the target again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cli.migration.ends import End
from penstock.cli.protocol import cluster
from penstock.client.metadata import Metadata

if TYPE_CHECKING:
    from penstock.capture.delivery.state import State
    from penstock.client.connection import Cluster

Note = Callable[[str], None]


def _cluster(end: End) -> Cluster:
    return cluster(end.connection.bootstrap, end.connection.settings)


def states(source: End) -> dict[str, State]:
    """Where all captures of the source stand."""
    from penstock.capture.delivery.state import CAPTURE_TOPIC

    with _cluster(source) as here:
        if not Metadata(here).topics([CAPTURE_TOPIC]):
            # The base install has not what the rest needs.
            return {}
        from penstock.capture.delivery.control import state_of, statuses

        found = {each.name: state_of(here, each.name) for each in statuses(here)}
    return {name: state for name, state in found.items() if state is not None}


def move(source: End, target: End, known: Mapping[str, State], note: Note) -> list[str]:
    """Write down in the target where captures go on; the names of those that were moved."""
    moved = []
    now = states(source) if known else {}
    with _cluster(source) as here, _cluster(target) as there:
        for name, state in known.items():
            if now.get(name) != state:
                note(f"capture {name} still writes to the source: stop it, and run this again")
            elif _write(here, there, name, state):
                moved.append(name)
            else:
                note(f"capture {name} has gone on in the target: it was left as it is")
    return moved


def _write(here: Cluster, there: Cluster, name: str, state: State) -> bool:
    from penstock.capture.delivery.config import TopicSettings
    from penstock.capture.delivery.control import state_of
    from penstock.capture.delivery.state import CAPTURE_TOPIC, state_topic
    from penstock.capture.delivery.topics import Topics
    from penstock.client.writer import LogWriter

    found = state_of(there, name)
    if found is not None and found.ts_ms > state.ts_ms:
        return False
    # What is asked of captures is not moved: they listen from now on.
    wanted = replace(state, signals=None)
    if found == wanted:
        return True
    from penstock.client.reading import last_values

    told = last_values(here, CAPTURE_TOPIC).get(name.encode())
    Topics(there, TopicSettings()).ensure_own(name)
    with LogWriter(there) as writer:
        writer.write(state_topic(name), [name.encode()], [wanted.encode()])
        if told is not None:
            writer.write(CAPTURE_TOPIC, [name.encode()], [told])
    return True
