"""Part of `_ucp.pyx`: the short way of a contiguous copy that one thread begins and mostly ends."""


@cython.final
@cython.no_gc
cdef class Way:
    """To one registration of a peer over one connection, for as long as that is usable. Thread-safe.

    What a copy needs is made once and used again: of the microsecond that a copy within the host costs beyond its
    system call, most is memory that the copy itself has driven out of the caches.
    """

    cdef readonly UcpEndpoint endpoint
    cdef tuple keys
    cdef uint64_t word_at
    cdef uint64_t expected
    cdef bint words_here
    cdef bint by_message
    cdef Batch spare  # over and done with, for the next copy

    def __cinit__(self, UcpEndpoint endpoint, tuple keys, uint64_t word_at, uint64_t expected, bint words_here,
                  bint by_message):
        self.endpoint = endpoint
        self.keys = keys
        self.word_at = word_at
        self.expected = expected
        self.words_here = words_here
        self.by_message = by_message

    @property
    def usable(self):
        """Whether nothing has failed on its connection and it is not closed."""
        return self.endpoint.state.handle != NULL and skipper_get(&self.endpoint.state.failed) == 0

    def copy(self, bint to_remote, uintptr_t local, uint64_t remote, int64_t nbytes, double spin_s, double deadline):
        """Copy host memory as `Batch.advance` does; give the batch if it did not succeed at once."""
        cdef Batch batch = self.spare
        self.spare = None  # with the GIL, so that no other thread gets the same
        if batch is None:
            batch = Batch.single(self.endpoint, self.keys, to_remote, UCS_MEMORY_TYPE_HOST, local, remote, nbytes,
                                 self.word_at, self.expected, self.words_here, self.by_message)
        else:
            batch.again(to_remote, local, remote, nbytes)
        if batch.run(spin_s, deadline) != FINISHED_:
            return batch
        if not self.by_message:
            self.spare = batch
        return None
