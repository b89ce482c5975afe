# cython: boundscheck=False, wraparound=False
"""Frames of calls and their answers, to bytes and back in C, as nearly all are; `control.wire.frames` does all others.

That can do these as well, by the layouts of `control.wire.codec`. So whatever is not quite usual is left to it, with the
frame that it is in: other messages, payloads that are lent or of several segments, frames that do not parse.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from skipper.control.wire.codec import HEADER, LAYOUTS, NUMBERED, SIZE, TRACED
from skipper.control.wire.messages import NO_EXTENT, Call, Kind, Reply, decode_shape, encode_shape

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
    TRACED_ = 1
    NUMBERED_ = 2
    HEAD_NBYTES_ = 18  # kind, options, size of the fields, number of segments, size of the only one
    CALL_NBYTES_ = 24  # target, port, rank, size of the method, size of the extent
    REPLY_NBYTES_ = 12  # port, rank
    MOST_NBYTES_ = 1 << 14
    # Larger segments arrive as views of their frame, smaller ones as bytes of their own: those cost no more, and what
    # is not opened for long keeps no frame in memory.
    SMALL_NBYTES_ = 1 << 11

MOST_NBYTES = MOST_NBYTES_
"""Of what `encode_short` returns, which so fits a piece."""

cdef type _Call = Call
cdef type _Reply = Reply
cdef object _NO_EXTENT = NO_EXTENT
cdef object _encode_shape = encode_shape
cdef object _decode_shape = decode_shape
cdef str _method = ""  # of the last call that has come: the next one is often for the same

_known = (LAYOUTS[Call].codes, LAYOUTS[Reply].codes, HEADER.size + SIZE.size, Kind.CALL, Kind.REPLY, TRACED, NUMBERED)
if _known != ("QQIHH", "QI", HEAD_NBYTES_, CALL_, REPLY_, TRACED_, NUMBERED_):
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
            return None
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
    cdef uint64_t end = PyBytes_GET_SIZE(frame), position = 1, fields, nbytes, size, sequence, begin
    cdef uint16_t method_nbytes, shape_nbytes
    cdef uint8_t kind, options
    cdef bytes trace
    cdef list messages = []
    view = None
    if data[0] != WHOLE_ and data[0] != REPLIES_:
        return None
    while position < end:
        if end - position < HEAD_NBYTES_:
            return None
        kind, options = <uint8_t>data[position], <uint8_t>data[position + 1]
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
        trace, sequence = b"", 0
        if options & TRACED_:
            if end - position < 1 or end - position - 1 < <uint8_t>data[position]:
                return None
            begin = position + 1
            position = begin + <uint8_t>data[position]
            trace = frame[begin:position]
        if options & NUMBERED_:
            if end - position < 8:
                return None
            sequence = _get64(data + position)
            position += 8
        if size > end - position:
            return None
        message.trace, message.sequence = trace, sequence
        if size <= SMALL_NBYTES_:
            message.payload = (PyBytes_FromStringAndSize(data + position, size),)
        else:
            if view is None:
                view = memoryview(frame)
            message.payload = (view[position : position + size],)
        position += size
        messages.append(message)
    return messages or None


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
