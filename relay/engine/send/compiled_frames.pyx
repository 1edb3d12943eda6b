# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled codec: write the frames of many rows into one buffer, without a Python object a field.

Its twin is `frames.Encoder.encode`, which says what it does; both pass the same tests (tests/engine/test_frames.py).
The methods of `Encoder` do what is rare: a new kind of row, headers that are nested or escaped, a fault.
Every size is known, and all that may fail has been done, before a row's first byte is written.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from cpython.tuple cimport PyTuple_Check, PyTuple_GET_SIZE
from libc.stdint cimport int16_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, strncmp

from relay.engine.send import frames
from relay.engine.send.message import (
    ENCODING_ERRORS, LAST_SECOND, OF_OTHERS, OURS, POSTGRES_EPOCH, SENDER_SELECTED, check_row, unix_time
)
from relay.outbox.headers import MAX_HEADER_NAME_BYTES

cdef extern from "Python.h":
    int _PyBytes_Resize(PyObject **bytes, Py_ssize_t size) except -1
    char *data_of "PyBytes_AS_STRING"(PyObject *bytes) nogil
    PyObject *new_bytes "PyBytes_FromStringAndSize"(const char *data, Py_ssize_t size) except NULL

cdef extern from *:
    """
    #if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "the codec swaps bytes: this machine is not little-endian"
    #endif
    #define big16(value) __builtin_bswap16(value)
    #define big32(value) __builtin_bswap32(value)
    #define big64(value) __builtin_bswap64(value)
    """
    uint16_t big16(uint16_t value) nogil
    uint32_t big32(uint32_t value) nogil
    uint64_t big64(uint64_t value) nogil

cdef enum:
    START_BYTES = 4096  # of the buffer, which doubles
    ROW_FIELDS = 22
    BODY_START = 7  # type, channel, size
    MICROSECONDS = 1000000  # of a second
    PLAIN_BYTES = 2048  # more of a row's headers are not written here
    PLAIN_ENTRIES = 16
    DIGITS = 18  # of a number that certainly fits in 64 bits
    TRACEPARENT_BYTES = 55

cdef int64_t EPOCH = POSTGRES_EPOCH
cdef int64_t LATEST = LAST_SECOND
cdef Py_ssize_t PIECE_BYTES = frames.PIECE_BYTES
cdef Py_ssize_t MESSAGE_ID_BYTES = frames.MESSAGE_ID_BYTES
cdef uint32_t BASIC_CONTENT = frames.BASIC_CONTENT
cdef uint16_t FLAGS = frames.FLAGS
cdef bytes KEY_ENTRY = frames.KEY_ENTRY
cdef uint8_t BODY = frames.BODY
cdef uint8_t END = frames.END[0]
cdef Py_ssize_t MAX_NAME_BYTES = MAX_HEADER_NAME_BYTES
cdef bytes TRACE_ENTRY = b"\x0btraceparentS\x00\x00\x007"
TRACE_HEADERS = ("traceparent", "tracestate")


cdef class Buffer:
    """Bytes that are written from the front; `room` before they are."""

    cdef PyObject *data  # a bytes object without another reference
    cdef Py_ssize_t capacity
    cdef Py_ssize_t size

    def __cinit__(self):
        self.capacity = START_BYTES
        self.data = new_bytes(NULL, START_BYTES)

    def __dealloc__(self):
        Py_XDECREF(self.data)

    cdef int room(self, Py_ssize_t size) except -1:
        """Make room for so many bytes more."""
        cdef Py_ssize_t capacity
        if self.size + size > self.capacity:
            capacity = max(self.capacity * 2, self.size + size)
            self.capacity = 0  # until there is one: without memory the bytes are gone
            if self.data == NULL:
                self.data = new_bytes(NULL, capacity)
            else:
                _PyBytes_Resize(&self.data, capacity)
            self.capacity = capacity
        return 0

    cdef bytes taken(self):
        """Return what was written; the caller does not use the buffer again."""
        _PyBytes_Resize(&self.data, self.size)
        return <bytes>self.data

    cdef inline void copy(self, const char *data, Py_ssize_t size) noexcept nogil:
        memcpy(data_of(self.data) + self.size, data, size)
        self.size += size

    cdef inline void put(self, bytes data) noexcept:
        self.copy(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))

    cdef inline void put8(self, uint8_t value) noexcept nogil:
        self.copy(<char *>&value, 1)

    cdef inline void put16(self, uint16_t value) noexcept nogil:
        value = big16(value)
        self.copy(<char *>&value, 2)

    cdef inline void put32(self, uint32_t value) noexcept nogil:
        value = big32(value)
        self.copy(<char *>&value, 4)

    cdef inline void put64(self, uint64_t value) noexcept nogil:
        value = big64(value)
        self.copy(<char *>&value, 8)


cdef class Table(Buffer):
    """The entries of a row's own headers, where they are plain: a flat object of texts in ASCII, integers, true, false
    and null, as PostgreSQL prints jsonb. All else is left to `Encoder.further`.
    """

    cdef frozenset reserved  # names that a row's headers may not have, or not always

    def __init__(self, reserved):
        self.reserved = frozenset(name.encode() for name in reserved)

    cdef bint write(self, bytes headers, bytes traceparent) except -1:
        """Write the entries in place of earlier ones; return whether they are plain."""
        self.size = 0
        if traceparent is not None and not is_traceparent(text_of(traceparent), len(traceparent)):
            return False
        if headers is not None:
            if len(headers) > PLAIN_BYTES:
                return False
            self.room(len(headers))  # an entry is no longer than its JSON
            if not self.write_object(text_of(headers), len(headers)):
                return False
        if traceparent is not None:
            self.room(len(TRACE_ENTRY) + TRACEPARENT_BYTES)
            self.put(TRACE_ENTRY)
            self.put(traceparent)
        return True

    cdef bint write_object(self, const uint8_t *at, Py_ssize_t size) except -1:
        # Behind the text is a zero byte, which is part of nothing that is plain.
        cdef const uint8_t *end = at + size
        cdef const uint8_t *names[PLAIN_ENTRIES]
        cdef Py_ssize_t lengths[PLAIN_ENTRIES]
        cdef Py_ssize_t count = 0, length, other
        if at[0] != c"{":
            return False
        at += 1
        if at[0] == c"}":
            return at + 1 == end
        while count < PLAIN_ENTRIES:
            length = text_length(at)
            if not 0 <= length <= MAX_NAME_BYTES or (<const char *>at)[1:length + 1] in self.reserved:
                return False
            for other in range(count):
                if lengths[other] == length and memcmp(names[other], at + 1, length) == 0:
                    return False
            names[count], lengths[count] = at + 1, length
            count += 1
            self.put8(<uint8_t>length)
            self.copy(<const char *>at + 1, length)
            at += length + 2
            if at[0] != c":":
                return False
            at = self.write_value(at + 1 + (at[1] == c" "))
            if at == NULL:
                return False
            if at[0] == c"}":
                return at + 1 == end
            if at[0] != c",":
                return False
            at += 1 + (at[1] == c" ")
        return False

    cdef const uint8_t *write_value(self, const uint8_t *at) noexcept nogil:
        """Return what is behind the value; NULL if it is not plain."""
        cdef Py_ssize_t length
        if at[0] == c'"':
            length = text_length(at)
            if length < 0:
                return NULL
            self.put8(c"S")
            self.put32(<uint32_t>length)
            self.copy(<const char *>at + 1, length)
            return at + length + 2
        if strncmp(<const char *>at, "true", 4) == 0:
            self.put8(c"t")
            self.put8(1)
            return at + 4
        if strncmp(<const char *>at, "false", 5) == 0:
            self.put8(c"t")
            self.put8(0)
            return at + 5
        if strncmp(<const char *>at, "null", 4) == 0:
            self.put8(c"V")
            return at + 4
        return self.write_integer(at)

    cdef const uint8_t *write_integer(self, const uint8_t *at) noexcept nogil:
        cdef int64_t value = 0
        cdef bint is_negative = at[0] == c"-"
        at += is_negative
        cdef const uint8_t *start = at
        while c"0" <= at[0] <= c"9" and at - start < DIGITS:
            value = value * 10 + at[0] - c"0"
            at += 1
        if at == start or (start[0] == c"0" and (is_negative or at - start > 1)):
            return NULL
        if at[0] != c"," and at[0] != c"}":
            return NULL
        if is_negative:
            value = -value
        # The smallest type, as pamqp chooses it.
        if -(1 << 7) <= value < 1 << 7:
            self.put8(c"b")
            self.put8(<uint8_t>value)
        elif -(1 << 15) <= value < 1 << 16:
            self.put8(c"s" if value < 1 << 15 else c"u")
            self.put16(<uint16_t>value)
        elif -(<int64_t>1 << 31) <= value < <int64_t>1 << 32:
            self.put8(c"I" if value < <int64_t>1 << 31 else c"i")
            self.put32(<uint32_t>value)
        else:
            self.put8(c"l")
            self.put64(<uint64_t>value)
        return at


cdef inline const uint8_t *text_of(bytes text) noexcept:
    return <const uint8_t *>PyBytes_AS_STRING(text)


cdef inline Py_ssize_t text_length(const uint8_t *at) noexcept nogil:
    """Return the bytes between a text's quotes; -1 where there is none in ASCII without escapes."""
    cdef const uint8_t *end = at + 1
    if at[0] != c'"':
        return -1
    while 0x20 <= end[0] < 0x80 and end[0] != c'"' and end[0] != c"\\":
        end += 1
    return end - at - 1 if end[0] == c'"' else -1


cdef inline bint is_traceparent(const uint8_t *text, Py_ssize_t size) noexcept nogil:
    """Whether `message.TRACEPARENT` matches."""
    cdef uint8_t trace = 0, parent = 0
    cdef Py_ssize_t n
    if size != TRACEPARENT_BYTES or (text[0] == c"f" and text[1] == c"f"):
        return False
    for n in range(TRACEPARENT_BYTES):
        if n == 2 or n == 35 or n == 52:
            if text[n] != c"-":
                return False
        elif not (c"0" <= text[n] <= c"9" or c"a" <= text[n] <= c"f"):
            return False
        elif 2 < n < 35:
            trace |= text[n] ^ c"0"
        elif 35 < n < 52:
            parent |= text[n] ^ c"0"
    return trace != 0 and parent != 0


cdef class Template:
    """A `frames.Template` whose fields have types."""

    cdef bytes start, properties, names, lane, delivery, end
    cdef Py_ssize_t header_size, table_size, fixed
    cdef bint is_event

    def __cinit__(self, template):
        self.start, self.properties, self.names = template.start, template.properties, template.names
        self.lane, self.delivery, self.end = template.lane, template.delivery, template.end
        self.header_size, self.table_size = template.header_size, template.table_size
        self.is_event = template.is_event
        # The header frame's own size, and its END, are in none of the three.
        self.fixed = len(self.start) + 4 + self.header_size + 1


cdef class Writer:
    """What `encode` of one encoder needs, and the templates that it keeps."""

    cdef object encoder
    cdef dict templates
    cdef Table table
    cdef bint varies_by_key
    cdef uint16_t channel
    cdef Py_ssize_t max_body
    cdef Py_ssize_t max_message_bytes

    def __init__(self, encoder):
        self.encoder = encoder
        self.templates = {}
        self.table = Table({*OURS, *OF_OTHERS, *SENDER_SELECTED, *TRACE_HEADERS, *encoder.identity.stamp})
        self.varies_by_key = encoder.router.uses_aggregate_id
        self.channel = encoder.channel
        self.max_body = encoder.max_body
        if self.max_body <= 0:
            raise ValueError("a frame has room for no byte")
        self.max_message_bytes = encoder.identity.max_message_bytes

    def encode(self, rows, redelivered):
        """Return what `frames.Encoder.encode` does, byte by byte."""
        cdef Buffer buffer = Buffer()
        cdef dict refused = {}
        cdef Py_ssize_t count = 0
        cdef Py_ssize_t refused_size = 0
        cdef bint has_repeats = bool(redelivered)
        for row in rows:
            try:
                self.append(buffer, row, has_repeats and row.id in redelivered)
            except ENCODING_ERRORS as error:
                refused[count] = str(error)
                refused_size += row.size
            count += 1
            if buffer.size + refused_size >= PIECE_BYTES:
                break
        return frames.Encoded(buffer.taken(), count, refused)

    cdef int append(self, Buffer buffer, row, bint redelivered) except -1:
        if not PyTuple_Check(row) or PyTuple_GET_SIZE(row) != ROW_FIELDS:
            raise TypeError(f"{type(row)} is no row")
        cdef int16_t lane = (<tuple>row)[0]
        cdef int64_t id_ = (<tuple>row)[1]
        cdef bytes message_id = (<tuple>row)[2]
        cdef bytes aggregate_id = (<tuple>row)[4]
        cdef bytes headers = (<tuple>row)[9]
        cdef bytes traceparent = (<tuple>row)[10]
        cdef bytes payload = (<tuple>row)[12]
        cdef bytes payload_bytes = (<tuple>row)[13]
        cdef int64_t created_at = (<tuple>row)[14]
        cdef bytes body = payload if payload is not None else payload_bytes if payload_bytes is not None else b""
        cdef Py_ssize_t size = len(body)
        cdef Template template = self.template(row, payload is None)

        if (<tuple>row)[17] is not None or size > self.max_message_bytes:
            check_row(row, self.encoder.identity)
        if message_id is None or len(message_id) != MESSAGE_ID_BYTES:
            self.encoder.refuse_message_id(row)
        cdef Py_ssize_t own
        if template.is_event:
            body, further = self.encoder.event(row, redelivered=redelivered)
            size = len(body)
            own = self.put_further(further)
        else:
            own = self.write_table(row, headers, traceparent, redelivered)
        if aggregate_id is not None:
            own += len(KEY_ENTRY) + 4 + len(aggregate_id)
        cdef Py_ssize_t header_size = template.header_size + own
        if header_size > self.max_body:
            self.encoder.check_header(header_size)
        cdef int64_t seconds = created_at // MICROSECONDS + EPOCH
        if not 0 <= seconds <= LATEST:
            seconds = unix_time(row)
        cdef Py_ssize_t frames_of_body = (size + self.max_body - 1) // self.max_body
        buffer.room(template.fixed + own + size + frames_of_body * (BODY_START + 1))

        buffer.put(template.start)
        buffer.put32(<uint32_t>header_size)
        buffer.put32(BASIC_CONTENT)
        buffer.put64(<uint64_t>size)
        buffer.put16(FLAGS)
        buffer.put(template.properties)
        buffer.put32(<uint32_t>(template.table_size + own))
        buffer.put(template.names)
        buffer.put64(<uint64_t>id_)
        buffer.put(template.lane)
        buffer.put16(<uint16_t>lane)
        if aggregate_id is not None:
            buffer.put(KEY_ENTRY)
            buffer.put32(<uint32_t>len(aggregate_id))
            buffer.put(aggregate_id)
        buffer.copy(data_of(self.table.data), self.table.size)
        buffer.put(template.delivery)
        buffer.put(message_id)
        buffer.put64(<uint64_t>seconds)
        buffer.put(template.end)  # with the header frame's end
        self.put_body(buffer, body)
        return 0

    cdef Py_ssize_t write_table(self, row, bytes headers, bytes traceparent, bint redelivered) except -1:
        """Write the entries beyond those that every message has into `table`; return how many bytes they have."""
        if redelivered or (<tuple>row)[11] is not None or not self.table.write(headers, traceparent):
            return self.put_further(self.encoder.further(row, redelivered=redelivered))
        return self.table.size

    cdef Py_ssize_t put_further(self, bytes further) except -1:
        """Put encoded entries into `table`; return how many bytes they have."""
        self.table.size = 0
        self.table.room(len(further))
        self.table.put(further)
        return self.table.size

    cdef void put_body(self, Buffer buffer, bytes body) noexcept:
        """Write the body in as many frames as it needs; an empty one has no frame at all."""
        cdef const char *data = PyBytes_AS_STRING(body)
        cdef Py_ssize_t left = len(body)
        cdef Py_ssize_t part
        while left > 0:
            part = min(left, self.max_body)
            buffer.put8(BODY)
            buffer.put16(self.channel)
            buffer.put32(<uint32_t>part)
            buffer.copy(data, part)
            buffer.put8(END)
            data += part
            left -= part

    cdef Template template(self, row, bint is_binary):
        """Return the template of the row's kind."""
        fields = <tuple>row
        kind = (
            fields[3], fields[5], fields[6], fields[7], fields[8], is_binary, fields[21],
            fields[4] if self.varies_by_key else None,
        )
        template = self.templates.get(kind)
        if template is None:
            if len(self.templates) >= frames.TEMPLATES_KEPT:
                self.templates.clear()
            template = self.templates[kind] = Template(self.encoder.template(row))
        return template


class CompiledEncoder(frames.Encoder):
    """See `frames.Encoder`."""

    def __init__(self, channel, frame_max, router, identity):
        super().__init__(channel, frame_max, router, identity)
        self._writer = Writer(self)

    def encode(self, rows, redelivered):
        return self._writer.encode(rows, redelivered)
