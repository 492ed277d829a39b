"""Alerts over HTTP to a real server: delivered, retried, given up, never waited for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from time import monotonic

from penstock.broker.lag.webhook import ATTEMPTS, Webhook
from tests.broker.lag.receiver import TIMEOUT_S, Receiver


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + TIMEOUT_S
    pause = threading.Event()
    while not condition():
        assert monotonic() < deadline, "it did not happen in time"
        pause.wait(0.005)


def test_a_message_arrives_as_json(receiver: Receiver) -> None:
    hook = Webhook(receiver.url)
    hook.post({"alert": "near-loss", "group": "g"})
    wait_until(lambda: hook.sent == 1)
    assert receiver.got == [("application/json", {"alert": "near-loss", "group": "g"})]
    hook.close()


def test_it_is_tried_again_and_then_given_up(receiver: Receiver) -> None:
    receiver.statuses = [503, 429, 200]
    hook = Webhook(receiver.url, first_pause_s=0.001)
    hook.post({"n": 1})
    wait_until(lambda: hook.sent == 1)
    assert len(receiver.got) == 3
    receiver.statuses = [500] * 100
    hook.post({"n": 2})
    wait_until(lambda: hook.failed == 1)
    assert len(receiver.got) == 3 + ATTEMPTS
    hook.close()


def test_a_refusal_is_not_tried_again(receiver: Receiver) -> None:
    receiver.statuses = [404]
    hook = Webhook(receiver.url, first_pause_s=0.001)
    hook.post({"n": 1})
    wait_until(lambda: hook.failed == 1)
    hook.post({"n": 2})
    wait_until(lambda: hook.sent == 1)
    assert [message["n"] for _, message in receiver.got] == [1, 2]
    hook.close()


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        hook = Webhook(f"http://127.0.0.1:{taken.getsockname()[1]}/", first_pause_s=0.001)
        hook.post({"n": 1})
        wait_until(lambda: hook.failed == 1)
        hook.close()


def test_a_silent_server_costs_a_time_out_and_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        hook = Webhook(url, timeout_s=0.01, first_pause_s=0.001)
        hook.post({"n": 1})
        wait_until(lambda: hook.failed == 1)
        hook.close()


def test_what_waits_is_bounded_and_the_newest_stay(receiver: Receiver) -> None:
    receiver.gate.clear()
    hook = Webhook(receiver.url, max_waiting=3)
    hook.post({"n": 0})
    wait_until(lambda: len(receiver.got) == 1)
    for n in range(1, 11):
        hook.post({"n": n})
    assert hook.dropped == 7
    receiver.gate.set()
    wait_until(lambda: hook.sent == 4)
    assert [message["n"] for _, message in receiver.got] == [0, 8, 9, 10]
    hook.close()


def test_nothing_is_sent_once_it_is_closed(receiver: Receiver) -> None:
    hook = Webhook(receiver.url)
    hook.close()
    hook.post({"n": 1})
    assert receiver.got == []
