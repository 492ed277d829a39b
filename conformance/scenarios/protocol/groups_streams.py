"""What members of streams groups are answered, whose tasks the broker assigns (KIP-1071).

Kafka hears of new topics a moment after they are made, so a member beats until it is told what it
waits for; what is compared is what comes of it, not each step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Final

from conformance.scenario import scenario
from conformance.scenarios.protocol.groups_consumer import ask
from penstock.broker.groups.streams.internal_topics import Status
from penstock.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from penstock.wire.messages.streams_group_describe import StreamsGroupDescribeRequest
from penstock.wire.messages.streams_group_heartbeat import (
    KeyValue,
    RequestEndpoint,
    TopicInfo,
    Topology,
)
from tests.broker.group_requests import (
    list_groups,
)
from tests.broker.groups.streams_members import (
    StreamsClient,
    settle,
    stateless,
    subtopology,
    word_count,
)
from tests.broker.protocol_client import READY_TIMEOUT_S, ProtocolClient, error_name
from tests.broker.requests import metadata, new_name
from tests.broker.shares.members import set_group

GROUP: Final = 32


def new_group(client: ProtocolClient, **settings: str) -> str:
    """A group whose targets are computed at once."""
    group = new_name("g")
    wanted = {
        "streams_initial_rebalance_delay_ms": "0",
        "streams_assignment_interval_ms": "0",
        **settings,
    }
    set_group(client, group, **wanted)
    deadline = monotonic() + READY_TIMEOUT_S
    while any(
        configs_of(client, group).get(name.replace("_", ".")) != value
        for name, value in wanted.items()
    ):
        assert monotonic() < deadline, "the settings are not known in time"
    return group


def configs_of(client: ProtocolClient, group: str) -> dict[str, str]:
    resource = DescribeConfigsResource(
        resource_type=GROUP, resource_name=group, configuration_keys=None
    )
    (result,) = client.call(DescribeConfigsRequest(resources=[resource])).results
    return {config.name: config.value for config in result.configs}


def member(
    client: ProtocolClient, group: str, id_: str, topology: Topology | None = None, **more: Any
) -> StreamsClient:
    return StreamsClient(lambda request: ask(client, request), group, id_, topology, **more)


def until(one: StreamsClient, done: Callable[[], bool]) -> None:
    deadline = monotonic() + READY_TIMEOUT_S
    while not done():
        assert monotonic() < deadline, (one.owned, one.statuses)
        one.acknowledge()


def is_told(one: StreamsClient, status: Status) -> bool:
    return bool(one.statuses) and one.statuses[0][0] == status


def lone(client: ProtocolClient, partitions: int = 2) -> tuple[str, str, StreamsClient]:
    """A source topic, a group without state, and its only member with all its tasks."""
    topic, group = client.topic(partitions), new_group(client)
    one = member(client, group, "one", stateless(topic))
    one.beat()
    settle(one, tasks=partitions)
    return topic, group, one


def topics_told(told: list[Any], app: str) -> list[Any]:
    return [
        (
            topic.name.removeprefix(app),
            topic.partitions,
            topic.replication_factor,
            [(config.key, config.value) for config in topic.topic_configs],
        )
        for topic in told
    ]


def tasks_told(told: Any) -> list[Any]:
    return [
        [(item.subtopology_id, sorted(item.partitions)) for item in role]
        for role in (told.active_tasks, told.standby_tasks, told.warmup_tasks)
    ]


def described(client: ProtocolClient, group: str, app: str = "", source: str = "") -> Any:
    """A group as the broker describes it, without names that are made for this run."""
    request = StreamsGroupDescribeRequest(group_ids=[group], include_authorized_operations=True)
    (told,) = ask(client, request).groups
    if told.error_code:
        return error_name(told.error_code), told.error_message.replace(group, "GROUP")
    return {
        "state": told.group_state,
        "computed": told.group_epoch == told.assignment_epoch,
        "topology": told.topology.epoch,
        "operations": told.authorized_operations,
        "subtopologies": [
            {
                "id": part.subtopology_id,
                "sources": [name.replace(source, "SOURCE") for name in part.source_topics],
                "sinks": [name.removeprefix(app) for name in part.repartition_sink_topics],
                "repartition": topics_told(part.repartition_source_topics, app),
                "changelogs": topics_told(part.state_changelog_topics, app),
            }
            for part in told.topology.subtopologies or ()
        ],
        "members": [
            {
                "id": one.member_id,
                "current": one.member_epoch == told.group_epoch,
                "instance": one.instance_id,
                "rack": one.rack_id,
                "topology": one.topology_epoch,
                "process": one.process_id,
                "endpoint": one.user_endpoint and (one.user_endpoint.host, one.user_endpoint.port),
                "tags": [(tag.key, tag.value) for tag in one.client_tags],
                "tasks": tasks_told(one.assignment),
                "target": tasks_told(one.target_assignment),
                "classic": one.is_classic,
            }
            for one in sorted(told.members, key=lambda one: str(one.member_id))
        ],
    }


# ---- one member ------------------------------------------------------------------------------


@scenario()
def internal_topics_are_made(client: ProtocolClient) -> Any:
    """A member is told that internal topics are missing; they are made, and it gets its tasks."""
    source, app = client.topic(3), new_name("app")
    group = new_group(client)
    one = member(client, group, "one", word_count(app, source))
    first = one.beat()
    until(one, partial(is_told, one, Status.MISSING_INTERNAL_TOPICS))
    codes = [first.error_code, one.statuses[0][0]]
    details = one.statuses[0][1].startswith("Internal topics are missing: ")
    settle(one, tasks=6)
    names = (f"{app}-words", f"{app}-counts")
    found = client.call(metadata(*names)).topics
    policies = [topic_config(client, name, "cleanup.policy") for name in names]
    return [
        codes,
        details,
        one.active,
        one.standby,
        one.statuses,
        [len(topic.partitions) for topic in found],
        policies,
        described(client, group, app, source),
    ]


def topic_config(client: ProtocolClient, topic: str, name: str) -> str:
    resource = DescribeConfigsResource(
        resource_type=2, resource_name=topic, configuration_keys=[name]
    )
    (result,) = client.call(DescribeConfigsRequest(resources=[resource])).results
    return str(result.configs[0].value)


@scenario()
def source_topics_are_missing(client: ProtocolClient) -> Any:
    """Without its source topics a group is not ready; it gets its tasks when they are there."""
    group, missing = new_group(client), [new_name("missing") for _ in range(5)]
    one = member(client, group, "one", stateless(*missing))
    answer = one.beat()
    told = one.statuses[0][1]
    for name in sorted(missing):
        told = told.replace(name, "TOPIC")
    steps = [answer.error_code, one.statuses[0][0], told, one.active]
    steps += [described(client, group)["state"], described(client, group)["members"]]
    listed = [
        group in {item.group_id for item in ask(client, list_groups([state])).groups}
        for state in ("not_ready", "NotReady", "stable")
    ]
    for name in missing:
        client.create_topic(name)
    settle(one, tasks=1)
    return [*steps, listed, one.active, described(client, group)["state"]]


@scenario()
def topics_that_do_not_fit(client: ProtocolClient) -> Any:
    """Joined topics of different sizes, and internal topics of the wrong size, are no basis."""
    two, three, app = client.topic(2), client.topic(3), new_name("app")
    joined = Topology(subtopologies=[subtopology("0", [two, three], together=[([0, 1], [])])])
    repartition = TopicInfo(name=f"{app}-r", partitions=5, topic_configs=[])
    fixed = Topology(
        subtopologies=[
            subtopology("0", [two], sinks=[repartition.name]),
            subtopology("1", [three], repartition=[repartition], together=[([0], [0])]),
        ]
    )
    client.create_topic(f"{app}-counts", 7)
    wrong = word_count(app, two)
    found = []
    for topology in (joined, fixed, wrong):
        group = new_group(client)
        one = member(client, group, "one", topology)
        one.beat()
        until(one, partial(is_told, one, Status.INCORRECTLY_PARTITIONED_TOPICS))
        text = one.statuses[0][1]
        for name, word in ((two, "TWO"), (three, "THREE"), (app, "APP")):
            text = text.replace(name, word)
        text = text.replace("TWO=2, THREE=3", "BOTH").replace("THREE=3, TWO=2", "BOTH")
        found.append((text, one.active, described(client, group)["state"]))
    return found


@scenario()
def sizes_of_internal_topics(client: ProtocolClient) -> Any:
    """Repartition topics are as large as what is written to them, or joined with them, demands."""
    large, small, app = client.topic(4), client.topic(2), new_name("app")
    a, b, c = (TopicInfo(name=f"{app}-{name}", topic_configs=[]) for name in "abc")
    fixed = TopicInfo(name=f"{app}-fixed", partitions=5, topic_configs=[])
    log_ = TopicInfo(name=f"{app}-log", topic_configs=[])
    topology = Topology(
        subtopologies=[
            subtopology("0", [large], sinks=[a.name]),
            subtopology("1", [small], sinks=[b.name, fixed.name]),
            # Both get the size that the application says of another; the third follows from both.
            subtopology("2", [], repartition=[a, b], sinks=[c.name], together=[([], [0, 1])]),
            subtopology("3", [], repartition=[c], changelogs=[log_]),
            subtopology("4", [], repartition=[fixed]),
        ]
    )
    group = new_group(client)
    one = member(client, group, "one", topology)
    one.beat()
    settle(one, tasks=4 + 2 + 5 + 4 + 5)
    names = [topic.name for topic in (a, b, c, fixed, log_)]
    found = {topic.name: len(topic.partitions) for topic in client.call(metadata(*names)).topics}
    return [found[name] for name in names]


@scenario()
def a_topology_that_cannot_be(client: ProtocolClient) -> Any:
    """Topologies that no topics could ever serve are refused."""
    source, app = client.topic(), new_name("app")
    loop = TopicInfo(name=f"{app}-loop", topic_configs=[])
    sized = TopicInfo(name=f"{app}-sized", partitions=3, topic_configs=[])
    own = subtopology("0", ["__consumer_offsets"])
    pattern = subtopology("0", [])
    pattern.source_topic_regex = ["a.*"]
    refused = []
    for part in (
        subtopology("0", [], repartition=[loop], sinks=[loop.name]),
        subtopology("0", [source], repartition=[loop]),
        subtopology("0", [source], changelogs=[sized]),
        subtopology("0", ["no/topic"]),
        own,
        pattern,
    ):
        one = member(client, new_group(client), "one", Topology(subtopologies=[part]))
        answer = one.beat()
        refused.append((error_name(answer.error_code), one.active))
    return refused


@scenario()
def heartbeats_that_no_member_may_send(client: ProtocolClient) -> Any:
    """What is missing or contradicts itself is refused, and makes no group."""
    topic, group = client.topic(), new_name("g")
    one = member(client, group, "one", stateless(topic))
    refused = [
        one.error(**fields)
        for fields in (
            {"member_id": " "},
            {"group_id": ""},
            {"instance_id": ""},
            {"rack_id": " "},
            {"rebalance_timeout_ms": -1},
            {"topology": None},
            {"active_tasks": None},
            one.own([{"0": [0]}, {}, {}]),
            one.own([{}, {"0": [0]}, {}]),
            {"member_epoch": -2},
            {"member_epoch": -3},
            {"member_epoch": 1},
            {"member_epoch": 1, "topology": None},
            {"member_epoch": -1, "topology": None},
            {"instance_id": "i"},
        )
    ]
    return [*refused, described(client, group)]


@scenario()
def members_with_wrong_epochs(client: ProtocolClient) -> Any:
    """A wrong epoch is fenced; a member that left or never joined is unknown."""
    _, _, one = lone(client)
    epoch = one.epoch
    steps = [one.error(member_epoch=epoch + 1), one.error(member_epoch=epoch + 77)]
    stranger = member(client, one.group, "stranger")
    stranger.epoch = 1
    steps += [stranger.error(), stranger.error(member_epoch=-1)]
    steps += [one.leave()]
    one.epoch = epoch
    return [*steps, one.error(), described(client, one.group)["state"]]


@scenario()
def tasks_that_do_not_exist(client: ProtocolClient) -> Any:
    """A member cannot run a task of another topology, nor one beyond its subtopology's."""
    _, _, one = lone(client)
    return [
        error_name(one.beat(**one.own([{"0": [0, 2]}, {}, {}])).error_code),
        error_name(one.beat(**one.own([{"0": [-1]}, {}, {}])).error_code),
        error_name(one.beat(**one.own([{"0": [0, 1]}, {"x": [0]}, {}])).error_code),
        error_name(one.beat(**one.own([{"0": [0, 1]}, {}, {}])).error_code),
    ]


# ---- several members -------------------------------------------------------------------------


@scenario()
def members_join_share_and_leave(client: ProtocolClient) -> Any:
    """Members divide the tasks among themselves; what one leaves, another gets."""
    topic, group = client.topic(4), new_group(client)
    one, two, three = (
        member(client, group, id_, stateless(topic)) for id_ in ("one", "two", "three")
    )
    one.beat()
    settle(one, tasks=4)
    two.beat()
    settle(one, two, tasks=4)
    steps: list[Any] = [sorted((len(one.active), len(two.active)))]
    steps += [sorted(one.active + two.active)]
    three.beat()
    settle(one, two, three, tasks=4)
    steps += [sorted(map(len, (one.active, two.active, three.active)))]
    steps += [two.leave()]
    settle(one, three, tasks=4)
    return [*steps, len(one.active), len(three.active), described(client, group)["state"]]


@scenario()
def a_task_is_given_up_first(client: ProtocolClient) -> Any:
    """A task goes to its new owner when the old one has said that it gave it up."""
    topic, group, one = lone(client)
    epoch, everything = one.epoch, one.owned
    two = member(client, group, "two", stateless(topic))
    two.beat()
    until(one, lambda: len(one.active) == 1)
    kept, one.owned = one.owned, everything
    # It runs everything still, and says so.
    steps = [one.epoch == epoch, len(two.active)]
    one.beat(**one.own(everything))
    steps += [one.epoch == epoch, described(client, group)["state"]]
    two.beat()
    steps += [len(two.active)]
    one.beat(**one.own(kept))
    two.beat()
    steps += [one.epoch > epoch, len(two.active), one.epoch == two.epoch]
    return [*steps, described(client, group)["state"]]


@scenario()
def a_member_that_missed_a_response(client: ProtocolClient) -> Any:
    """A member may repeat its previous epoch if it claims no more tasks than are its own."""
    topic, group, one = lone(client)
    everything, epoch = one.owned, one.epoch
    two = member(client, group, "two", stateless(topic))
    two.beat()
    settle(one, two, tasks=2)
    kept = one.owned
    one.epoch = epoch
    steps = [one.error(), one.error(**one.own(everything))]
    one.epoch = epoch
    return [*steps, one.error(**one.own(kept)), len(one.active)]


@scenario()
def standbys_are_in_other_processes(client: ProtocolClient) -> Any:
    """Tasks with state have standbys, as many as the group wants, in other processes."""
    source, app = client.topic(2), new_name("app")
    group = new_group(client, streams_num_standby_replicas="1")
    topology = word_count(app, source)
    members = [
        member(client, group, id_, topology, process=process)
        for id_, process in (("a1", "a"), ("a2", "a"), ("b1", "b"))
    ]
    for one in members:
        one.beat()
    settle(*members, tasks=4)
    deadline = monotonic() + READY_TIMEOUT_S
    while sum(len(one.standby) for one in members) != 2 and monotonic() < deadline:
        for one in members:
            one.acknowledge()
    at_a = [task for one in members[:2] for task in one.active]
    at_b = members[2].active
    copies_at_a = [task for one in members[:2] for task in one.standby]
    return [
        sorted(at_a + at_b),
        sorted(copies_at_a + members[2].standby),
        set(copies_at_a) <= set(at_b),
        set(members[2].standby) <= set(at_a),
    ]


@scenario()
def the_number_of_standbys_changes(client: ProtocolClient) -> Any:
    """Another number of standbys is followed without anybody joining."""
    source, app = client.topic(1), new_name("app")
    group = new_group(client)
    topology = word_count(app, source)
    one, two = (member(client, group, id_, topology) for id_ in ("one", "two"))
    one.beat()
    two.beat()
    settle(one, two, tasks=2)
    before = len(one.standby) + len(two.standby)
    set_group(client, group, streams_num_standby_replicas="1")
    deadline = monotonic() + READY_TIMEOUT_S
    while not (one.standby or two.standby) and monotonic() < deadline:
        one.acknowledge()
        two.acknowledge()
    return [before, one.standby + two.standby]


@scenario()
def topologies_of_members_differ(client: ProtocolClient) -> Any:
    """A member with an older topology is told so; a newer or another one is refused."""
    topic, other, group = client.topic(2), client.topic(2), new_group(client)
    one = member(client, group, "one", stateless(topic, epoch=3))
    one.beat()
    settle(one, tasks=2)
    older = member(client, group, "older", stateless(other, epoch=1))
    told = older.beat()
    status = older.statuses[0]
    newer = member(client, group, "newer", stateless(other, epoch=4))
    same = member(client, group, "same", stateless(other, epoch=3))
    return [
        told.error_code,
        status,
        newer.error(),
        same.error(),
        sorted(one["id"] for one in described(client, group)["members"]),
    ]


@scenario()
def a_member_asks_all_to_shut_down(client: ProtocolClient) -> Any:
    """All members are told of it, new ones too, until the group is empty."""
    topic, group, one = lone(client)
    two = member(client, group, "two", stateless(topic))
    two.beat(shutdown_application=True)
    one.beat()
    steps: list[Any] = [[code for code, _ in who.statuses] for who in (one, two)]
    steps += [[detail for code, detail in one.statuses if code == 4]]
    steps += [two.leave()]
    three = member(client, group, "three", stateless(topic))
    three.beat()
    steps += [[code for code, _ in three.statuses]]
    steps += [one.leave(), three.leave()]
    four = member(client, group, "four", stateless(topic))
    four.beat()
    settle(four, tasks=2)
    return [*steps, four.statuses]


@scenario()
def endpoints_for_queries(client: ProtocolClient) -> Any:
    """Members are told at which endpoint the partitions are, whenever that has changed."""
    topic, group = client.topic(2), new_group(client)
    one, two = (
        member(
            client,
            group,
            id_,
            stateless(topic),
            user_endpoint=RequestEndpoint(host=f"host-{id_}", port=port),
            client_tags=[KeyValue(key="zone", value=id_)],
            rack_id="rack",
        )
        for id_, port in (("one", 1), ("two", 2))
    )
    one.beat()
    settle(one, tasks=2)
    two.beat()
    settle(one, two, tasks=2)
    answer = one.beat(endpoint_information_epoch=-1)
    known = one.beat(endpoint_information_epoch=answer.endpoint_information_epoch)
    told = sorted(
        (
            item.user_endpoint.host,
            item.user_endpoint.port,
            [(part.topic == topic, len(part.partitions)) for part in item.active_partitions],
            len(item.standby_partitions),
        )
        for item in answer.partitions_by_user_endpoint
    )
    return [
        told,
        known.partitions_by_user_endpoint,
        [(m["endpoint"], m["tags"], m["rack"]) for m in described(client, group)["members"]],
    ]


@scenario()
def the_first_target_is_delayed(client: ProtocolClient) -> Any:
    """A new group waits for more members, and says so."""
    topic = client.topic(2)
    group = new_group(client, streams_initial_rebalance_delay_ms="1000")
    one, two = (member(client, group, id_, stateless(topic)) for id_ in ("one", "two"))
    one.beat()
    two.beat()
    steps: list[Any] = [one.active, one.epoch > 0, one.statuses[-1:], two.statuses[-1:]]
    steps += [described(client, group)["members"][0]["tasks"]]
    settle(one, two, tasks=2)
    return [*steps, len(one.active), len(two.active), one.statuses]


@scenario()
def the_next_target_is_delayed(client: ProtocolClient) -> Any:
    """Between two targets a group waits, and says so."""
    topic = client.topic(2)
    group = new_group(client, streams_assignment_interval_ms="1500")
    one, two = (member(client, group, id_, stateless(topic)) for id_ in ("one", "two"))
    one.beat()
    until(one, lambda: len(one.active) == 2)
    two.beat()
    steps: list[Any] = [two.active, two.statuses[-1:], described(client, group)["state"]]
    settle(one, two, tasks=2)
    return [*steps, len(one.active), len(two.active)]


@scenario()
def a_silent_member_is_removed(client: ProtocolClient) -> Any:
    """Who is silent for the time of its session, or keeps what it must give up, is left out."""
    topic = client.topic(2)
    group = new_group(
        client, streams_session_timeout_ms="1000", streams_heartbeat_interval_ms="200"
    )
    one = member(client, group, "one", stateless(topic))
    silent = member(client, group, "silent", stateless(topic))
    one.beat(rebalance_timeout_ms=300)
    silent.beat()
    until(one, lambda: len(one.active) == 2)
    steps = [silent.error(), len(described(client, group)["members"])]
    # One that beats, but does not give up.
    everything = one.owned
    two = member(client, group, "two", stateless(topic))
    two.beat()
    until(one, lambda: len(one.active) == 1)
    deadline = monotonic() + READY_TIMEOUT_S
    while len(two.active) < 2 and monotonic() < deadline:
        two.acknowledge()
        one.beat(**one.own(everything))
    return [*steps, two.active, one.error()]
