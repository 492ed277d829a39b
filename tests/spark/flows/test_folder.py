"""What flows keep on disk, and how other processes reach who runs them."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.verifying.flow_graph import FlowGraph
from penstock.errors import PenstockError
from penstock.spark.flows.cleanup import cleaned, leftovers, readers_of
from penstock.spark.flows.control import ControlServer, ask
from penstock.spark.flows.errors import (
    AlreadyRunningError,
    CheckpointError,
    FlowError,
    NotRunningError,
    UnknownFlowError,
)
from penstock.spark.flows.folder import FLOW_FILE, Fingerprint, Folder, Record
from penstock.spark.flows.progress import Progress
from penstock.spark.flows.versions import Behind, behind, is_version

names = st.text("abc", min_size=1, max_size=3)
fingerprints = st.builds(
    Fingerprint,
    streams=st.lists(names, max_size=2).map(tuple),
    outputs=st.lists(names, max_size=2).map(tuple),
    mode=st.sampled_from(["append", "update"]),
    operators=st.lists(names, max_size=2).map(tuple),
)


@given(fingerprint=fingerprints, generation=st.integers(1, 9))
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, fingerprint: Fingerprint, generation: int
) -> None:
    folder = Folder(tmp_path_factory.mktemp("flows"))
    record = Record(
        "f",
        inputs=("stream a",),
        outputs=("topic b", "topic c"),
        topics=("b", "c"),
        generation=2,
    )
    record = record.remembering(generation, fingerprint)
    folder.write(record)
    assert folder.record("f") == record
    assert folder.record("f").fingerprint(generation) == fingerprint
    assert folder.record("f").fingerprint(generation + 1) is None
    assert folder.records() == [record]


@given(old=fingerprints, new=fingerprints)
def test_only_what_a_checkpoint_depends_on_is_a_change(old: Fingerprint, new: Fingerprint) -> None:
    assert old.differences(old) == []
    changed = old.differences(new)
    same = replace(old, mode="append") == replace(new, mode="append")
    if not same:
        assert changed
    elif old.operators:
        assert bool(changed) == (old.mode != new.mode)
    else:
        # A mode means nothing without state.
        assert changed == []


def test_generations_never_come_back() -> None:
    record = Record("f")
    assert record.next_generation() == 2
    record = record.remembering(1, Fingerprint()).remembering(4, Fingerprint())
    assert record.next_generation() == 5
    assert replace(record, rebuilding=7).next_generation() == 8


def test_an_unknown_and_a_damaged_flow(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with pytest.raises(UnknownFlowError, match="no flow 'f'"):
        folder.record("f")
    assert folder.find("f") is None
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / FLOW_FILE).write_text('{"name": ')
    with pytest.raises(CheckpointError, match="is damaged"):
        folder.record("f")


def test_a_damaged_flow_is_passed_over_by_who_asks_for_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Folder(tmp_path)
    folder.write(Record("good", topics=("out",), generation=2, outputs=("topic out.v2",)))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / FLOW_FILE).write_text('{"name": ')
    assert folder.resolve("out") == folder.resolve("out") == "out.v2"
    assert FlowGraph(tmp_path).resolve("out") == "out.v2"
    told = [each.getMessage() for each in caplog.records]
    # Once for each that looks.
    assert [each.startswith("flow bad is passed over: ") for each in told] == [True, True]
    assert "is damaged" in told[0]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = Folder(tmp_path / "file" / "below")
    with pytest.raises(CheckpointError, match="cannot be"):
        folder.write(Record("f"))
    with pytest.raises(CheckpointError, match="cannot be used"), folder.locked():
        pass


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_checkpoints_that_cannot_be_written_are_told_before_spark_starts(
    tmp_path: Path, scheme: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    folder = Folder(tmp_path / "data", f"{scheme}{tmp_path / 'file' / 'below'}")
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory") as caught:
        folder.locked().__enter__()
    assert "--checkpoints" in caught.value.advice
    with Folder(tmp_path / "data", f"{scheme}{tmp_path / 'new'}").locked():
        assert list((tmp_path / "new").iterdir()) == []
    with Folder(tmp_path / "data", "s3a://bucket/flows").locked():
        pass


def test_counts_are_kept_by_generation_and_lost_without_harm(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.counts("f", 1) == {}
    folder.write_counts("f", {"rows_in": 5, "dead_letters": 1}, 2)
    assert (folder.counts("f", 1), folder.counts("f", 2)["dead_letters"]) == ({}, 1)
    (tmp_path / "f" / "g2" / "counts.json").write_text("[1]")
    assert folder.counts("f", 2) == {}
    progress = Progress.restored({"rows_in": 5, "other": 3})
    assert (progress.rows_in, progress.totals()["late_rows"]) == (5, 0)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "flows")
    with folder.locked():
        with pytest.raises(AlreadyRunningError, match="another `penstock run`"):
            with Folder(tmp_path / "flows").locked():
                pass
    with folder.locked():
        pass


def test_questions_are_answered(tmp_path: Path) -> None:
    # Longer than a socket's path may be.
    folder = Folder(tmp_path / ("x" * 120))
    folder.path.mkdir()

    def answer(question: dict[str, Any]) -> Any:
        if question["do"] == "fail":
            raise FlowError("it does not work", advice="Do it otherwise.")
        if question["do"] == "crash":
            raise ZeroDivisionError
        return [question, os.getpid()]

    with pytest.raises(NotRunningError):
        ask(folder, {"do": "list"})
    with ControlServer(folder, answer):
        assert ask(folder, {"do": "list", "x": "ä"}) == [{"do": "list", "x": "ä"}, os.getpid()]
        with pytest.raises(PenstockError, match="it does not work") as caught:
            ask(folder, {"do": "fail"})
        assert caught.value.advice == "Do it otherwise."
        with pytest.raises(PenstockError, match="ZeroDivisionError"):
            ask(folder, {"do": "crash"})
        _talk_nonsense(folder)
        assert ask(folder, {"do": "still there"})
    with pytest.raises(NotRunningError):
        ask(folder, {"do": "list"})


def _talk_nonsense(folder: Folder) -> None:
    run = folder.run()
    assert run is not None
    for words in (b"", b"nonsense\n", b"[1]\n", b"x" * 100_000):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(run["socket"])
            try:
                connection.sendall(words)
            except BrokenPipeError:
                continue
            if words.endswith(b"\n"):
                assert b"error" in connection.recv(1000)


def test_who_was_killed_is_not_running(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write_run({"pid": 1, "socket": str(tmp_path / "gone")})
    with pytest.raises(NotRunningError, match="no `penstock run`"):
        ask(folder, {"do": "list"})


def written(folder: Folder, name: str, generation: int, *topics: str, **more: Any) -> Record:
    """A flow that has written topics, in all generations up to one."""
    prints = {
        str(number): Fingerprint(streams=more.get("streams", ())).as_dict()
        for number in range(1, generation + 1)
    }
    record = Record(
        name,
        topics=topics,
        asides=more.get("asides", ()),
        generation=generation,
        fingerprints=prints,
        updated_ms=more.get("updated_ms", 1),
    )
    folder.write(record)
    return record


def test_which_version_of_a_topic_counts(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.resolve("visits") == "visits"
    written(folder, "visiting", 3, "visits", asides=("clicks.dead",))
    assert folder.resolve("visits") == "visits.v3"
    assert folder.resolve("clicks.dead") == "clicks.dead.v3"
    assert folder.resolve("other") == "other"
    # Two write their dead letters there: nobody knows whose are meant.
    written(folder, "counting", 2, "counts", asides=("clicks.dead",))
    assert folder.resolve("clicks.dead") == "clicks.dead"
    # A flow was renamed: the one that ran last writes the topic.
    written(folder, "renamed", 1, "visits", updated_ms=2)
    assert folder.resolve("visits") == "visits"


def test_a_flow_that_rests_may_be_behind(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    written(folder, "visiting", 3, "visits")
    reader = written(folder, "counting", 1, "counts", streams=("clicks.v2", "visits.v2"))
    # clicks.v2 is a name that somebody has chosen.
    assert folder.behind(reader) == [Behind("visits", "visits.v2", "visits.v3")]
    assert folder.behind(written(folder, "ok", 1, "x", streams=("visits.v3",))) == []


def test_a_record_of_before_tells_its_topics(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(Record("visiting", outputs=("topic visits.v2", "sink x"), generation=2))
    assert folder.record("visiting").topics == ("visits",)


@pytest.mark.parametrize(
    ("topic", "is_one"),
    [("a", True), ("a.v2", True), ("a.v10", True), ("a.v1", False), ("a.v", False),
     ("a.v2x", False), ("ab", False), ("a.v2.dead", False), ("a.v02", False)],
)  # fmt: skip
def test_versions_are_told_from_other_names(topic: str, is_one: bool) -> None:
    assert is_version(topic, "a") is is_one


def test_only_an_older_version_is_behind() -> None:
    present = {"a": "a.v3", "b": "b"}
    assert [str(each) for each in behind(["a", "b"], ["a.v2", "b"], present)] == [
        "a.v2, whose place a.v3 has taken"
    ]
    assert behind(["a", "b"], ["a.v3", "b"], present) == []
    # Another topic, or another number of them: that is a change of the flow.
    assert behind(["a", "b"], ["c", "b"], present) == []
    assert behind(["a"], ["a", "b"], present) == []


def test_what_is_left_and_what_is_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    written(folder, "visiting", 3, "visits", asides=("clicks.dead",))
    written(folder, "counting", 1, "counts", asides=("clicks.dead",), streams=("visits.v2",))
    folder.forget_checkpoint("visiting", 3)
    (tmp_path / "visiting" / "g1").mkdir()
    there = {"visits", "visits.v2", "visits.v3", "clicks.dead", "clicks.dead.v2"}
    found = leftovers(folder, there, {"visits": ["group x has read it"]})
    assert {each.name: each.kept for each in found} == {
        "visits": "group x has read it",
        "visits.v2": "flow counting reads it",
        "clicks.dead": "flow counting writes it",
        "clicks.dead.v2": "",
        str(tmp_path / "visiting" / "g1"): "",
    }
    # A name may be somebody else's, once it has been cleaned up.
    folder.write(cleaned(folder.record("visiting"), [1]))
    assert {each.generation for each in leftovers(folder, there, {})} == {2}
    assert folder.record("visiting").next_generation() == 4


def test_readers_of_readers_are_rebuilt_too(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    written(folder, "a", 2, "a-out")
    written(folder, "b", 1, "b-out", streams=("x", "a-out.v2"))
    written(folder, "c", 1, "c-out", streams=("b-out",))
    written(folder, "d", 1, "d-out", streams=("x",))
    assert readers_of(folder, "a") == ["b", "c"]
