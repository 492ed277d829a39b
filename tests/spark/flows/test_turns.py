"""Turns to start: in order, so many at once, and nobody is held up for ever."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.spark.flows.turns import NotWantedError, Turns
from tests.waiting import eventually


def always() -> bool:
    return True


def never() -> bool:
    return False


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_turns_come_in_order_and_not_too_many_at_once(at_once: int) -> None:
    turns = Turns(at_once)
    chance = random.Random(at_once)
    asked = [turns.asked() for _ in range(20)]
    begun: list[int] = []
    running: set[int] = set()
    most = 0
    lock = threading.Lock()

    def start(number: int) -> None:
        nonlocal most
        asked[number].wait(always)
        with lock:
            begun.append(number)
            running.add(number)
            most = max(most, len(running))

    with ThreadPoolExecutor(20) as pool:
        futures = [pool.submit(start, number) for number in chance.sample(range(20), 20)]
        for _ in range(20):
            eventually(lambda: running)
            with lock:
                number = chance.choice(sorted(running))
                running.discard(number)
            assert asked[number].is_over(always)
        for each in futures:
            each.result()
    assert most <= at_once
    assert sorted(begun) == list(range(20))
    # Threads that may begin at the same time can note it in any order.
    assert at_once > 1 or begun == sorted(begun)


def test_who_is_not_wanted_any_more_lets_the_others_go_on() -> None:
    turns = Turns(1)
    first, second, third = (turns.asked() for _ in range(3))
    first.wait(always)
    with pytest.raises(NotWantedError):
        second.wait(never)
    assert not first.is_over(never)
    assert first.is_over(always)
    third.wait(always)


def test_one_that_cannot_begin_holds_nobody_up_for_long() -> None:
    turns = Turns(1, most_s=0.05)
    stuck, second = turns.asked(), turns.asked()
    stuck.wait(always)
    # Nobody looks at the first: it still connects to a server that does not answer.
    second.wait(always)
    assert second.is_over(always)
    stuck.end()


def test_nobody_waits_when_all_is_over() -> None:
    turns = Turns(1)
    first, second = turns.asked(), turns.asked()
    first.wait(always)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.wait, always)
        turns.close()
        with pytest.raises(NotWantedError):
            waiting.result(60)


def test_what_has_nothing_to_do_is_not_waited_for_long() -> None:
    turns = Turns(1, most_s=0.05)
    first, second = turns.asked(), turns.asked()
    first.wait(always)
    eventually(lambda: first.is_over(never))
    second.wait(always)
    # Twice does no harm.
    assert first.is_over(always)
    assert second.is_over(always)
