# cython: boundscheck=False, wraparound=False
"""Copies, epoch words and buffer addresses, in C and without the GIL.

Nothing here checks an address: `memory`, `layout` and the backends do, before they come here.
"""

cimport cython
from cpython.exc cimport PyErr_SetFromErrno
from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy as c_memcpy

cdef extern from "poll.h" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int c_poll "poll"(pollfd *fds, unsigned long nfds, int timeout)
    short POLLIN

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *address, size_t length, int protection, int flags, int fd, long offset)
    int munmap(void *address, size_t length)
    int madvise(void *address, size_t length, int advice)
    int PROT_READ
    int PROT_WRITE
    int MAP_SHARED
    void *MAP_FAILED
    int MADV_REMOVE

cdef extern from *:
    """
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23 /* linux/mman.h since Linux 5.14; madvise(2) */
    #endif
    """
    int MADV_POPULATE_WRITE

cdef extern from "rows.h" nogil:
    ctypedef struct skipper_row:
        pass
    int SKIPPER_ROW_WORDS
    int SKIPPER_MAX_DIMS
    void skipper_copy_rows(const skipper_row *rows, int64_t end, int to_remote, int stream)

cdef extern from *:
    """
    /* A word is read after the data it guards, and written before the memory changes hands: acquire and release. */
    static inline uint64_t skipper_load(uintptr_t at)
    {
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return __atomic_load_n((uint64_t *)at, __ATOMIC_ACQUIRE);
    }
    static inline void skipper_store(uintptr_t at, uint64_t value)
    {
        __atomic_store_n((uint64_t *)at, value, __ATOMIC_SEQ_CST);
    }
    """
    uint64_t skipper_load(uintptr_t at) nogil
    void skipper_store(uintptr_t at, uint64_t value) nogil

ROW_WORDS = SKIPPER_ROW_WORDS
MAX_DIMS = SKIPPER_MAX_DIMS
OK = 0
CHANGED = 1
GONE = 2


@cython.final
cdef class BufferView:
    """Holds one export of the buffer protocol: where the memory lies, and that it stays there while this lives."""

    cdef Py_buffer view
    cdef bint held

    def __cinit__(self, data):
        # Without PyBUF_FORMAT: dtypes that the struct module cannot spell (bfloat16, datetime64) have memory too.
        PyObject_GetBuffer(data, &self.view, PyBUF_STRIDES)
        self.held = True

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)

    @property
    def obj(self):
        """The object that exports the memory."""
        return <object>self.view.obj

    @property
    def address(self):
        return <uintptr_t>self.view.buf

    @property
    def nbytes(self):
        return self.view.len

    @property
    def readonly(self):
        return bool(self.view.readonly)

    @property
    def itemsize(self):
        return self.view.itemsize

    @property
    def shape(self):
        return tuple([self.view.shape[i] for i in range(self.view.ndim)])

    @property
    def strides(self):
        return tuple([self.view.strides[i] for i in range(self.view.ndim)])

    @property
    def contiguous(self):
        """Whether the elements lie in C order without gaps."""
        cdef Py_ssize_t expected = self.view.itemsize
        cdef int i
        if self.view.len == 0:
            return True
        for i in range(self.view.ndim - 1, -1, -1):
            if self.view.shape[i] != 1 and self.view.strides[i] != expected:
                return False
            expected *= self.view.shape[i]
        return True


@cython.final
cdef class SharedMap:
    """A writable shared mapping of a whole file; unmapped with its last reference.

    Not `mmap.mmap`: that one keeps a duplicate of the descriptor for as long as it lives.
    """

    cdef readonly uintptr_t address
    cdef readonly size_t nbytes

    def __cinit__(self, int fd, size_t nbytes):
        cdef void *mapped
        with nogil:
            mapped = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
        if mapped == MAP_FAILED:
            PyErr_SetFromErrno(OSError)
        self.address = <uintptr_t>mapped
        self.nbytes = nbytes

    def __dealloc__(self):
        if self.address:
            munmap(<void *>self.address, self.nbytes)

    def populate(self, size_t offset, size_t nbytes):
        """Map the pages of a range now, page-aligned, in place of one by one at first use; a hint, no promise."""
        if offset > self.nbytes or nbytes > self.nbytes - offset:
            raise ValueError("the range lies outside of the mapping")
        with nogil:
            madvise(<void *>(self.address + offset), nbytes, MADV_POPULATE_WRITE)

    def remove(self, size_t offset, size_t nbytes):
        """Give the pages of a range back to the system, page-aligned, for every process that maps them."""
        cdef int failed
        if offset > self.nbytes or nbytes > self.nbytes - offset:
            raise ValueError("the range lies outside of the mapping")
        with nogil:
            failed = madvise(<void *>(self.address + offset), nbytes, MADV_REMOVE)
        if failed:
            PyErr_SetFromErrno(OSError)


@cython.final
cdef class Block:
    """A writable range of a mapping, offered by the buffer protocol. Whoever views it keeps `owner` alive."""

    cdef readonly uintptr_t address
    cdef readonly Py_ssize_t nbytes
    cdef readonly object owner
    cdef object __weakref__

    def __init__(self, uintptr_t address, Py_ssize_t nbytes, owner):
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void *>self.address, self.nbytes, 0, flags)


def copy(uintptr_t dst, uintptr_t src, size_t nbytes):
    """memcpy between two addresses of this process."""
    with nogil:
        c_memcpy(<void *>dst, <const void *>src, nbytes)


def copy_rows(const int64_t[:, ::1] rows, bint to_remote, bint stream=False):
    """Copies all runs of `rows` (see rows.h); both sides are addresses of this process.

    With `stream` past the cache, where the processor can: for parts of a copy that would not stay in it anyway.
    """
    if rows.shape[0] == 0:
        return
    if rows.shape[1] != SKIPPER_ROW_WORDS:
        raise ValueError(f"a row has {SKIPPER_ROW_WORDS} words, not {rows.shape[1]}")
    with nogil:
        skipper_copy_rows(<const skipper_row *>&rows[0, 0], rows.shape[0], to_remote, stream)


cdef inline bint process_gone(int pidfd) noexcept nogil:
    cdef pollfd watched
    if pidfd < 0:
        return False
    watched.fd = pidfd
    watched.events = POLLIN
    watched.revents = 0
    return c_poll(&watched, 1, 0) > 0


def gone(int pidfd):
    """Whether the process behind a pidfd has exited; a negative pidfd stands for one that cannot have."""
    return process_gone(pidfd)


def guarded_copy(uintptr_t local, uintptr_t remote, size_t nbytes, bint to_remote, uintptr_t word, uint64_t expected,
                 int pidfd):
    """One contiguous copy between the checks of its epoch word: OK, CHANGED or GONE."""
    cdef int status = OK_
    with nogil:
        if to_remote:
            if skipper_load(word) != expected:
                status = CHANGED_
            else:
                c_memcpy(<void *>remote, <const void *>local, nbytes)
        else:
            c_memcpy(<void *>local, <const void *>remote, nbytes)
        if status == OK_ and skipper_load(word) != expected:
            status = CHANGED_
        if status == OK_ and process_gone(pidfd):
            status = GONE_
    return status


def load_word(uintptr_t address):
    """The 8-byte word at `address`, read with acquire order."""
    return skipper_load(address)


def store_word(uintptr_t address, uint64_t value):
    """Writes the 8-byte word at `address` so that every thread and process sees it before what follows."""
    skipper_store(address, value)


def changed_word(const uint64_t[::1] addresses, const uint64_t[::1] expected):
    """The index of the first word that is not as expected, or -1."""
    cdef Py_ssize_t i
    for i in range(addresses.shape[0]):
        if skipper_load(addresses[i]) != expected[i]:
            return i
    return -1


cdef enum:
    OK_ = 0
    CHANGED_ = 1
    GONE_ = 2
