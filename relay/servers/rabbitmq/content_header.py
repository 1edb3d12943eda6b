"""Decode and encode the properties of a message: every value that an AMQP client can put there.

The AMQP library cannot do this. Its decoder raises on texts that are not UTF-8, on moments after the year 9999 and on
deep tables. It takes seconds for a header of 128 KiB, because it copies the rest of the header for each value. Its
encoder cuts long names, and cannot write bytes or 64-bit floats.

A value that cannot be decoded is left out, or shown escaped. Two headers report it: `x-undecodable` says why, and
`x-raw-header` has the payload of the frame (base64). Consumers do not apply such a message (`relay.consume.message`).
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from struct import Struct
from struct import error as StructError  # noqa: N812  (an exception)
from typing import Any

from pamqp import encode
from pamqp.commands import Basic
from pamqp.header import ContentHeader

UNDECODABLE, RAW_HEADER, RAW_METHOD = "x-undecodable", "x-raw-header", "x-raw-method"

# The limits of Python, PostgreSQL and JSON libraries differ. The outbox itself takes 64 (`relay.outbox.headers`).
DEEPEST = 100
MOST_SECONDS = 0xFFFFFFFF  # a larger timestamp is read as milliseconds, as the library does
LONGEST_SHOWN = 255  # characters of an escaped text: the most bytes that AMQP's short string has

START, LONG, MOMENT, DECIMAL, FRACTION = Struct(">HHQH"), Struct(">I"), Struct(">Q"), Struct(">Bi"), Struct(">d")
FIXED = {
    ord(letter): Struct(form)
    for letter, form in {
        "t": ">?", "b": ">b", "B": ">B", "s": ">h", "u": ">H", "I": ">i", "i": ">I", "l": ">q", "L": ">q",
        "f": ">f", "d": ">d",
    }.items()
}  # fmt: skip


class Properties(Basic.Properties):
    """Properties whose headers are encoded here: headers that `decode_header` decoded are written as they were.

    The class has no `__slots__`, because the library reads the names of the properties from there.
    """

    def encode_property(self, name: str, value: Any) -> bytes:
        return encode_table(value) if name == "headers" else super().encode_property(name, value)


def encode_table(entries: Mapping[str, Any]) -> bytes:
    """Return the entries in AMQP's encoding, with their size in front. A float keeps its 64 bits.

    Raises:
        ValueError: AMQP has no type for a value; the text begins with the value's name.
    """
    return _long(b"".join(_entry(name, value) for name, value in entries.items()))


class UndecodableError(ValueError):
    """A header, or the rest of it, cannot be decoded."""


def decode_own(payload: bytes) -> ContentHeader:
    """Return a header that was encoded here.

    Raises:
        UndecodableError: the payload is no such header.
    """
    decoder = _Decoder(payload)
    header = decoder.header()
    if decoder.fault is not None:
        raise UndecodableError(decoder.fault)
    return header


def decode_header(payload: bytes) -> ContentHeader:
    """Return the header of a frame; if a part cannot be decoded, its headers say so (see `mark`)."""
    decoder = _Decoder(payload)
    header = decoder.header()
    if decoder.fault is not None:
        mark(header, decoder.fault, {RAW_HEADER: payload})
    return header


def mark(header: ContentHeader, fault: str, raw: Mapping[str, bytes]) -> None:
    """Add headers that say that the message cannot be decoded, with its undecoded parts."""
    told = {name: b64encode(each).decode() for name, each in raw.items()}
    header.properties.headers = {**(header.properties.headers or {}), UNDECODABLE: fault, **told}


def shown(text: bytes) -> str:
    """Return a text that is not UTF-8, escaped."""
    return text.decode("ascii", "backslashreplace")[:LONGEST_SHOWN]


class _Decoder:
    """Reads a payload once, from first to last byte.

    Attributes:
        fault: the first part that cannot be decoded, and why.
    """

    def __init__(self, payload: bytes) -> None:
        self.fault: str | None = None
        self._data = payload
        self._at = START.size
        self._depth = 0

    def header(self) -> ContentHeader:
        properties = Properties()
        body_size = 0
        try:
            _, _, body_size, flags = START.unpack_from(self._data)
            for name, flag, read in PROPERTIES:
                if flags & flag:
                    setattr(properties, name, read(self))
            self._check_end(self._at, len(self._data))
        except (IndexError, StructError):
            self._note("it ends too early")
        except UndecodableError as error:
            self._note(str(error))
        return ContentHeader(body_size=body_size, properties=properties)

    def short_text(self) -> str:
        start = self._at + 1
        self._at = start + self._data[self._at]
        text = self._data[start : self._at]
        try:
            return text.decode()
        except UnicodeDecodeError:
            self._note(f"{text!r} is not UTF-8")
            return shown(text)

    def octet(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def moment(self) -> datetime | None:
        (seconds,) = self._take(MOMENT)
        try:
            return datetime.fromtimestamp(seconds if seconds <= MOST_SECONDS else seconds / 1000, UTC)
        except (ValueError, OverflowError, OSError):
            self._note(f"the timestamp {seconds} is after the year 9999")
            return None

    def table(self) -> Any:
        return self._nested(self._entries)

    def _nested(self, read: Callable[[int], Any]) -> Any:
        end = self._end()
        if self._depth == DEEPEST:
            self._note(f"it is nested deeper than {DEEPEST} levels")
            self._at = end
            return None
        self._depth += 1
        values = read(end)
        self._depth -= 1
        self._check_end(self._at, end)
        return values

    def _entries(self, end: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while self._at < end:
            name = self.short_text()
            if name in entries:
                self._note(f"it has two headers {name!r}")
            entries[name] = self._value()
        return entries

    def _items(self, end: int) -> list[Any]:
        items = []
        while self._at < end:
            items.append(self._value())
        return items

    def _value(self) -> Any:
        kind = self.octet()
        if fixed := FIXED.get(kind):
            return self._take(fixed)[0]
        if read := VALUES.get(kind):
            return read(self)
        raise UndecodableError(f"AMQP has no type {chr(kind)!r}")

    def _text(self) -> str | bytes:
        text = self._bytes()
        try:
            return text.decode()
        except UnicodeDecodeError:
            return text

    def _array(self) -> Any:
        return self._nested(self._items)

    def _decimal(self) -> Decimal:
        scale, digits = self._take(DECIMAL)
        return Decimal(digits).scaleb(-scale)

    def _byte_array(self) -> bytearray:
        return bytearray(self._bytes())

    def _void(self) -> None:
        return None

    def _bytes(self) -> bytes:
        end = self._end()
        start, self._at = self._at, end
        return self._data[start:end]

    def _end(self) -> int:
        """Read a size, and return the position after its bytes."""
        (size,) = self._take(LONG)
        end = self._at + int(size)
        if end > len(self._data):
            raise UndecodableError("it ends too early")
        return end

    def _take(self, form: Struct) -> tuple[Any, ...]:
        values = form.unpack_from(self._data, self._at)
        self._at += form.size
        return values

    def _check_end(self, at: int, end: int) -> None:
        if at != end:
            raise UndecodableError("its sizes contradict each other")

    def _note(self, fault: str) -> None:
        self.fault = self.fault or fault


VALUES: dict[int, Callable[[_Decoder], Any]] = {
    ord("S"): _Decoder._text,
    ord("T"): _Decoder.moment,
    ord("F"): _Decoder.table,
    ord("A"): _Decoder._array,
    ord("D"): _Decoder._decimal,
    ord("x"): _Decoder._byte_array,
    ord("V"): _Decoder._void,
    0: _Decoder._void,
}
READ: dict[str, Callable[[_Decoder], Any]] = {
    "shortstr": _Decoder.short_text,
    "table": _Decoder.table,
    "octet": _Decoder.octet,
    "timestamp": _Decoder.moment,
}
PROPERTIES = [
    (name, Basic.Properties.flags[name], READ[Basic.Properties.amqp_type(name)])
    for name in Basic.Properties.attributes()
]


def _entry(name: str, value: Any) -> bytes:
    try:
        return encode.short_string(name) + _value(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from error


def _value(value: Any) -> bytes:
    match value:
        case float():
            return b"d" + FRACTION.pack(value)
        case bytes():
            return b"S" + _long(value)
        case dict():
            return b"F" + encode_table(value)
        case list():
            return b"A" + _long(b"".join(map(_value, value)))
        case _:
            return encode.encode_table_value(value)


def _long(data: bytes) -> bytes:
    return LONG.pack(len(data)) + data
