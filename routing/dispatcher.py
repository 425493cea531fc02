"""One endpoint, several receivers: each message goes to whoever takes its kind, turning points of links to all.

Knows message classes; nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from routing.errors import RemoteError
from routing.link import Link, LinkReceiver, log_receiver_failure
from routing.types import Message


class Dispatcher:
    """A `LinkReceiver` over others. Kinds that nobody takes are dropped and counted."""

    def __init__(self) -> None:
        self._receivers: list[LinkReceiver] = []
        self._takers: dict[type[Message], LinkReceiver] = {}
        self.num_unclaimed = 0

    def add(self, receiver: LinkReceiver, kinds: Iterable[type[Message]] = ()) -> None:
        """Give messages of these kinds to `receiver`, and every turning point of links. Earlier claims stay."""
        self._receivers.append(receiver)
        for kind in kinds:
            self._takers.setdefault(kind, receiver)

    def on_message(self, link: Link, message: Message) -> None:
        taker = self._takers.get(type(message))
        if taker is None:
            self.num_unclaimed += 1
        else:
            taker.on_message(link, message)

    def on_link_up(self, link: Link) -> None:
        for receiver in self._receivers:
            _tell("on_link_up", partial(receiver.on_link_up, link))

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None:
        for receiver in self._receivers:
            _tell("on_link_closed", partial(receiver.on_link_closed, link, error))


def _tell(name: str, call: Callable[[], None]) -> None:
    """One receiver's bug must not keep the others in the dark."""
    try:
        call()
    except Exception as error:
        log_receiver_failure(name, error)
