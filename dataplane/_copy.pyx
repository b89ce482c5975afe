# cython: boundscheck=False, wraparound=False
"""Copies, epoch words, shared memory and buffer addresses, in C; long operations release the GIL.

Nothing here checks an address: `memory`, `layout` and the backends do that before.
"""

cimport cython
from cpython.exc cimport PyErr_SetFromErrno
from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy as c_memcpy

cdef extern from "errno.h" nogil:
    int EMEDIUMTYPE

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
    int PROT_NONE
    int PROT_READ
    int PROT_WRITE
    int MAP_SHARED
    int MAP_PRIVATE
    int MAP_ANONYMOUS
    int MAP_NORESERVE
    int MAP_FIXED
    void *MAP_FAILED
    int MADV_REMOVE
    int MADV_HUGEPAGE

cdef enum:
    HUGE_ = 2 << 20
    # Copied without releasing the GIL: getting it back takes some 5 ms if another thread computes.
    SHORT_ = 4096

cdef extern from "rows.h" nogil:
    ctypedef struct skipper_row:
        pass
    int SKIPPER_ROW_WORDS
    int SKIPPER_MAX_DIMS
    void skipper_copy_rows(const skipper_row *rows, int64_t end, int to_remote, int stream)
    void skipper_stream(char *dst, const char *src, size_t nbytes)

cdef extern from "sealed.h" nogil:
    int skipper_make_sealed(const char *name, int64_t nbytes, int64_t page, const void *header, size_t length)
    int skipper_open_sealed(const char *path, const char *link, int64_t page, int64_t *nbytes, void *header,
                            size_t length)

cdef extern from "atomics.h" nogil:
    uint64_t skipper_fetch_add(uint64_t at, uint64_t value)
    uint64_t skipper_compare_and_swap(uint64_t at, uint64_t compare, uint64_t desired)

cdef extern from *:
    """
    /* A word is read after the data that it guards, and written before their memory changes hands. Arm lets later
     * accesses overtake a store, even a sequentially consistent one. So there are fences. See
     * docs/explanation/memory_order.md. */
    static inline uint64_t skipper_load(uintptr_t at)
    {
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return __atomic_load_n((uint64_t *)at, __ATOMIC_ACQUIRE);
    }
    static inline void skipper_store(uintptr_t at, uint64_t value)
    {
        __atomic_store_n((uint64_t *)at, value, __ATOMIC_SEQ_CST);
    #if defined(__aarch64__)
        /* A network card that reads the word is no thread: C's fence (dmb ish) is for those. Linux' dma_mb(). */
        __asm__ volatile("dmb osh" ::: "memory");
    #else
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    #endif
    }
    """
    uint64_t skipper_load(uintptr_t at) nogil
    void skipper_store(uintptr_t at, uint64_t value) nogil

ROW_WORDS = SKIPPER_ROW_WORDS
MAX_DIMS = SKIPPER_MAX_DIMS
HUGE_PAGE = HUGE_  # what an entry of the second level of page tables maps, on x86-64 and on arm64 with 4 KiB pages
OK = 0
CHANGED = 1
GONE = 2


@cython.final
cdef class BufferView:
    """Holds one export of the buffer protocol: the address of the memory, which is valid while this object lives."""

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
        """Whether the elements are in C order without gaps."""
        cdef Py_ssize_t expected = self.view.itemsize
        cdef int i
        if self.view.len == 0:
            return True
        for i in range(self.view.ndim - 1, -1, -1):
            if self.view.shape[i] != 1 and self.view.strides[i] != expected:
                return False
            expected *= self.view.shape[i]
        return True


cdef void *map_aligned(int fd, size_t nbytes) noexcept nogil:
    """mmap of `nbytes`, whole pages, of a file, aligned if that can help; MAP_FAILED and errno if it fails."""
    cdef char *reserved
    cdef char *begin
    cdef void *mapped
    if nbytes < HUGE_:
        return mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    reserved = <char *>mmap(NULL, nbytes + HUGE_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if reserved == MAP_FAILED:
        return MAP_FAILED
    begin = <char *>((<uintptr_t>reserved + HUGE_ - 1) & ~<uintptr_t>(HUGE_ - 1))
    mapped = mmap(begin, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0)
    if mapped == MAP_FAILED:
        munmap(reserved, nbytes + HUGE_)
        return MAP_FAILED
    if begin != reserved:
        munmap(reserved, begin - reserved)
    munmap(begin + nbytes, reserved + HUGE_ - begin)
    return mapped


@cython.final
cdef class SharedMap:
    """A writable shared mapping of a whole file; unmapped with its last reference.

    It begins at a multiple of a huge page; otherwise the system could not map huge pages. `mmap.mmap` is not used: it
    keeps a duplicate of the descriptor for as long as it lives.
    """

    cdef readonly uintptr_t address
    cdef readonly size_t nbytes

    def __cinit__(self, int fd, size_t nbytes):
        cdef void *mapped
        with nogil:
            mapped = map_aligned(fd, nbytes)
        if mapped == MAP_FAILED:
            PyErr_SetFromErrno(OSError)
        self.address = <uintptr_t>mapped
        self.nbytes = nbytes

    def __dealloc__(self):
        if self.address:
            munmap(<void *>self.address, self.nbytes)

    def advise_huge(self, size_t offset, size_t nbytes):
        """Ask for huge pages if whole ones fit into a range; a hint, which the system may ignore."""
        cdef size_t begin = (offset + HUGE_ - 1) & ~<size_t>(HUGE_ - 1)
        cdef size_t end = (offset + nbytes) & ~<size_t>(HUGE_ - 1)
        if offset > self.nbytes or nbytes > self.nbytes - offset:
            raise ValueError("the range is out of range for the mapping")
        if begin < end:
            with nogil:
                madvise(<void *>(self.address + begin), end - begin, MADV_HUGEPAGE)

    def remove(self, size_t offset, size_t nbytes):
        """Give the pages of a range back to the system, page-aligned, for every process that maps them."""
        cdef int failed
        if offset > self.nbytes or nbytes > self.nbytes - offset:
            raise ValueError("the range is out of range for the mapping")
        with nogil:
            failed = madvise(<void *>(self.address + offset), nbytes, MADV_REMOVE)
        if failed:
            PyErr_SetFromErrno(OSError)


def make_sealed(bytes name, int64_t nbytes, int64_t page, bytes header):
    """Make a memfd of `nbytes` bytes, whose last page begins with `header`, and seal its size; its descriptor.

    Raises:
        OSError: The system has no memory or no descriptor left.
    """
    cdef const char *called = name
    cdef const char *begin = header
    cdef size_t length = len(header)
    cdef int fd
    with nogil:
        fd = skipper_make_sealed(called, nbytes, page, begin, length)
    if fd < 0:
        PyErr_SetFromErrno(OSError)
    return fd


def open_sealed(bytes path, bytes link, int64_t page, size_t length):
    """Open what `make_sealed` has made by its path in /proc, which must lead to `link`.

    Returns:
        A descriptor, the size of the file in bytes, and the first `length` bytes of its last page. None if something
        else has that path by now.

    Raises:
        OSError: It cannot be looked at or opened.
    """
    cdef const char *where = path
    cdef const char *expected = link
    cdef bytes header = PyBytes_FromStringAndSize(NULL, length)
    cdef char *into = header
    cdef int64_t nbytes = 0
    cdef int fd
    with nogil:
        fd = skipper_open_sealed(where, expected, page, &nbytes, into, length)
    if fd < 0:
        if errno == EMEDIUMTYPE:
            return None
        PyErr_SetFromErrno(OSError)
    return fd, nbytes, header


@cython.final
cdef class Block:
    """A writable range of a mapping, with the buffer protocol. Every view of it keeps `owner` alive."""

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


def copy(uintptr_t dst, uintptr_t src, size_t nbytes, bint stream=False):
    """memcpy between two addresses of this process; with `stream` it bypasses the cache, if the processor can."""
    with nogil:
        if stream:
            skipper_stream(<char *>dst, <const char *>src, nbytes)
        else:
            c_memcpy(<void *>dst, <const void *>src, nbytes)


def copy_rows(const int64_t[:, ::1] rows, bint to_remote, bint stream=False):
    """Copies all runs of `rows` (see rows.h); both sides are addresses of this process.

    With `stream` it bypasses the cache, if the processor can: for parts of a copy that would not stay in the cache.
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
    """Whether the process of a pidfd has exited; False for a negative pidfd."""
    return process_gone(pidfd)


cdef int copy_guarded(uintptr_t local, uintptr_t remote, size_t nbytes, bint to_remote, uintptr_t word,
                      uint64_t expected, int pidfd, bint stream) noexcept nogil:
    if to_remote:
        if skipper_load(word) != expected:
            return CHANGED_
        c_memcpy(<void *>remote, <const void *>local, nbytes)
    elif stream:
        skipper_stream(<char *>local, <const char *>remote, nbytes)
    else:
        c_memcpy(<void *>local, <const void *>remote, nbytes)
    if skipper_load(word) != expected:
        return CHANGED_
    return GONE_ if process_gone(pidfd) else OK_


def guarded_copy(uintptr_t local, uintptr_t remote, size_t nbytes, bint to_remote, uintptr_t word, uint64_t expected,
                 int pidfd, bint stream=False):
    """One contiguous copy between the checks of its epoch word: OK, CHANGED or GONE. `stream` is about reads alone."""
    cdef int status
    if nbytes <= SHORT_:
        return copy_guarded(local, remote, nbytes, to_remote, word, expected, pidfd, stream)
    with nogil:
        status = copy_guarded(local, remote, nbytes, to_remote, word, expected, pidfd, stream)
    return status


@cython.final
cdef class GuardedRows:
    """Rows of `nbytes` together, with the epoch words that guard them: a batch that is copied again and again.

    The code that creates it keeps the memory of both sides, and the pidfd, for as long as it copies.
    """

    cdef const int64_t[:, ::1] rows
    cdef const uint64_t[::1] words
    cdef const uint64_t[::1] expected
    cdef int64_t nbytes
    cdef bint to_remote
    cdef int pidfd

    def __cinit__(self, const int64_t[:, ::1] rows, int64_t nbytes, const uint64_t[::1] words,
                  const uint64_t[::1] expected, bint to_remote, int pidfd):
        if rows.shape[0] == 0 or rows.shape[1] != SKIPPER_ROW_WORDS or words.shape[0] != expected.shape[0]:
            raise ValueError("there must be rows of the right width, and a number for each word")
        self.rows = rows
        self.nbytes = nbytes
        self.words = words
        self.expected = expected
        self.to_remote = to_remote
        self.pidfd = pidfd

    def copy(self):
        """Copy all; returns whether the words were right, before a write and at the end, and the owner is alive."""
        cdef bint good
        if self.nbytes <= SHORT_:
            return self.copied()
        with nogil:
            good = self.copied()
        return good

    cdef bint copied(self) noexcept nogil:
        if self.to_remote and first_changed(self.words, self.expected) >= 0:
            return False
        skipper_copy_rows(<const skipper_row *>&self.rows[0, 0], self.rows.shape[0], self.to_remote, False)
        return first_changed(self.words, self.expected) < 0 and not process_gone(self.pidfd)


def guarded_atomic(bint swap, uintptr_t at, uint64_t operand, uint64_t compare, uintptr_t word, uint64_t expected,
                   int pidfd):
    """One atomic operation between the checks of its epoch word: (OK, CHANGED or GONE; what the word held before).

    With the GIL: the operation takes less time than releasing it.
    """
    cdef uint64_t previous
    if skipper_load(word) != expected:
        return CHANGED_, 0
    if process_gone(pidfd):
        return GONE_, 0
    previous = skipper_compare_and_swap(at, compare, operand) if swap else skipper_fetch_add(at, operand)
    if skipper_load(word) != expected:
        return CHANGED_, 0
    if process_gone(pidfd):
        return GONE_, 0
    return OK_, previous


def store_word(uintptr_t address, uint64_t value):
    """Writes the 8-byte word at `address` so that every thread and process sees it before what follows."""
    skipper_store(address, value)


def changed_word(const uint64_t[::1] addresses, const uint64_t[::1] expected):
    """The index of the first word that is not as expected, or -1."""
    return first_changed(addresses, expected)


cdef inline Py_ssize_t first_changed(const uint64_t[::1] addresses, const uint64_t[::1] expected) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(addresses.shape[0]):
        if skipper_load(addresses[i]) != expected[i]:
            return i
    return -1


cdef enum:
    OK_ = 0
    CHANGED_ = 1
    GONE_ = 2
