"""The channels of a link that carry circuits beside its own session.

Each is announced by a sealed message (`RelayOpen`, `Incoming`) before its first frame, and has one taker.
Knows nothing of what the bodies hold or who stands at the other end.
"""

from __future__ import annotations

from collections.abc import Callable

from routing.errors import ErrorCode, ProtocolError, RelayError
from routing.mux import Channel, ChannelEnd, ChannelTaker, DataFrame, Mux
from routing.outbox import Outgoing
from routing.types import Message

MAX_CIRCUITS = 64  # of one link, transport.md 5.6


class SideChannels:
    """Opens, adopts and ends circuits' channels of one link.

    `push` queues a message of the link's session, `take_back` forgets one that has not left.
    """

    def __init__(
        self, mux: Mux, push: Callable[[Message], Outgoing], take_back: Callable[[Outgoing], None]
    ) -> None:
        self._mux = mux
        self._push = push
        self._take_back = take_back
        self._announcements: dict[Channel, Outgoing] = {}  # of our own channels
        self.unclaimed: Channel | None = None  # announced just now
        self.live: set[Channel] = set()

    def __len__(self) -> int:
        return len(self.live)

    @property
    def has_room(self) -> bool:
        """Whether one more circuit may be opened or claimed."""
        return len(self.live) < MAX_CIRCUITS

    def open(self, announce: Callable[[int], Message], taker: ChannelTaker) -> Channel:
        """Open a channel and tell the peer by `announce(number)`. Raises `RelayError` RELAY_FULL, `LinkError`."""
        if not self.has_room:
            raise RelayError(ErrorCode.RELAY_FULL, f"a link carries {MAX_CIRCUITS} circuits at most")
        channel = self._mux.open_circuit()
        channel.taker = taker
        try:
            self._announcements[channel] = self._push(announce(channel.number))
        except BaseException:
            self._mux.forget(channel)
            raise
        self.live.add(channel)
        return channel

    def announced(self, number: int) -> None:
        """The peer has opened a channel, and the next message says for what. Raises `ProtocolError` STATE."""
        self.unclaimed = self._mux.adopt(number)

    def claim(self, number: int, taker: ChannelTaker) -> Channel:
        """Take the channel that was announced just now."""
        channel = self.unclaimed
        assert channel is not None, "a channel is claimed at once or never"
        assert channel.number == number, "another channel was announced"
        self.unclaimed = None
        channel.taker = taker
        self.live.add(channel)
        return channel

    def settle(self) -> Channel | None:
        """Drop the announced channel if nobody has claimed it; return it then."""
        channel, self.unclaimed = self.unclaimed, None
        if channel is not None:
            self._mux.forget(channel)
        return channel

    def take(self, event: DataFrame | ChannelEnd) -> None:
        """Give a frame, or an end, to the channel's taker."""
        channel = event.channel
        if channel.taker is None:
            raise ProtocolError(ErrorCode.STATE, "a frame came on a channel that nobody has taken")
        if isinstance(event, DataFrame):
            channel.taker.on_body(event.record)
        else:
            self._drop(channel)
            channel.taker.on_channel_over(event.code)

    def refused(self, number: int) -> ChannelTaker | None:
        """The peer has no use for a channel of ours: drop it, and return whose it was."""
        channel = self._mux.channels.get(number)
        if channel not in self._announcements or channel is None:
            return None
        self._drop(channel)
        self._mux.forget(channel)
        return channel.taker

    def end(self, channel: Channel, code: int | None = None) -> None:
        """End a channel of either side; one that the peer has not heard of is only forgotten."""
        announcement = self._announcements.get(channel)
        self._drop(channel)
        if announcement is not None and not announcement.is_done:
            self._take_back(announcement)
            self._mux.forget(channel)
        else:
            self._mux.end(channel, code)

    def close(self) -> None:
        """The link is over: so is every circuit on it."""
        for channel in tuple(self.live):
            self._drop(channel)
            self._mux.forget(channel)
            assert channel.taker is not None
            channel.taker.on_channel_over(int(ErrorCode.PEER_GONE))

    def _drop(self, channel: Channel) -> None:
        self.live.discard(channel)
        self._announcements.pop(channel, None)
