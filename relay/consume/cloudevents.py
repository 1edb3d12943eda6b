"""Take the CloudEvents envelope of the relay (`cloudevents = "structured"`) off a message.

The payload is cut out, not decoded and written again: a number of forty digits stays what its writer wrote.
"""

import re
from base64 import b64decode
from typing import NamedTuple

import orjson

# The last member of the envelope. No text before it holds these bytes: a quote within a JSON text is escaped.
DATA = re.compile(rb',"data(_base64)?":')


class Unwrapped(NamedTuple):
    """The payload as its writer wrote it, and its content type."""

    body: bytes
    content_type: str | None


def unwrapped(body: bytes) -> Unwrapped:
    """Return what an envelope holds.

    Raises:
        ValueError: the body is no envelope of the relay.
    """
    found = DATA.search(body)
    if found is None or not body.endswith(b"}"):
        raise ValueError("it has no data at its end")
    content_type = orjson.loads(body[: found.start()] + b"}").get("datacontenttype")
    if not isinstance(content_type, str):
        raise ValueError("it has no datacontenttype")
    data = body[found.end() : -1]
    if not data:
        raise ValueError("its data is empty")
    if not found[1]:
        return Unwrapped(data, content_type)
    if len(data) < 2 or data[:1] + data[-1:] != b'""':
        raise ValueError("its data_base64 is no text")
    return Unwrapped(b64decode(data[1:-1], validate=True), content_type)
