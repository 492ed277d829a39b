"""What the broker keeps for its queues besides their state: sessions, rounds, dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.broker.shares.dead_letters import DeadLetters
from penstock.broker.shares.rounds import ShareRounds
from penstock.broker.shares.sessions import ShareSession, ShareSessions

if TYPE_CHECKING:
    from penstock.broker.connection import Connection
    from penstock.broker.server import Broker


class Queues:
    """The working side of all share groups of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.sessions = ShareSessions()
        self.rounds = ShareRounds(broker)
        self.dead_letters = DeadLetters(broker, self.rounds)
        shares = broker.coordination.shares
        shares.on_dying = self.dead_letters.add
        # What sessions have given out is void then; clients begin new ones.
        shares.on_reset = self.sessions.clear

    def begin_session(self, group: str, member: str, connection: Connection) -> ShareSession:
        """A session that lasts as long as its connection."""
        session = self.sessions.begin(group, member)

        def lost() -> None:
            self.end_session(session)

        def tie() -> None:
            connection.on_lost.discard(lost)

        connection.on_lost.add(lost)
        session.tie = tie
        return session

    def end_session(self, session: ShareSession) -> None:
        """End a session: what its member has not answered for is free for others."""
        if self.sessions.end(session):
            self._broker.coordination.shares.session_ended(session.group, session.member)
            self.rounds.request()
