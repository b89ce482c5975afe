"""Part of `_ucp.pyx`: what peers may reach of this process by messages, as its UCX thread looks it up."""

cdef extern from "atomics.h" nogil:
    uint64_t skipper_fetch_add(uint64_t at, uint64_t value)
    uint64_t skipper_compare_and_swap(uint64_t at, uint64_t compare, uint64_t desired)

cdef enum:
    GRANTED = 0
    GONE = 1  # the epoch word is not that of a buffer of ours, or of a later one
    REFUSED_ = 2  # the buffer is there, but that is no part of it, or may not be written

# One buffer.
cdef struct export_t:
    uint64_t epoch  # 0: none
    uint64_t begin
    uint64_t nbytes
    int writable

# The buffers whose epoch words lie in one page, a line for each word.
cdef struct epoch_page_t:
    uint64_t begin
    uint64_t nbytes
    export_t *lines
    epoch_page_t *next

cdef struct exports_t:
    pthread_mutex_t lock
    epoch_page_t *pages


# One stretch of a buffer, as messages name it.
cdef struct item_t:
    uint64_t word_at
    uint64_t word_expected
    uint64_t at
    uint64_t nbytes


cdef export_t *line_of(exports_t *exports, uint64_t word_at) noexcept nogil:
    """The line of a word, or NULL; the lock is held."""
    cdef epoch_page_t *page = exports.pages
    while page != NULL:
        if page.begin <= word_at < page.begin + page.nbytes and word_at % 8 == 0:
            return &page.lines[(word_at - page.begin) // 8]
        page = page.next
    return NULL


cdef int asked_for(exports_t *exports, const item_t *item, int to_write) noexcept nogil:
    """Whether a peer may have that stretch: GRANTED, GONE or REFUSED; the lock is held for as long as it is used."""
    cdef export_t *line = line_of(exports, item.word_at)
    if line == NULL or line.epoch == 0 or line.epoch != item.word_expected:
        return GONE
    if skipper_load(item.word_at) != item.word_expected:
        return GONE
    if item.at < line.begin or item.nbytes > line.nbytes or item.at - line.begin > line.nbytes - item.nbytes:
        return REFUSED_
    if to_write and not line.writable:
        return REFUSED_
    return GRANTED


@cython.no_gc
cdef class Exports:
    """The buffers of this process, in host memory, that peers may name in messages. Thread-safe.

    A buffer whose memory goes is removed first. Its bytes are touched under the lock only, for as long as the copy of
    one message takes: when `remove` returns, nobody is at them, and nobody will be.
    """

    cdef exports_t *state

    def __cinit__(self):
        self.state = <exports_t *>calloc(1, sizeof(exports_t))  # for ever, as is the thread that looks into it
        if self.state == NULL:
            raise MemoryError
        pthread_mutex_init(&self.state.lock, NULL)

    def cover(self, uint64_t begin, uint64_t nbytes):
        """Have lines for a page of epoch words; once for each page, before a buffer of it is added."""
        cdef epoch_page_t *page = <epoch_page_t *>calloc(1, sizeof(epoch_page_t))
        if page == NULL:
            raise MemoryError
        page.begin = begin
        page.nbytes = nbytes
        page.lines = <export_t *>calloc(nbytes // 8, sizeof(export_t))
        if page.lines == NULL:
            free(page)
            raise MemoryError
        with nogil:
            pthread_mutex_lock(&self.state.lock)
            page.next = self.state.pages
            self.state.pages = page
            pthread_mutex_unlock(&self.state.lock)

    def add(self, uint64_t word_at, uint64_t epoch, uint64_t begin, uint64_t nbytes, bint writable):
        """Let peers reach a buffer, until `remove`. Returns whether it was not there before."""
        cdef export_t *line
        cdef bint new = False
        with nogil:
            pthread_mutex_lock(&self.state.lock)
            line = line_of(self.state, word_at)
            if line != NULL and line.epoch != epoch:
                new = True
                line.epoch = epoch
                line.begin = begin
                line.nbytes = nbytes
                line.writable = writable
            pthread_mutex_unlock(&self.state.lock)
        if line == NULL:
            raise KeyError(word_at)
        return new

    def remove(self, uint64_t word_at, uint64_t epoch):
        """Let nobody reach it any more. Waits for the copy that is under way."""
        cdef export_t *line
        with nogil:
            pthread_mutex_lock(&self.state.lock)
            line = line_of(self.state, word_at)
            if line != NULL and line.epoch == epoch:
                line.epoch = 0
            pthread_mutex_unlock(&self.state.lock)
