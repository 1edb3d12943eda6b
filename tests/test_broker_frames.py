"""Frames that the AMQP library cannot decode, without a broker."""

import asyncio
import struct
from typing import Any

import pytest
from aiormq.exceptions import InvalidFrameError
from pamqp.commands import Channel, Connection

from relay.servers.rabbitmq.frames import FrameReader


def method_frame(payload: bytes) -> bytes:
    return struct.pack(">BHI", 1, 1, len(payload)) + payload + b"\xce"


async def read(frame: bytes) -> Any:
    reader = asyncio.StreamReader()
    reader.feed_data(frame)
    _, _, came = await FrameReader(reader).get_frame()
    return came


@pytest.mark.parametrize(("index", "kind"), [((10, 50), Connection.Close), ((20, 40), Channel.Close)])
async def test_a_close_whose_words_are_cut_within_a_character_is_read(index: tuple[int, int], kind: Any) -> None:
    text = "NOT_FOUND - no exchange '\u00e9".encode() + b"\xc3..."

    came = await read(method_frame(struct.pack(">HHHB", *index, 404, len(text)) + text + struct.pack(">HH", 60, 40)))

    assert type(came) is kind
    assert (came.reply_code, came.reply_text) == (404, "NOT_FOUND - no exchange '\u00e9...")
    assert (came.class_id, came.method_id) == (60, 40)


async def test_any_other_method_that_cannot_be_decoded_ends_the_connection() -> None:
    with pytest.raises(InvalidFrameError):
        await read(method_frame(struct.pack(">HH", 50, 11) + b"\x01\xff" + struct.pack(">II", 0, 0)))
