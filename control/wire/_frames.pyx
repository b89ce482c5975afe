# cython: boundscheck=False, wraparound=False
"""Frames of calls, casts, answers and signs of life, to bytes and back in C; `control.wire.frames` does all others.

That can do these as well, by the layouts of `control.wire.codec`. So whatever is not quite usual is left to it, with the
frame that it is in: other messages, payloads that are lent, calls with several segments, frames that do not parse.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from skipper.control.wire.codec import HEADER, LAYOUTS, NUMBERED, SIZE, TRACED
from skipper.control.wire.messages import (
    NO_EXTENT,
    Call,
    Cast,
    CastAnswers,
    Kind,
    Ping,
    Reply,
    decode_shape,
    encode_shape,
)

cdef extern from "Python.h":
    object PyType_GenericAlloc(type cls, Py_ssize_t count)

cdef extern from "endian.h" nogil:
    uint16_t htole16(uint16_t number)
    uint32_t htole32(uint32_t number)
    uint64_t htole64(uint64_t number)
    uint16_t le16toh(uint16_t number)
    uint32_t le32toh(uint32_t number)
    uint64_t le64toh(uint64_t number)

cdef enum:
    WHOLE_ = 0
    REPLIES_ = 3
    CALL_ = 1
    REPLY_ = 2
    PING_ = 5
    CAST_ = 9
    ANSWERS_ = 10
    TRACED_ = 1
    NUMBERED_ = 2
    HEAD_NBYTES_ = 18  # kind, options, size of the fields, number of segments, size of the only one
    CALL_NBYTES_ = 24  # target, port, rank, size of the method, size of the extent
    REPLY_NBYTES_ = 12  # port, rank
    PING_NBYTES_ = 16  # process id, namespace
    SIZE_NBYTES_ = 8  # of a segment
    # route, number, what is settled, target, port, sizes of the method, the extent and the moves
    CAST_NBYTES_ = 48
    ANSWERS_NBYTES_ = 29  # route, number, port, whether they are home, size of the entries
    ENTRY_NBYTES_ = 9  # rank, kind, number of segments
    MOST_NBYTES_ = 1 << 14
    # Larger segments arrive as views of their frame, smaller ones as bytes of their own: those cost no more, and what
    # is not opened for long keeps no frame in memory.
    SMALL_NBYTES_ = 1 << 11

MOST_NBYTES = MOST_NBYTES_
"""Of what `encode_short` returns, which so fits a piece."""

cdef type _Call = Call
cdef type _Reply = Reply
cdef type _Ping = Ping
cdef type _Cast = Cast
cdef type _Answers = CastAnswers
cdef object _NO_EXTENT = NO_EXTENT
cdef object _encode_shape = encode_shape
cdef object _decode_shape = decode_shape
cdef str _method = ""  # of the last call that has come: the next one is often for the same

_codes = tuple(LAYOUTS[cls].codes for cls in (Call, Reply, Ping, Cast, CastAnswers))
_kinds = (Kind.CALL, Kind.REPLY, Kind.PING, Kind.CAST, Kind.ANSWERS)
_others = (HEADER.size + SIZE.size, SIZE.size, TRACED, NUMBERED)
if (
    _codes != ("QQIHH", "QI", "QQ", "QQQQQHHI", "QQQ?I")
    or _kinds != (CALL_, REPLY_, PING_, CAST_, ANSWERS_)
    or _others != (HEAD_NBYTES_, SIZE_NBYTES_, TRACED_, NUMBERED_)
):
    raise AssertionError("control.wire._frames does not know these layouts")


def encode_short(messages):
    """The frame of these messages, as one piece; None where that is not for this module."""
    cdef char frame[MOST_NBYTES_]
    cdef char *at
    cdef const char *method = NULL
    cdef const char *shape = NULL
    cdef Py_ssize_t end = 1, nbytes, method_nbytes, shape_nbytes, trace_nbytes
    cdef uint64_t target, port, sequence
    cdef uint32_t rank
    cdef bint is_call
    frame[0] = REPLIES_
    for message in messages:
        is_call = type(message) is _Call
        if not is_call and type(message) is not _Reply:
            end = _put_ping(frame, end, message) if type(message) is _Ping else _put_of_tree(frame, end, message)
            if end < 0:
                return None
            frame[0] = WHOLE_
            continue
        payload = message.payload
        if type(payload) is not tuple or len(<tuple>payload) != 1:
            return None
        segment = (<tuple>payload)[0]
        if type(segment) is not bytes:
            return None
        trace, sequence, rank = message.trace, message.sequence, message.rank
        trace_nbytes = len(<bytes?>trace)
        method_nbytes = shape_nbytes = 0
        target = 0
        if is_call:
            frame[0] = WHOLE_
            target, port = message.target, message.reply_to
            name, extent = message.method, message.extent
            method = PyUnicode_AsUTF8AndSize(name, &method_nbytes)
            if extent is not _NO_EXTENT:
                packed = _encode_shape(extent)
                shape, shape_nbytes = PyBytes_AS_STRING(<bytes?>packed), PyBytes_GET_SIZE(packed)
        else:
            port = message.port
        nbytes = method_nbytes + shape_nbytes + (CALL_NBYTES_ if is_call else REPLY_NBYTES_)
        if trace_nbytes > 0xFF or method_nbytes > 0xFFFF or shape_nbytes > 0xFFFF:
            return None
        if PyBytes_GET_SIZE(segment) > MOST_NBYTES_ or (
            end + HEAD_NBYTES_ + nbytes + 1 + trace_nbytes + 8 + PyBytes_GET_SIZE(segment) > MOST_NBYTES_
        ):
            return None
        at = frame + end
        at[0] = CALL_ if is_call else REPLY_
        at[1] = (TRACED_ if trace_nbytes else 0) | (NUMBERED_ if sequence else 0)
        at = _put32(_put32(at + 2, nbytes), 1)
        at = _put64(at, PyBytes_GET_SIZE(segment))
        if is_call:
            at = _put32(_put64(_put64(at, target), port), rank)
            at = _put16(_put16(at, method_nbytes), shape_nbytes)
            at = _put(_put(at, method, method_nbytes), shape, shape_nbytes)
        else:
            at = _put32(_put64(at, port), rank)
        if trace_nbytes:
            at[0] = <char><uint8_t>trace_nbytes
            at = _put(at + 1, PyBytes_AS_STRING(trace), trace_nbytes)
        if sequence:
            at = _put64(at, sequence)
        at = _put(at, PyBytes_AS_STRING(segment), PyBytes_GET_SIZE(segment))
        end = at - frame
    return PyBytes_FromStringAndSize(frame, end) if end > 1 else None


def decode_short(bytes frame not None):
    """The messages of a piece that is a whole frame; None where that is not for this module."""
    cdef const char *data = PyBytes_AS_STRING(frame)
    cdef uint64_t end = PyBytes_GET_SIZE(frame), position = 1, fields, nbytes, size, begin
    cdef uint16_t method_nbytes, shape_nbytes
    cdef uint8_t kind, options
    cdef list messages = []
    view = None
    if data[0] != WHOLE_ and data[0] != REPLIES_:
        return None
    while position < end:
        if end - position < HEAD_NBYTES_:
            return None
        kind, options = <uint8_t>data[position], <uint8_t>data[position + 1]
        if kind == CAST_ or kind == ANSWERS_:
            message = _take_of_tree(frame, &position) if data[0] == WHOLE_ else None
            if message is None:
                return None
            messages.append(message)
            continue
        if kind == PING_:
            message = _take_ping(data, end, &position)
            if message is None:
                return None
            messages.append(message)
            continue
        nbytes, size = _get32(data + position + 2), _get64(data + position + 10)
        fields = position + HEAD_NBYTES_
        if _get32(data + position + 6) != 1 or nbytes > end - fields or options > (TRACED_ | NUMBERED_):
            return None
        position = fields + nbytes
        if kind == REPLY_ and nbytes >= REPLY_NBYTES_:
            message = PyType_GenericAlloc(_Reply, 0)
            message.port, message.rank = _get64(data + fields), _get32(data + fields + 8)
        elif kind == CALL_ and nbytes >= CALL_NBYTES_ and data[0] == WHOLE_:
            method_nbytes, shape_nbytes = _get16(data + fields + 20), _get16(data + fields + 22)
            if nbytes - CALL_NBYTES_ < <uint64_t>method_nbytes + shape_nbytes:
                return None
            begin = fields + CALL_NBYTES_
            message = PyType_GenericAlloc(_Call, 0)
            message.target, message.reply_to = _get64(data + fields), _get64(data + fields + 8)
            message.rank = _get32(data + fields + 16)
            try:
                message.method = _text(data + begin, method_nbytes)
                if shape_nbytes:
                    begin += method_nbytes
                    message.extent = _decode_shape(frame[begin : begin + shape_nbytes])
                else:
                    message.extent = _NO_EXTENT
            except Exception:
                return None
        else:
            return None
        if not _take_options(message, options, frame, &position) or size > end - position:
            return None
        if size <= SMALL_NBYTES_:
            message.payload = (PyBytes_FromStringAndSize(data + position, size),)
        else:
            if view is None:
                view = memoryview(frame)
            message.payload = (view[position : position + size],)
        position += size
        messages.append(message)
    return messages or None


cdef Py_ssize_t _put_ping(char *frame, Py_ssize_t end, message) except -2:
    """Put a sign of life behind a frame's end; its new end. -1: that is not for this module."""
    cdef char *at = frame + end
    if message.payload != () or message.trace or message.sequence:
        return -1
    if end + HEAD_NBYTES_ - SIZE_NBYTES_ + PING_NBYTES_ > MOST_NBYTES_:
        return -1
    at[0], at[1] = PING_, 0
    at = _put32(_put32(at + 2, PING_NBYTES_), 0)
    return _put64(_put64(at, message.pid), message.namespace) - frame


cdef object _take_ping(const char *data, uint64_t end, uint64_t *where):
    """The sign of life at a position of a frame, which then is behind it. None: that is not for this module."""
    cdef const char *at = data + where[0]
    cdef uint64_t begin = where[0] + HEAD_NBYTES_ - SIZE_NBYTES_, nbytes = _get32(at + 2)
    if data[0] != WHOLE_ or at[1] or _get32(at + 6) or nbytes < PING_NBYTES_ or nbytes > end - begin:
        return None
    message = PyType_GenericAlloc(_Ping, 0)
    message.pid, message.namespace = _get64(data + begin), _get64(data + begin + 8)
    message.payload, message.trace, message.sequence = (), b"", 0
    where[0] = begin + nbytes
    return message


cdef Py_ssize_t _put_of_tree(char *frame, Py_ssize_t end, message) except -2:
    """Put a cast, or answers to one, behind a frame's end; its new end. -1: that is not for this module."""
    cdef char *at
    cdef const char *method = NULL
    cdef const char *shape = NULL
    cdef Py_ssize_t nbytes, place, count, room, trace_nbytes, method_nbytes = 0, shape_nbytes = 0
    cdef bint is_cast = type(message) is _Cast
    cdef uint64_t sequence
    cdef tuple payload, entries
    cdef bytes trace, segment
    if (not is_cast and type(message) is not _Answers) or type(message.payload) is not tuple:
        return -1
    payload, trace, sequence = message.payload, message.trace, message.sequence
    count, trace_nbytes = len(payload), len(trace)
    if is_cast:
        name, extent = message.method, message.extent
        method = PyUnicode_AsUTF8AndSize(name, &method_nbytes)
        if extent is not _NO_EXTENT:
            packed = _encode_shape(extent)
            shape, shape_nbytes = PyBytes_AS_STRING(<bytes?>packed), PyBytes_GET_SIZE(packed)
        if count != 1 or message.moves or method_nbytes > 0xFFFF or shape_nbytes > 0xFFFF:
            return -1
        nbytes = CAST_NBYTES_ + method_nbytes + shape_nbytes
    else:
        if type(message.entries) is not tuple:
            return -1
        entries = message.entries
        nbytes = ANSWERS_NBYTES_ + len(entries) * ENTRY_NBYTES_
    room = MOST_NBYTES_ - end - HEAD_NBYTES_ - count * SIZE_NBYTES_ - nbytes - 1 - trace_nbytes - 8
    for place in range(count):
        if type(payload[place]) is not bytes:
            return -1
        room -= PyBytes_GET_SIZE(payload[place])
        if room < 0:
            return -1
    if room < 0 or trace_nbytes > 0xFF:
        return -1
    at = frame + end
    at[0] = CAST_ if is_cast else ANSWERS_
    at[1] = (TRACED_ if trace_nbytes else 0) | (NUMBERED_ if sequence else 0)
    at = _put32(_put32(at + 2, nbytes), count)
    for place in range(count):
        at = _put64(at, PyBytes_GET_SIZE(payload[place]))
    if is_cast:
        at = _put64(_put64(_put64(at, message.route), message.number), message.settled)
        at = _put64(_put64(at, message.target), message.reply_to)
        at = _put32(_put16(_put16(at, method_nbytes), shape_nbytes), 0)
        at = _put(_put(at, method, method_nbytes), shape, shape_nbytes)
    else:
        at = _put64(_put64(_put64(at, message.route), message.number), message.port)
        at[0] = 1 if message.is_home else 0
        at = _put32(at + 1, nbytes - ANSWERS_NBYTES_)
        for rank, kind, segments in entries:
            at = _put32(at, rank)
            at[0] = <char><uint8_t>kind
            at = _put32(at + 1, segments)
    if trace_nbytes:
        at[0] = <char><uint8_t>trace_nbytes
        at = _put(at + 1, PyBytes_AS_STRING(trace), trace_nbytes)
    if sequence:
        at = _put64(at, sequence)
    for place in range(count):
        segment = <bytes>payload[place]
        at = _put(at, PyBytes_AS_STRING(segment), PyBytes_GET_SIZE(segment))
    return at - frame


cdef bint _take_options(message, uint8_t options, bytes frame, uint64_t *where) except -1:
    """Give a message the trace and the number at a position of a frame, which then is behind them; whether they fit."""
    cdef const char *data = PyBytes_AS_STRING(frame)
    cdef uint64_t end = PyBytes_GET_SIZE(frame), position = where[0], begin, sequence = 0
    cdef bytes trace = b""
    if options & TRACED_:
        if end - position < 1 or end - position - 1 < <uint8_t>data[position]:
            return False
        begin = position + 1
        position = begin + <uint8_t>data[position]
        trace = frame[begin:position]
    if options & NUMBERED_:
        if end - position < 8:
            return False
        sequence = _get64(data + position)
        position += 8
    message.trace, message.sequence = trace, sequence
    where[0] = position
    return True


cdef object _take_of_tree(bytes frame, uint64_t *where):
    """The cast, or the answers, at a position of a frame, which then is behind it. None: that is not for this module."""
    cdef const char *data = PyBytes_AS_STRING(frame)
    cdef const char *at
    cdef uint64_t end = PyBytes_GET_SIZE(frame), position = where[0], sizes, nbytes, size, begin
    cdef uint32_t count, place, rest_nbytes
    cdef uint16_t method_nbytes, shape_nbytes
    cdef bint is_cast = data[position] == CAST_
    cdef uint8_t options = <uint8_t>data[position + 1]
    cdef list entries, segments = []
    nbytes, count = _get32(data + position + 2), _get32(data + position + 6)
    sizes = position + HEAD_NBYTES_ - SIZE_NBYTES_
    if <uint64_t>count * SIZE_NBYTES_ > end - sizes or (is_cast and count != 1) or options > (TRACED_ | NUMBERED_):
        return None
    begin = sizes + <uint64_t>count * SIZE_NBYTES_
    at = data + begin
    if nbytes > end - begin or nbytes < <uint64_t>(CAST_NBYTES_ if is_cast else ANSWERS_NBYTES_):
        return None
    position = begin + nbytes
    if is_cast:
        method_nbytes, shape_nbytes, rest_nbytes = _get16(at + 40), _get16(at + 42), _get32(at + 44)
        if rest_nbytes or nbytes - CAST_NBYTES_ < <uint64_t>method_nbytes + shape_nbytes:
            return None
        message = PyType_GenericAlloc(_Cast, 0)
        message.route, message.number, message.settled = _get64(at), _get64(at + 8), _get64(at + 16)
        message.target, message.reply_to, message.moves = _get64(at + 24), _get64(at + 32), ()
        try:
            message.method = _text(at + CAST_NBYTES_, method_nbytes)
            begin += CAST_NBYTES_ + method_nbytes
            message.extent = _decode_shape(frame[begin : begin + shape_nbytes]) if shape_nbytes else _NO_EXTENT
        except Exception:
            return None
    else:
        rest_nbytes = _get32(at + 25)
        if rest_nbytes % ENTRY_NBYTES_ or nbytes - ANSWERS_NBYTES_ < rest_nbytes:
            return None
        message = PyType_GenericAlloc(_Answers, 0)
        message.route, message.number, message.port = _get64(at), _get64(at + 8), _get64(at + 16)
        message.is_home = at[24] != 0
        at += ANSWERS_NBYTES_
        entries = []
        for place in range(rest_nbytes // ENTRY_NBYTES_):
            entries.append((_get32(at), <uint8_t>at[4], _get32(at + 5)))
            at += ENTRY_NBYTES_
        message.entries = tuple(entries)
    if not _take_options(message, options, frame, &position):
        return None
    for place in range(count):
        size = _get64(data + sizes + <uint64_t>place * SIZE_NBYTES_)
        if size > end - position:
            return None
        if size <= SMALL_NBYTES_:
            segments.append(PyBytes_FromStringAndSize(data + position, size))
        else:
            segments.append(memoryview(frame)[position : position + size])
        position += size
    message.payload = tuple(segments)
    where[0] = position
    return message


cdef str _text(const char *data, Py_ssize_t nbytes):
    global _method
    cdef Py_ssize_t last_nbytes = 0
    cdef const char *last = PyUnicode_AsUTF8AndSize(_method, &last_nbytes)
    if nbytes != last_nbytes or memcmp(data, last, nbytes) != 0:
        _method = PyUnicode_DecodeUTF8(data, nbytes, NULL)
    return _method


cdef inline char *_put(char *at, const char *data, Py_ssize_t nbytes) noexcept:
    if nbytes > 0:
        memcpy(at, data, nbytes)
    return at + nbytes


cdef inline char *_put16(char *at, uint16_t number) noexcept:
    number = htole16(number)
    memcpy(at, &number, sizeof(number))
    return at + sizeof(number)


cdef inline char *_put32(char *at, uint32_t number) noexcept:
    number = htole32(number)
    memcpy(at, &number, sizeof(number))
    return at + sizeof(number)


cdef inline char *_put64(char *at, uint64_t number) noexcept:
    number = htole64(number)
    memcpy(at, &number, sizeof(number))
    return at + sizeof(number)


cdef inline uint16_t _get16(const char *at) noexcept:
    cdef uint16_t number
    memcpy(&number, at, sizeof(number))
    return le16toh(number)


cdef inline uint32_t _get32(const char *at) noexcept:
    cdef uint32_t number
    memcpy(&number, at, sizeof(number))
    return le32toh(number)


cdef inline uint64_t _get64(const char *at) noexcept:
    cdef uint64_t number
    memcpy(&number, at, sizeof(number))
    return le64toh(number)
