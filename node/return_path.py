"""How answers and failures get to the gateway: on a link of its own where there is one, else up the chain.

Knows links and the outbox; nothing of what a step computed.
"""

from __future__ import annotations

import logging

from node.outbox import Gone, Outbox
from node.session import Session
from node.stats import NodeStats
from routing import wire
from routing.endpoint import STALE_AFTER_S, Endpoint
from routing.errors import ProtocolError, RemoteError
from routing.link import Link
from routing.outbox import MAX_QUEUED
from routing.types import Answer, Failure, SessionId

logger = logging.getLogger(__name__)


class ReturnPath:
    """Sends towards gateways. Connected to its endpoint after both are built."""

    def __init__(self, outbox: Outbox, stats: NodeStats) -> None:
        self._outbox = outbox
        self._stats = stats
        self._endpoint: Endpoint | None = None

    def connect(self, endpoint: Endpoint) -> None:
        """Give it the endpoint that knows the gateways' own links."""
        self._endpoint = endpoint

    def send(self, session: Session, message: Answer | Failure, gone: Gone | None = None) -> None:
        """Send to the session's gateway; an answer of ours that goes up the chain is sealed first.

        The message is lost when no link leads there: the gateway asks again on its next route.
        """
        link = self.gateway_link(session)
        session.returned_on = link
        if link is None:
            link = session.upstream
            if link is not None and isinstance(message, Answer) and session.entry.next_hop is None:
                message = wire.seal_answer(session.entry.answer_key, message)
        if link is not None:
            error = self._outbox.put(link, message, gone)
            if isinstance(error, ProtocolError) and isinstance(message, Answer):
                self.report(session, message.step, error)  # too big for the peer: say so instead
        elif gone is not None:
            gone()

    def report(self, session: Session, step: int, error: RemoteError) -> None:
        """Tell the gateway that a step, or the session, failed here."""
        hop = session.entry.hop if error.hop is None else error.hop
        told = {**session.log_fields, "code": error.code.name}
        logger.info(
            "session %s hop %d: step %d failed, %s", session.name, hop, step, error.code.name, extra=told
        )
        if session.trace is not None:
            session.trace.note_trouble(error.code.name)
        self._stats.failures_sent += 1
        self.send(session, _failure(session.session_id, session.epoch, step, error, hop))

    def refuse(
        self,
        link: Link,
        session_id: SessionId,
        epoch: int,
        error: RemoteError,
        *,
        step: int = 0,
        hop: int = 0,
    ) -> None:
        """Tell whoever sent a message, and nobody else, that it concerns no session of theirs here.

        One that does not read what it is told is not told any more.
        """
        logger.debug("session %s hop %d: refused, %s", session_id[:4].hex(), hop, error.code.name)
        if link.num_waiting > MAX_QUEUED:
            return
        self._stats.failures_sent += 1
        self._outbox.put(link, _failure(session_id, epoch, step, error, hop))

    def gateway_link(self, session: Session) -> Link | None:
        """The best live link that the session's gateway has with us: one that is not silent, direct, the newest."""
        assert self._endpoint is not None
        links = self._endpoint.links_to(session.entry.gateway_id)
        if len(links) == 1 and not links[0].is_closed:
            return links[0]
        links = [link for link in links if not link.is_closed]
        return next(
            (link for link in links if link.silent_for_s < STALE_AFTER_S), links[0] if links else None
        )


def _failure(session_id: SessionId, epoch: int, step: int, error: RemoteError, hop: int) -> Failure:
    return Failure(session_id, epoch, step, int(error.code), hop, error.retry_ms, error.text, error.room)
