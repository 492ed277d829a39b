"""What is to be compared with what: from the words of a user to the two sides of a comparison."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from penstock.cli import project as projects
from penstock.cli.capture_project import configured
from penstock.cli.kafka import bootstrap_of
from penstock.cli.sinks_file import named
from penstock.cli.sinks_reach import must_answer
from penstock.cli.verifying.engine import SHARE_ROWS, Comparison, not_there
from penstock.cli.verifying.flow_graph import FlowGraph
from penstock.cli.verifying.letters import DeadLetters, of_flow, of_sink
from penstock.cli.verifying.origins import Origin, TableOrigin, TopicOrigin
from penstock.cli.verifying.query import QueryOrigin
from penstock.cli.verifying.report import OnProgress, Report, VerifyError
from penstock.cli.verifying.topic_rows import TopicRows
from penstock.client.connection import Cluster
from penstock.errors import ConfigError
from penstock.sinks.contract import Sink
from penstock.sinks.schema import Schema
from penstock.sinks.spec import SinkSpec
from penstock.spark.sinking.learning import parser_of

TIMEOUT_S: Final = 600.0
DATA: Final = Path(".penstock") / "flows"
TOPIC: Final = "topic:"
MAX_SHOWN: Final = 1000


def verify(
    project: projects.Project,
    source: str,
    sink: str,
    *,
    timeout_s: float = TIMEOUT_S,
    on_progress: OnProgress | None = None,
    bootstrap: str = "",
    cluster: Cluster | None = None,
    max_shown: int = MAX_SHOWN,
    share_rows: int = SHARE_ROWS,
    data: Path = DATA,
    query: str = "",
    float_tolerance: float = 0.0,
) -> Report:
    """Compare a table of a capture (`shop.orders`) or what a topic tells (`topic:NAME`) with a sink
    of the project, or with a store by its URL. VerifyError if that cannot be done in time.

    With a query, `source` is a capture (`shop`), whose database is asked; `sink` may also be
    `topic:NAME`, for what a topic tells. Floats are equal if they differ by no more than
    `float_tolerance` times the larger one. `data` is where `penstock run` keeps its flows.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        if cluster is None:
            at = bootstrap_of(bootstrap, project)
            cluster = stack.enter_context(Cluster(at, client_id="penstock-verify"))
        flows = FlowGraph(data)
        if query:
            asked = _Asked(query, float_tolerance, flows, began + timeout_s)
            origin, spec, store = _query_sides(project, source, sink, cluster, asked, stack)
        else:
            origin, spec, store = _sides(project, source, sink, cluster, flows, stack)
        # A URL may have a password in it.
        shown = store.target if "://" in sink else sink
        if not store.readable:
            raise VerifyError(
                f"{store.target} cannot be read back, so there is nothing to compare",
                advice="Its deliveries can be seen at the receiver, and in its dead letters.",
            )
        work = Comparison(cluster, origin, spec, store, began + timeout_s, on_progress)
        work.share_rows = share_rows
        report = work.run(began, shown, max_shown)
        name = "" if "://" in sink else sink
        letters = _dead_letters(cluster, spec, name, flows)
        return replace(report, dead_letters=letters, seconds=time.monotonic() - began)


def _sides(
    project: projects.Project, source: str, sink: str, cluster: Cluster, flows: FlowGraph,
    stack: ExitStack,
) -> tuple[Origin, SinkSpec, Sink]:  # fmt: skip
    """A table or a topic, and the store that is derived from it."""
    if sink.startswith(TOPIC):
        raise ConfigError(
            f"{sink} is no sink",
            advice="What a topic tells is compared with a query: --query 'SELECT ...'.",
        )
    # Before anything is connected to: what is asked for is there.
    spec = None if "://" in sink else named(project, sink)
    origin = _origin(project, source, cluster, flows)
    stack.callback(origin.close)
    if spec is None:
        spec = SinkSpec(sink.partition("://")[0], origin.topic, sink)
    elif origin.topic not in (spec.topic, flows.resolve(spec.topic)):
        raise ConfigError(
            f"sink {spec.name!r} is fed from the topic {spec.topic}, and {source} goes to "
            f"{origin.topic}",
            advice=f"Compare it with its topic: penstock verify {TOPIC}{spec.topic} {sink}",
        )
    must_answer(spec)
    return origin, spec, stack.enter_context(spec.sink())


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a query is compared by."""

    sql: str
    tolerance: float
    flows: FlowGraph
    deadline: float


def _query_sides(
    project: projects.Project, capture: str, sink: str, cluster: Cluster, asked: _Asked,
    stack: ExitStack,
) -> tuple[Origin, SinkSpec, Sink | TopicRows]:  # fmt: skip
    """A query of a capture's database, and the store or topic that should say the same."""
    if "." in capture or capture.startswith(TOPIC):
        raise ConfigError(
            f"{capture!r} is no capture",
            advice="With --query the source is the capture whose database is asked, as shop.",
        )
    config = configured(project, capture)
    store: Sink | TopicRows
    if sink.startswith(TOPIC):
        topic = asked.flows.resolve(sink.removeprefix(TOPIC))
        # Said before anything else is looked for.
        TopicOrigin(cluster, topic)
        spec = SinkSpec(sink, topic, sink)
        store = TopicRows(cluster, topic, lambda: parser_of(spec, cluster, topic, None))
    elif "://" in sink:
        spec = SinkSpec(sink.partition("://")[0], "", sink)
        must_answer(spec)
        store = stack.enter_context(spec.sink())
        spec = replace(spec, topic=_only_topic(store))
    else:
        spec = named(project, sink)
        must_answer(spec)
        store = stack.enter_context(spec.sink())
        topic = asked.flows.resolve(spec.topic)
        spec = replace(spec, topic=topic, dead_letters=spec.letters)
    stored = store.stored_schema() if store.readable else None
    if stored is None and store.readable:
        raise not_there(store.target)
    origin = QueryOrigin(
        cluster, config, asked.sql, spec.topic, store.target if "://" in sink else sink,
        stored or Schema((), ()), asked.flows, asked.tolerance, asked.deadline,
    )  # fmt: skip
    return origin, spec, store


def _only_topic(store: Sink) -> str:
    """The topic that a store was filled from."""
    at = store.position() if store.readable else None
    if at is None:
        raise not_there(store.target)
    topics = sorted({topic for topic, _ in at.offsets})
    if len(topics) != 1:
        raise VerifyError(
            f"{store.target} does not say from which topic it was filled",
            advice="Declare it as a sink of the project file, and name that.",
        )
    return topics[0]


def _dead_letters(
    cluster: Cluster, spec: SinkSpec, sink: str, flows: FlowGraph
) -> tuple[DeadLetters, ...]:
    """Those of a sink, and of the flow that writes its topic."""
    found = [] if sink.startswith(TOPIC) else [of_sink(cluster, spec.letters, sink)]
    flow = flows.writer(spec.topic)
    for topic in flow.dead_letters if flow is not None else ():
        assert flow is not None
        found.append(of_flow(cluster, topic, flow.name, flow.streams))
    return tuple(found)


def _origin(project: projects.Project, source: str, cluster: Cluster, flows: FlowGraph) -> Origin:
    if source.startswith(TOPIC):
        # Of what a flow writes, the version that counts.
        return TopicOrigin(cluster, flows.resolve(source.removeprefix(TOPIC)))
    capture, dot, table = source.partition(".")
    if not dot or not table:
        raise ConfigError(
            f"{source!r} is no source",
            advice=f"It is CAPTURE.TABLE, as shop.orders, or {TOPIC}NAME for what a topic tells.",
        )
    return TableOrigin(cluster, configured(project, capture), table)
