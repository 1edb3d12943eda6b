"""Properties and routing keys that a broker accepts, and that a Python client cannot decode."""

import struct
from typing import Any

from tests.support.raw_client import entry, nested

FAR = 253_402_300_800 * 1000  # the year 10000; the library takes what is so large for milliseconds
DEEP = 3000

UNDECODABLE: dict[str, dict[str, Any]] = {
    "type": {"message_type": b"Coun\xffted"},
    "message-id": {"message_id": b"\xff" * 255},
    "content-type": {"content_type": b"\xed\xa0\x80"},
    "timestamp": {"timestamp": FAR},
    "timestamp-of-64-bits": {"timestamp": 2**64 - 1},
    "header-name": {"headers": entry(b"\xff", b"V")},
    "header-timestamp": {"headers": entry(b"at", b"T" + struct.pack(">Q", FAR))},
    "header-depth": {"headers": entry(b"deep", nested(b"A", DEEP))},
    "routing-key": {"routing_key": b"\xff"},
}
