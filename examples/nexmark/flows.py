"""NEXMark as flows: `python generator.py`, then `penstock run flows.py`.

Streams are timed by `date_time`; events may be two seconds out of order.
"""

from __future__ import annotations

import queries as q  # type: ignore[import-not-found]

from penstock.spark import flow, stream, topic

BIDS = stream("nexmark.bid", json=q.BID)
# Their times are made up: heartbeats, of the clock, would make late what comes after them. So flows
# are warned of that keep all that comes while a partition rests.
TIMED_BIDS = stream("nexmark.bid", json=q.BID, time="date_time", lateness="2 seconds")
CLOCKED_BIDS = stream("nexmark.bid", json=q.BID, time="_timestamp")
TIMED_AUCTIONS = stream("nexmark.auction", json=q.AUCTION, time="date_time", lateness="2 seconds")
TIMED_PEOPLE = stream("nexmark.person", json=q.PERSON, time="date_time", lateness="2 seconds")
AUCTIONS = stream("nexmark.auction", changelog=q.AUCTION)
PEOPLE = stream("nexmark.person", changelog=q.PERSON)
WINNING = stream(
    "q4.winning", changelog="id bigint, category bigint, final bigint", dead_letters=None
)

q0 = flow(inputs=BIDS, output=topic("q0"), name="q0")(q.q0)
q1 = flow(inputs=BIDS, output=topic("q1"), name="q1")(q.q1)
q2 = flow(inputs=BIDS, output=topic("q2"), name="q2")(q.q2)
q3 = flow(inputs=[AUCTIONS, PEOPLE], output=topic("q3", key="_key", compacted=True), name="q3")(
    q.q3
)
winning = flow(
    inputs=[AUCTIONS, BIDS], output=topic("q4.winning", key="_key", compacted=True), name="winning"
)(q.winning)
q4 = flow(inputs=WINNING, output=topic("q4", key="_key", compacted=True), name="q4")(q.q4)
q5 = flow(inputs=TIMED_BIDS, output=topic("q5"), name="q5")(q.q5)
q6 = flow(inputs=[TIMED_AUCTIONS, TIMED_BIDS], output=topic("q6", key="seller"), name="q6")(q.q6)
q7 = flow(inputs=TIMED_BIDS, output=topic("q7"), name="q7")(q.q7)
q8 = flow(inputs=[TIMED_PEOPLE, TIMED_AUCTIONS], output=topic("q8"), name="q8")(q.q8)
q11 = flow(inputs=TIMED_BIDS, output=topic("q11"), name="q11")(q.q11)
q12 = flow(inputs=CLOCKED_BIDS, output=topic("q12"), name="q12")(q.q12)
q13 = flow(inputs=[BIDS, AUCTIONS], output=topic("q13"), name="q13")(q.q13)
q14 = flow(inputs=BIDS, output=topic("q14"), name="q14")(q.q14)
q15 = flow(inputs=TIMED_BIDS, output=topic("q15"), name="q15")(q.q15)
q16 = flow(inputs=TIMED_BIDS, output=topic("q16"), name="q16")(q.q16)
q17 = flow(inputs=TIMED_BIDS, output=topic("q17"), name="q17")(q.q17)
q20 = flow(inputs=[BIDS, AUCTIONS], output=topic("q20"), name="q20")(q.q20)
q21 = flow(inputs=BIDS, output=topic("q21"), name="q21")(q.q21)
q22 = flow(inputs=BIDS, output=topic("q22"), name="q22")(q.q22)
