"""What we write as binary messages, read by the library that the other end reads with."""

from __future__ import annotations

import pytest
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side

from routing.mux import MAX_FRAME
from routing.transport import _binary

SIZES = (0, 1, 125, 126, 127, 65_535, 65_536, MAX_FRAME)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", [Side.CLIENT, Side.SERVER])
def test_a_message_is_read_as_it_was_written(side: Side, size: int) -> None:
    payload = bytearray(number % 251 for number in range(size))
    reader = Protocol(Side.SERVER if side is Side.CLIENT else Side.CLIENT, max_size=MAX_FRAME)
    reader.receive_data(_binary(payload, is_masked=side is Side.CLIENT))
    (frame,) = reader.events_received()
    assert isinstance(frame, Frame)
    assert (frame.opcode, frame.fin, bytes(frame.data)) == (Opcode.BINARY, True, bytes(payload))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_masked_has_the_librarys_bytes(size: int) -> None:
    written = _binary(memoryview(bytes(size)), is_masked=False)
    assert written == Frame(Opcode.BINARY, bytes(size)).serialize(mask=False)


def test_each_message_of_a_client_has_a_mask_of_its_own() -> None:
    messages = {_binary(bytes(64), is_masked=True) for _ in range(100)}
    assert len(messages) > 90
