"""Encode rows by either codec, and decode the frames by the library."""

from collections.abc import Callable
from typing import Any

import pamqp.frame

from relay.config.settings import Route
from relay.engine.send.frames import Encoder
from relay.engine.send.message import MessageIdentity
from relay.engine.send.routes import Router

IDENTITY = MessageIdentity(b"outbox-relay", 1 << 20)
Make = Callable[[int, int, Router, MessageIdentity], Encoder]


def encoder(make: Make, *routes: Route, frame_max: int = 4096) -> Encoder:
    """Return an encoder for channel 7."""
    return make(7, frame_max, Router(routes, "outbox"), IDENTITY)


def decode(data: bytes) -> list[Any]:
    """Return the frames, decoded by the library."""
    decoded = []
    while data:
        size, channel, frame = pamqp.frame.unmarshal(data)
        assert channel == 7
        decoded.append(frame)
        data = data[size:]
    return decoded
