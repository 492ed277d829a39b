"""From Spark's long reports to what a person needs: what, where, what to do, whether to wait."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException

from penstock.client.errors import OffsetGoneError, UnreachableError
from penstock.spark.flows.errors import FlowFileError, UserCodeError
from penstock.spark.flows.trouble import MAX_MESSAGE, explain
from penstock.spark.patterns import PatternError, begin
from penstock.spark.sink.errors import SinkUnavailableError

FAILED = (
    "[STREAM_FAILED] Query [id = 8a2f, runId = 77ee] terminated with exception: {} SQLSTATE: XXKST"
)
WORKER = """Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times: \
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/x/site-packages/pyspark/worker.py", line 1, in main
    process()
{}

	at org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:5)
	at java.base/java.lang.Thread.run(Thread.java:840)
"""


def told(text: str) -> StreamingQueryException:
    return StreamingQueryException(FAILED.format(text))


def why(error: BaseException) -> tuple[str, str, bool]:
    failure = explain(error, flow="f", checkpoint="/data/f")
    return failure.message, failure.advice, failure.retriable


def test_an_error_of_ours_as_it_is() -> None:
    assert why(UnreachableError("nobody there")) == ("nobody there", UnreachableError.advice, True)
    error = SinkUnavailableError("no answer", advice="Wait.")
    assert why(error) == ("no answer", "Wait.", True)
    try:
        try:
            raise OffsetGoneError("orders", 3, 17, 20, 90)
        except OffsetGoneError as inner:
            raise RuntimeError("in between") from inner
    except RuntimeError as outer:
        message, advice, retriable = why(outer)
    assert message == "orders-3 has no offset 17: the log goes from 20 to 90"
    assert "retention.ms" in advice
    assert not retriable


def test_a_wrong_declaration_is_told_with_the_line_of_the_user() -> None:
    def declared() -> None:
        begin("a", "amount >")

    with pytest.raises(PatternError) as caught:
        declared()
    line = declared.__code__.co_firstlineno + 1
    message, _, retriable = why(caught.value)
    assert message.startswith(f"tests/spark/flows/test_trouble.py:{line}: condition of 'a', 1:")
    assert message.endswith("^")
    assert not retriable
    # What says where it is already is left as it is.
    assert why(FlowFileError(message))[0] == message


def test_an_error_of_ours_inside_a_report() -> None:
    gone = (
        '  File "/x/penstock/client/fetching.py", line 80, in fetch\n'
        "penstock.client.errors.OffsetGoneError: orders-3 has no offset 17: the log goes from 20 "
        "to 90"
    )
    message, advice, retriable = why(told(WORKER.format(gone)))
    assert message == "orders-3 has no offset 17: the log goes from 20 to 90"
    assert advice.startswith("Start from")
    assert not retriable
    away = "penstock.client.errors.UnreachableError: 127.0.0.1:9: connection refused"
    assert why(told(WORKER.format(away)))[2]


def test_the_advice_of_an_error_of_a_task_comes_with_it() -> None:
    noted = (
        "penstock.spark.windows.errors.WindowError: an event came too late\n"
        "advice: Let `_time` be as it is."
    )
    assert why(told(WORKER.format(noted)))[:2] == (
        "an event came too late",
        "Let `_time` be as it is.",
    )
    raised = f"[USER_RAISED_EXCEPTION] {noted} SQLSTATE: P0001"
    assert why(told(raised))[:2] == ("an event came too late", "Let `_time` be as it is.")


def test_of_several_of_ours_the_one_that_came_last_counts() -> None:
    chain = (
        "penstock.client.errors.UnreachableError: connection refused\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        "penstock.spark.source.errors.SourceUnavailableError: topic orders cannot be asked for. "
        "Is the broker running, and the address right?"
    )
    message, _, retriable = why(told(WORKER.format(chain)))
    assert message.startswith("topic orders cannot be asked for")
    assert retriable


def test_a_name_that_only_looks_like_one_of_ours_is_not_taken_for_one() -> None:
    line = "penstock.no_such_module.AnyError: hello"
    assert "hello" in why(told(WORKER.format(line)))[0]


def test_a_checkpoint_that_cannot_be_written_is_not_tried_again() -> None:
    text = "java.io.IOException: Mkdirs failed to create file:/data/f/g1 (exists=false)"
    found = explain(told(text), flow="f", checkpoint="/data/f/g1/checkpoint")
    assert found.message.startswith("the checkpoint /data/f/g1/checkpoint cannot be written")
    assert not found.retriable
    # The same words of something else may pass.
    assert explain(told(text), flow="f", checkpoint="/else/f/g1/checkpoint").retriable


def test_a_full_disk() -> None:
    message, advice, retriable = why(told("java.io.IOException: No space left on device"))
    assert message == "no space is left on the disk of the checkpoint, /data/f"
    assert "nothing is lost" in advice
    assert retriable


@pytest.mark.parametrize(
    "text",
    [
        "[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] Provided key schema does not match. SQLSTATE: 42K",
        "There are [1] sources in the checkpoint offsets and now there are [2] sources requested",
        "[STREAMING_STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA] Streaming stateful operator",
    ],
)
def test_state_that_does_not_fit(text: str) -> None:
    _, advice, retriable = why(told(text))
    assert "penstock flows reset f" in advice
    assert not retriable


def test_a_damaged_checkpoint() -> None:
    message, advice, retriable = why(told("[CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error"))
    assert "/data/f" in message
    assert "backup" in advice
    assert not retriable


def test_the_users_function_in_a_worker() -> None:
    lines = (
        '  File "/home/me/flows.py", line 12, in half\n'
        "    return 1 / value\n"
        '  File "/x/site-packages/numpy/core.py", line 3, in divide\n'
        "ZeroDivisionError: division by zero"
    )
    message, advice, retriable = why(told(WORKER.format(lines)))
    assert message == "/home/me/flows.py:12: ZeroDivisionError: division by zero"
    assert advice == UserCodeError.advice
    assert not retriable


def test_the_standard_library_is_never_the_place() -> None:
    lines = (
        '  File "/home/me/flows.py", line 12, in read\n'
        "    return json.loads(value)\n"
        '  File "/usr/lib/python3.11/json/decoder.py", line 337, in decode\n'
        "ValueError: no JSON"
    )
    assert why(told(WORKER.format(lines)))[0] == "/home/me/flows.py:12: ValueError: no JSON"
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(json.loads, "{").exception()
    assert error is not None
    message, advice, _ = why(error)
    assert message.startswith("JSONDecodeError: ")
    assert "`penstock run`" in advice


def test_the_users_function_here() -> None:
    def function() -> None:
        raise KeyError("colour")

    with pytest.raises(KeyError) as caught:
        function()
    message, _, retriable = why(caught.value)
    assert "KeyError: 'colour'" in message
    assert message.startswith("tests/spark/flows/test_trouble.py:")
    assert not retriable


def test_a_plan_is_not_shown() -> None:
    text = (
        "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column `colr` cannot be resolved. Did you mean "
        "`color`? SQLSTATE: 42703;\n'Project ['colr]\n+- Relation\n\nJVM stacktrace: ..."
    )
    message, _, retriable = why(AnalysisException(text))
    assert message == (
        "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column `colr` cannot be resolved. Did you mean "
        "`color`?"
    )
    assert not retriable


def test_a_row_that_an_expression_does_not_take() -> None:
    text = "[DIVIDE_BY_ZERO] Division by zero. Use `try_divide`. SQLSTATE: 22012"
    message, _, retriable = why(told(text))
    assert message.startswith("[DIVIDE_BY_ZERO] Division by zero.")
    assert not retriable


def test_anything_else_may_pass() -> None:
    message, _, retriable = why(told("ExecutorLostFailure (executor 1 exited)"))
    assert message == "ExecutorLostFailure (executor 1 exited)"
    assert retriable


def test_a_long_report_is_cut() -> None:
    assert len(why(told("x" * 100_000))[0]) < MAX_MESSAGE + 10
