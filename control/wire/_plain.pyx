# cython: boundscheck=False, wraparound=False
"""Pickles of small plain values, as most arguments and results are: `pickle` takes longer to begin than for the rest.

Plain are numbers, texts and bytes, and tuples, lists and dicts of plain values. What is written is a pickle of protocol
5 like any other, without a memo: no list or dict in it occurs twice.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1

cdef extern from "endian.h" nogil:
    uint32_t htole32(uint32_t number)
    uint64_t htole64(uint64_t number)
    uint64_t htobe64(uint64_t number)

cdef enum:
    MOST_NBYTES_ = 1 << 12
    ROOM_ = 16  # that a value takes besides its content, and what ends a pickle
    MOST_CONTAINERS_ = 32
    DEPTH_ = 8  # each level takes a byte of the room of the last value in it, to end

cdef struct Containers:
    int depth
    # The lists and dicts that have been written: one that comes again has to be the same object at the other end.
    int count
    void *seen[MOST_CONTAINERS_]

MOST_NBYTES = MOST_NBYTES_
"""Of a pickle."""


def pickle_value(value):
    """The pickle of a plain value; None where this is not for this module."""
    cdef char pickled[MOST_NBYTES_]
    cdef Containers containers
    containers.depth = containers.count = 0
    cdef char *at = _put_value(_begin(pickled), pickled + MOST_NBYTES_, value, &containers)
    return None if at == NULL else _ended(pickled, at)


def pickle_arguments(tuple args not None, dict kwargs not None):
    """The pickle of ``(args, kwargs)`` where all in it are plain; None where this is not for this module."""
    cdef char pickled[MOST_NBYTES_]
    cdef char *end = pickled + MOST_NBYTES_
    cdef Containers containers
    containers.depth = containers.count = 0
    cdef char *at = _put_items(_begin(pickled), end, args, b"t", &containers)
    if at != NULL:
        at = _put_dict(at, end, kwargs, &containers)
    if at == NULL:
        return None
    at[0] = b"\x86"
    return _ended(pickled, at + 1)


cdef char *_begin(char *at) noexcept:
    at[0], at[1] = b"\x80", 5
    return at + 2


cdef bytes _ended(char *pickled, char *at):
    at[0] = b"."
    return PyBytes_FromStringAndSize(pickled, at + 1 - pickled)


cdef char *_put_value(char *at, char *end, value, Containers *containers) except? NULL:
    """Write a value; NULL where it is not plain, or leaves no room for another one's head and what ends the pickle."""
    cdef Py_ssize_t nbytes = 0
    cdef const char *data
    cdef int overflow = 0
    cdef int64_t number
    cdef uint64_t bits
    cdef double real
    kind = type(value)
    if end - at < 3 * ROOM_:
        return NULL
    if kind is bytes:
        return _put_sized(at, end, b"C", b"B", PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
    if kind is str:
        if not (<str>value).isascii():
            return NULL  # it may hold surrogates, which only pickle passes on
        data = PyUnicode_AsUTF8AndSize(value, &nbytes)
        return _put_sized(at, end, b"\x8c", b"X", data, nbytes)
    if kind is int:
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow:
            return NULL
        at[0], at[1] = b"\x8a", 8
        bits = htole64(<uint64_t>number)
        memcpy(at + 2, &bits, 8)
        return at + 10
    if kind is float:
        real = PyFloat_AS_DOUBLE(value)
        memcpy(&bits, &real, 8)
        bits = htobe64(bits)
        at[0] = b"G"
        memcpy(at + 1, &bits, 8)
        return at + 9
    if value is None:
        at[0] = b"N"
    elif value is True:
        at[0] = b"\x88"
    elif value is False:
        at[0] = b"\x89"
    elif kind is tuple or kind is list or kind is dict:
        return _put_container(at, end, value, kind, containers)
    else:
        return NULL
    return at + 1


cdef char *_put_container(char *at, char *end, values, kind, Containers *containers) except? NULL:
    if containers.depth == DEPTH_ or (kind is not tuple and not _is_first(values, containers)):
        return NULL
    containers.depth += 1
    if kind is tuple:
        at = _put_items(at, end, values, b"t", containers)
    elif kind is list:
        at[0] = b"]"
        at = _put_items(at + 1, end, values, b"e", containers)
    else:
        at = _put_dict(at, end, values, containers)
    containers.depth -= 1
    return at


cdef bint _is_first(container, Containers *containers) noexcept:
    """Whether a list or dict has not been written before; notes that it is now."""
    cdef void *seen = <void *>container
    cdef int number
    if containers.count == MOST_CONTAINERS_:
        return False
    for number in range(containers.count):
        if containers.seen[number] == seen:
            return False
    containers.seen[containers.count] = seen
    containers.count += 1
    return True


cdef char *_put_items(char *at, char *end, values, char what, Containers *containers) except? NULL:
    """Write the values of a tuple or list, and ``what`` they become."""
    at[0] = b"("
    at += 1
    for value in values:
        at = _put_value(at, end, value, containers)
        if at == NULL:
            return NULL
    at[0] = what
    return at + 1


cdef char *_put_dict(char *at, char *end, dict values, Containers *containers) except? NULL:
    at[0] = b"}"
    at += 1
    if not values:
        return at
    at[0] = b"("
    at += 1
    for key, value in values.items():
        at = _put_value(at, end, key, containers)
        if at != NULL:
            at = _put_value(at, end, value, containers)
        if at == NULL:
            return NULL
    at[0] = b"u"
    return at + 1


cdef char *_put_sized(char *at, char *end, char short, char long_, const char *data, Py_ssize_t nbytes) noexcept:
    cdef uint32_t size
    if nbytes > end - at - 3 * ROOM_:
        return NULL
    if nbytes < 256:
        at[0], at[1] = short, <char><uint8_t>nbytes
        at += 2
    else:
        at[0] = long_
        size = htole32(<uint32_t>nbytes)
        memcpy(at + 1, &size, 4)
        at += 5
    memcpy(at, data, nbytes)
    return at + nbytes
