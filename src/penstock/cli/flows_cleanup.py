"""`penstock flows cleanup`: what rebuilds have left, who still needs it, and its deletion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli import project
from penstock.cli.kafka import Connection
from penstock.cli.protocol import cluster
from penstock.cli.sinks_file import declared
from penstock.client import topics
from penstock.client.metadata import Metadata
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.spark.flows.cleanup import Leftover
    from penstock.spark.flows.folder import Folder


def found(folder: Folder, brokers: Connection, flow: str, *, force: bool) -> list[Leftover]:
    """What is there, and why some of it stays."""
    from penstock.spark.flows.cleanup import candidates, leftovers

    names = sorted({each.name for each in candidates(folder, flow) if each.is_topic})
    with cluster(brokers.bootstrap, brokers.settings) as broker:
        there = Metadata(broker).topics(names) if names else []
    readers: dict[str, list[str]] = {}
    if there:
        _note_sinks(folder, readers)
        if not force:
            _note_groups(brokers, set(there), readers)
    return leftovers(folder, there, readers, flow)


def _note_sinks(folder: Folder, readers: dict[str, list[str]]) -> None:
    """Sinks put dead letters into topics, and stand in the versions from which they were filled."""
    from penstock.spark.flows.versions import physical

    for spec in declared(project.load()):
        readers.setdefault(spec.letters, []).append(f"sink {spec.name} writes it")
        try:
            with spec.sink() as store:
                at = store.position()
        except PenstockError:
            writer = folder.writer(spec.topic)
            numbers = range(1, writer.next_generation()) if writer is not None else ()
            for number in numbers:
                readers.setdefault(physical(spec.topic, number), []).append(
                    f"the store of sink {spec.name} does not answer, and may need it"
                )
            continue
        for topic in {name for name, _ in at.offsets} if at is not None else ():
            readers.setdefault(topic, []).append(f"sink {spec.name} was filled from it")


def _note_groups(brokers: Connection, there: set[str], readers: dict[str, list[str]]) -> None:
    from penstock.broker.lag.names import keeps_progress
    from penstock.cli.group_view import committed_offsets, list_groups

    for group in list_groups(brokers):
        if group.kind == "share" or keeps_progress(group.id):
            continue
        for topic in {name for name, _ in committed_offsets(brokers, group.id)} & there:
            readers.setdefault(topic, []).append(f"group {group.id} has read it (--force)")


def delete(folder: Folder, brokers: Connection, items: Sequence[Leftover]) -> None:
    """Delete topics and checkpoints, and remember that they are gone."""
    from penstock.spark.flows.cleanup import candidates, cleaned, remove
    from penstock.spark.flows.control import ask
    from penstock.spark.flows.errors import FlowError

    with cluster(brokers.bootstrap, brokers.settings) as broker:
        names = [each.name for each in items if each.is_topic]
        topics.delete(broker, names, missing_ok=True)
        for each in items:
            if not each.is_topic:
                remove(each)
        for flow in sorted({each.flow for each in items}):
            left = [each for each in candidates(folder, flow) if each.is_topic]
            there = set(Metadata(broker).topics([each.name for each in left])) - set(names)
            kept = {each.generation for each in left if each.name in there}
            done = sorted({each.generation for each in items if each.flow == flow} - kept)
            try:
                ask(folder, {"do": "cleaned", "flow": flow, "generations": done})
            except FlowError:
                # Nothing runs there, or not this flow.
                folder.write(cleaned(folder.record(flow), done))
